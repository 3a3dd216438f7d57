"""Code that PyTorch has compiled is executed from where only this user can have written it."""

import errno
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.system.compiled_code import VARIABLE, keep_compiled_code_private

NOBODY = 65534
PROGRAM = """
import contextlib, os, sys
from isthmus.cli import main
sys.argv = ["isthmus", "--version"]
with contextlib.suppress(SystemExit):
    main()
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.fixture
def usual(tmp_path, monkeypatch):
    """The directory that PyTorch uses by default, which is not there yet; none is named."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv(VARIABLE, "")  # so that it is as before afterwards
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "torchinductor_ada"


def test_the_usual_directory_is_made_for_this_user_alone(usual):
    for _ in range(2):
        keep_compiled_code_private()
        assert os.environ[VARIABLE] == str(usual)
        assert usual.stat().st_mode & 0o777 == 0o700


def test_it_is_the_one_that_pytorch_uses(usual):
    cache_dir_utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    keep_compiled_code_private()
    assert cache_dir_utils.default_cache_dir() == str(usual)
    assert cache_dir_utils.cache_dir() == str(usual)


def of_another_user(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    path.mkdir(mode=0o755)
    os.chown(path, NOBODY, NOBODY)


def writable(path):
    path.mkdir()
    path.chmod(0o777)


def link(path):
    path.symlink_to(path.parent)


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (of_another_user, "is of another user"),
        (writable, "can be written by others"),
        (link, "is no directory"),
    ],
)
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named by PyTorch"])
def test_one_that_others_have_made_or_can_write_is_not_used(
    usual, plant, why, named, monkeypatch, caplog
):
    plant(usual)
    if named:
        monkeypatch.setenv(VARIABLE, str(usual))
    with caplog.at_level(logging.WARNING):
        keep_compiled_code_private()
    assert os.environ[VARIABLE].startswith(f"{usual.parent}/isthmus-compiled-")
    assert Path(os.environ[VARIABLE]).stat().st_mode & 0o777 == 0o700
    assert f"because {usual} {why}; remove that, or set {VARIABLE}" in caplog.text


def test_where_there_can_be_no_other_it_is_one_sentence(usual, monkeypatch):
    writable(usual)

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(UserError, match=f"can be written by others, .*No space.*; set {VARIABLE}"):
        keep_compiled_code_private()


def test_one_that_the_user_has_named_stays(usual, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(usual.parent / "own"))
    keep_compiled_code_private()
    assert os.environ[VARIABLE] == str(usual.parent / "own")
    assert not usual.exists()


def test_without_a_folder_for_temporary_files_nothing_is_named(usual, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(usual / "absent"))
    keep_compiled_code_private()
    assert VARIABLE not in os.environ


def test_every_command_does_so(tmp_path):
    kept = {name: text for name, text in os.environ.items() if name != VARIABLE}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**kept, "TMPDIR": str(tmp_path), "LOGNAME": "ada"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines()[-1] == str(tmp_path / "torchinductor_ada")
    assert (tmp_path / "torchinductor_ada").is_dir()
