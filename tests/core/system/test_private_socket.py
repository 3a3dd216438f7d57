import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.system.private_socket import private_socket

KILLED = """
import os, socket
from isthmus.system.private_socket import private_socket

with private_socket() as address:
    socket.socket(socket.AF_UNIX).bind(address.removeprefix("unix:"))
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def folder(tmp_path_factory, monkeypatch):
    """An empty temporary folder of the system."""
    path = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return path


def test_the_directory_of_a_killed_run_is_removed_by_the_next(folder):
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    (stale,) = folder.iterdir()
    assert {each.name for each in stale.iterdir()} == {"link", "lock"}
    with private_socket():
        assert stale.exists()  # one that begins might not have its lock yet
    os.utime(stale, (0, 0))
    with private_socket():
        assert not stale.exists()
    assert not list(folder.iterdir())


def test_nothing_else_is_removed(folder):
    """Another run's that goes on, and folders that only have such a name."""
    (folder / "isthmus-notes").mkdir()
    (folder / "isthmus-backup").mkdir()
    (folder / "isthmus-backup" / "lock").touch()
    (folder / "isthmus-backup" / "model.safetensors").touch()
    (folder / "isthmus-link").symlink_to(folder / "isthmus-backup")
    for each in folder.iterdir():
        os.utime(each, (0, 0))
    with private_socket() as address:
        other = Path(address.removeprefix("unix:")).parent
        os.utime(other, (0, 0))
        with private_socket():
            assert other.is_dir()
    names = {each.name for each in folder.iterdir()}
    assert names == {"isthmus-backup", "isthmus-link", "isthmus-notes"}
    assert len(list((folder / "isthmus-backup").iterdir())) == 2


def test_no_temporary_folder_is_reported(folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(folder / "missing"))
    with (
        pytest.raises(UserError, match=r"^there is no folder for temporary files"),
        private_socket(),
    ):
        pass
