"""The digest of a task's code: the same on all machines with the same Python files."""

import py_compile

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import TaskError
from isthmus.task.code_digest import code_digest
from isthmus.task.packages import install, pack, read

AUTHOR = Ed25519PrivateKey.from_private_bytes(bytes(32))
SOURCE = "table/task.py:Table"
FILES = {
    "task.py": "from .parts import rows\n",
    "parts/__init__.py": "",
    "parts/rows.py": "ROWS = 20\n",
    "README.md": "A table.\n",
}


@pytest.fixture
def copied(tmp_path):
    """A directory of tasks in which the files were copied by hand."""
    for name, text in FILES.items():
        path = tmp_path / "copied" / "table" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "copied"


def test_a_package_has_the_digest_of_a_copy_of_its_files(copied, tmp_path):
    package = pack(copied / "table", "table", AUTHOR)
    install(read(package), tmp_path / "fetched", [AUTHOR.public_key().public_bytes_raw()])
    assert code_digest(SOURCE, tmp_path / "fetched") == code_digest(SOURCE, copied)


@pytest.mark.parametrize("name", ["task.py", "parts/rows.py", "parts/__init__.py"])
def test_every_python_file_in_the_tasks_folder_counts(copied, name):
    before = code_digest(SOURCE, copied)
    path = copied / "table" / name
    path.write_text(path.read_text() + "ROWS = 21\n")
    assert code_digest(SOURCE, copied) != before


def test_an_added_or_renamed_module_changes_the_digest(copied):
    before = code_digest(SOURCE, copied)
    added = copied / "table" / "torch.py"  # could replace an import
    added.write_text("")
    assert code_digest(SOURCE, copied) != before
    added.unlink()
    (copied / "table/parts/rows.py").rename(copied / "table/parts/lines.py")
    assert code_digest(SOURCE, copied) != before


def test_what_running_or_reading_a_task_leaves_does_not_count(copied):
    before = code_digest(SOURCE, copied)
    source = copied / "table/parts/rows.py"
    cache = source.parent / "__pycache__/rows.pyc"
    py_compile.compile(str(source), cfile=str(cache), doraise=True)
    assert cache.is_file()
    (copied / "table/README.md").write_text("Another text.\n")
    (copied / "table/.git").mkdir()
    (copied / "table/.git/hook.py").write_text("")
    (copied / "other.py").write_text("")
    assert code_digest(SOURCE, copied) == before


def test_a_task_without_a_folder_is_its_one_file(tmp_path):
    (tmp_path / "task.py").write_text("ROWS = 20\n")
    before = code_digest("task.py:Table", tmp_path)
    (tmp_path / "other.py").write_text("")
    assert code_digest("task.py:Table", tmp_path) == before
    (tmp_path / "task.py").write_text("ROWS = 21\n")
    assert code_digest("task.py:Table", tmp_path) != before


def test_missing_code_is_one_sentence(tmp_path):
    with pytest.raises(TaskError, match=r"the code of task.source='table/task.py:T' cannot be rea"):
        code_digest("table/task.py:T", tmp_path)
