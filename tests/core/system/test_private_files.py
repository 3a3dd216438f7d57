"""Private files are replaced as a whole, and a killed writer leaves nothing for long."""

import os
import signal

import pytest
from tests import forked

from isthmus.system.private_files import write_private_file


def die_while_writing(path):
    os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    write_private_file(path, b"new")


def test_a_killed_writer_leaves_the_file_and_its_draft_is_removed_by_the_next(tmp_path):
    path = tmp_path / "secret"
    write_private_file(path, b"old")
    process = forked.context().Process(target=die_while_writing, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2
    write_private_file(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_no_draft(tmp_path, monkeypatch):
    def fail(handle):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_private_file(tmp_path / "secret", b"new")
    assert list(tmp_path.iterdir()) == []
