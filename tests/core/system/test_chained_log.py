"""Chained logs: damage is noticed, a torn line stays apart, and a failed write leaves nothing."""

import errno
import os

import pytest

from isthmus.system.chained_log import (
    NO_LINE,
    ChainedLog,
    LineTooLong,
    LogEnd,
    append_line,
    line_digest,
)


def take(line, before):
    if not line.startswith(before.digest.encode()):
        raise ValueError(f"line {before.number + 1} does not follow the one before")
    return line_digest(line)


def append(path, log, text):
    line = f"{log.end.digest} {text}".encode()
    with path.open("ab", buffering=0) as file:
        append_line(file.fileno(), line)
    log.follow(line, line_digest(line))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "entries.log"


@pytest.fixture
def ends(path):
    """The ends of a log with three lines, from the empty one."""
    log = ChainedLog(path)
    ends = [log.end]
    for text in "abc":
        append(path, log, text)
        ends.append(log.end)
    return ends


def read(path, **settings):
    log = ChainedLog(path, **settings)
    log.read(take)
    return log


def test_a_log_is_read_with_all_its_lines(path, ends):
    log = read(path)
    assert ends[0] == LogEnd(0, NO_LINE)
    assert log.end == ends[3]
    assert log.size == path.stat().st_size
    assert not log.torn


def test_the_lines_after_a_remembered_end_are_counted(path, ends):
    log = read(path)
    assert [log.lines_after(end) for end in ends] == [3, 2, 1, 0]
    assert log.lines_after(LogEnd(4, ends[3].digest)) is None
    assert log.lines_after(LogEnd(2, ends[3].digest)) is None


@pytest.mark.parametrize("kept", [[1, 2], [0, 2], [0, 0, 1, 2], [0, 2, 1]])
def test_removed_repeated_and_moved_lines_are_noticed(path, ends, kept):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[at] for at in kept))
    with pytest.raises(ValueError, match="does not follow"):
        read(path)


def test_removed_last_lines_are_noticed_by_a_remembered_end_only(path, ends):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    log = read(path)
    assert log.end == ends[2]
    assert log.lines_after(ends[3]) is None


def test_a_torn_line_is_no_line_and_can_be_removed(path, ends):
    whole = path.read_bytes()
    path.write_bytes(whole + b"0123")
    log = read(path)
    assert log.torn == b"0123"
    assert log.end == ends[3]
    log.remove_torn_line(path)
    assert path.read_bytes() == whole
    append(path, log, "d")
    assert read(path).end == log.end


def test_a_line_longer_than_any_that_was_written_is_not_read(path, ends):
    longest = len(path.read_bytes().splitlines()[0])
    assert read(path, max_line=longest).end == ends[3]
    for end in (b"x", b"\n"):
        path.write_bytes(b"x" * (longest + 1) + end)
        with pytest.raises(LineTooLong):
            read(path, max_line=longest)


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_line_that_cannot_be_written_leaves_the_file_as_it_was(path, ends, monkeypatch, failing):
    """The disk is full after a few bytes, or when they are synchronised."""
    whole = path.read_bytes()
    written = []
    write = os.write

    def full(file, data=b""):
        if failing == "write" and not written:
            written.append(write(file, data[:5]))
            return written[0]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = read(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, failing, full)
        with pytest.raises(OSError, match="No space left"):
            append(path, log, "d")
    assert bool(written) == (failing == "write")
    assert path.read_bytes() == whole
    append(path, log, "d")
    assert read(path).lines_after(ends[3]) == 1
