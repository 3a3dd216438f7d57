"""Every name that comes from elsewhere has one normal form, and anything else is refused.

Names become parts of paths, of keys by which devices remember sums, and of lines in logs. If one
thing had two names, what is remembered under the one would be forgotten under the other.
"""

import json
import unicodedata
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.errors import IsthmusError
from isthmus.job import Job
from isthmus.job.federated import FederatedSection, Groups
from isthmus.job.privacy import PrivacySection
from isthmus.names import checked_name
from isthmus.task import check_installed
from isthmus.task.packages import pack
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import parse
from isthmus_server.regimes.opening import group_of
from isthmus_server.runs.jobs.projects import FILE, Projects

AUTHOR = Ed25519PrivateKey.from_private_bytes(bytes(32))
TASK = {"source": "task.py:Table"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with one file, for whatever is read or written under a name."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "file").write_text("")
    return folder


def packed(name, folder):
    pack(folder, name, AUTHOR)


def packed_file(name, folder):
    """A file of a package, which devices write under this name."""
    if "/" in name or name.startswith(".") or "\0" in name or not name:
        raise UnicodeError("no file can have this name, or it is not packed")
    inner = folder / "packed"
    inner.mkdir(exist_ok=True)
    path = inner / name
    try:
        path.write_text("")
    except OSError:
        raise UnicodeError("too long for a file") from None
    try:
        pack(inner, "packed", AUTHOR)
    finally:
        path.unlink()


def project(name, folder):
    folder.joinpath(FILE).write_text(f"[{json.dumps(name)}]\n", encoding="utf-8")
    Projects.load(folder)


def declared(name, folder):
    """A group that a device says it is in."""
    job = Job(name="a", task=TASK, federated={"groups": {"minimum": 3}})
    if not name:
        raise UnicodeError("none")
    group_of(link_pb2.Opened(group=name), job)


ELSEWHERE = {
    "participant": lambda name, folder: checked_name(name),
    "project": project,
    "job": lambda name, folder: Job(name=name, task=TASK),
    "group of a job": lambda name, folder: Groups(names=(name,)),
    "group of an owner": lambda name, folder: parse(
        f"[privacy]\ngroup = {json.dumps(name)}", "policy.toml"
    ),
    "group of a device": declared,
    "what a package provides": lambda name, folder: FederatedSection(
        secure_aggregation=False, aggregation=name, selection=name
    ),
    "package": packed,
    "file of a package": packed_file,
    "population": lambda name, folder: PrivacySection(
        mechanism="gaussian", epsilon=8, delta=1e-5, noise=1.0, population=name
    ),
}
"""What takes a name from a job, a message, a file or the command line."""

OTHER_FORMS = (
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{ZERO WIDTH SPACE}\N{LATIN SMALL LETTER E WITH ACUTE}"
    "\N{FULLWIDTH LATIN SMALL LETTER A}\N{FULLWIDTH SOLIDUS}\N{FULLWIDTH FULL STOP}"
    "\N{ONE DOT LEADER}\N{CIRCLED DIGIT ONE}\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}"
)
"""Characters that look like others, or become others when a text is normalised."""
LIKE_A_NAME = st.text(
    st.sampled_from("aA0._-/\\ \t\n\r\0:%~*" + OTHER_FORMS) | st.characters(),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("kind", ELSEWHERE)
@given(name=LIKE_A_NAME)
@example(name="a\n")
@example(name="a ")
@example(name="a/../a")
@example(name="./a")
@example(name="..")
@example(name="\N{FULLWIDTH LATIN SMALL LETTER A}")
@example(name="e\N{COMBINING ACUTE ACCENT}")
@settings(max_examples=40, deadline=None)
def test_a_name_that_is_accepted_is_in_its_normal_form(folder, kind, name):
    try:
        ELSEWHERE[kind](name, folder)
    except (IsthmusError, ValidationError, UnicodeError):
        return
    assert name == unicodedata.normalize("NFKC", name).strip()
    assert name.isascii()
    assert name.isprintable()
    assert PurePosixPath("x", name).parts == ("x", name)
    assert PureWindowsPath("x", name).parts == ("x", name)
    assert name not in (".", "..")


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_plain_name_is_accepted(folder, kind):
    """So the test above does not pass because everything is refused."""
    name = "uniform" if kind == "what a package provides" else "plain-name_1.x"
    if kind == "what a package provides":
        FederatedSection(selection=name)
    else:
        ELSEWHERE[kind](name, folder)


# -- tasks -----------------------------------------------------------------------------------------

SOURCE = "survey/sub/task.py:Survey"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    tasks = tmp_path_factory.mktemp("owner") / "tasks"
    for name in ("survey/sub/task.py", "survey/task.py", "other/task.py", "outside.py"):
        (tasks / name).parent.mkdir(parents=True, exist_ok=True)
        (tasks / name).write_text("class Survey: ...\n")
    return tasks


def spelled(draw_from):
    """Ways of naming the same file, and others."""
    return st.lists(st.sampled_from(draw_from), min_size=1, max_size=7).map("/".join)


PARTS = [
    "survey",
    "sub",
    "task.py",
    "other",
    ".",
    "..",
    "",
    "Survey",
    "SUB",
    "tasks",
    "\N{FULLWIDTH LATIN SMALL LETTER S}ub",
    "sub ",
]


@given(where=spelled(PARTS), absolute=st.booleans())
@example(where="survey/../survey/sub/task.py", absolute=False)
@example(where="./survey/sub/task.py", absolute=False)
@example(where="survey//sub/task.py", absolute=False)
@example(where="survey/sub/task.py/", absolute=False)
@example(where="survey/sub/task.py", absolute=False)
@example(where="survey/sub/task.py", absolute=True)
@settings(max_examples=300, deadline=None)
def test_a_task_is_named_as_its_files_are_and_in_no_other_way(tasks, where, absolute):
    source = f"{tasks}/{where}:Survey" if absolute else f"{where}:Survey"
    files = {f"{path.relative_to(tasks).as_posix()}:Survey" for path in tasks.rglob("*.py")}
    try:
        check_installed(source, tasks)
    except IsthmusError:
        assert source not in files
        return
    assert source in files


def test_the_names_of_tasks_in_the_test_are_accepted(tasks):
    check_installed(SOURCE, tasks)
