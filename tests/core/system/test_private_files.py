"""Private files are replaced as a whole, and a killed writer leaves nothing for long."""

import os
import signal
import threading

import pytest
from tests import forked

from isthmus.system.private_files import remove_directory, write_private_file


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


def test_a_directory_of_any_depth_and_mode_is_removed_and_no_link_in_it_is_followed(tmp_path):
    """A task that runs in a sandbox chooses what is in its scratch directory."""
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    for folder in (outside, scratch, scratch / "closed"):
        folder.mkdir()
    (outside / "key").write_text("private")
    (scratch / "link").symlink_to(outside)
    (scratch / "closed" / "file").write_text("x")
    (scratch / "closed").chmod(0)
    deep = os.open(scratch, os.O_RDONLY)
    for _ in range(1200):  # beyond Python's recursion and the longest path
        os.mkdir("deep", dir_fd=deep)
        deeper = os.open("deep", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = deeper
    os.symlink(outside, "link", dir_fd=deep)
    os.close(deep)
    remove_directory(scratch)
    assert list(tmp_path.iterdir()) == [outside]
    assert (outside / "key").read_text() == "private"
    remove_directory(scratch)  # which is absent


def test_several_writers_of_one_file_do_not_fail(tmp_path):
    """Each could take the others' drafts for those of writers that were killed."""
    path = tmp_path / "file"
    failures = []

    def write(data):
        try:
            for _ in range(30):
                write_private_file(path, data)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in (b"a", b"bb", b"ccc")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert path.read_bytes() in (b"a", b"bb", b"ccc")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
