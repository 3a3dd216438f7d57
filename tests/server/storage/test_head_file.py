"""The head of a database is whole after a crash at any instant, and each of its bytes counts."""

import os
import threading
from pathlib import Path

import pytest

from isthmus.errors import DamagedError
from isthmus.system.sealed_files import write_sealed
from isthmus_server.storage import head_file
from isthmus_server.storage.head_file import PLACE, HeadFile, Seal


def seal(changes):
    return Seal(changes, bytes([changes]) * 32)


@pytest.fixture
def head(tmp_path):
    return HeadFile(tmp_path / "things.head")


def test_the_newest_head_is_read_and_an_older_one_is_not_written(head):
    assert head.read() is None
    for changes in (1, 2, 5, 3, 7):
        head.write(seal(changes))
    assert head.read() == seal(7)
    assert head.path.stat().st_mode & 0o777 == 0o600
    assert head.path.stat().st_size == 2 * PLACE


def test_a_crash_while_a_head_is_written_leaves_the_one_before(head, monkeypatch):
    """The bytes of the newest head that are not in the file yet are in one place."""
    head.write(seal(1))
    for changes in range(2, 6):
        before = head.path.read_bytes()
        head.write(seal(changes))
        after = head.path.read_bytes()
        changed = {
            number // PLACE for number in range(len(after)) if before[number] != after[number]
        }
        assert len(changed) == 1
        other = 1 - changed.pop()
        assert before[other * PLACE :][:PLACE] == after[other * PLACE :][:PLACE]

    monkeypatch.setattr(os, "pwrite", _fail)
    with pytest.raises(OSError, match="the power is gone"):
        head.write(seal(6))
    assert head.read() == seal(5)


def test_each_byte_of_both_places_counts(head):
    head.write(seal(1))
    head.write(seal(2))
    whole = head.path.read_bytes()
    for number in [*range(300), *range(PLACE - 3, PLACE + 300), 2 * PLACE - 1]:
        damaged = bytearray(whole)
        damaged[number] ^= 1
        head.path.write_bytes(damaged)
        with pytest.raises(DamagedError, match="it is not what was written"):
            head.read()
    for size in (0, 100, PLACE, 2 * PLACE - 1):
        head.path.write_bytes(whole[:size])
        with pytest.raises(DamagedError):
            head.read()
    head.write(seal(3))  # a damaged one is replaced
    assert head.read() == seal(3)


def test_a_read_that_falls_into_a_write_is_repeated(head, monkeypatch):
    head.write(seal(1))
    whole = head.path.read_bytes()
    contents = [whole[:50] + bytes(50) + whole[100:], whole]
    opened = Path.open

    def open_during_a_write(path, *how):
        with opened(path, "wb") as file:
            file.write(contents.pop(0))
        return opened(path, *how)

    monkeypatch.setattr(Path, "open", open_during_a_write)
    assert head.read() == seal(1)
    assert not contents


def test_a_head_of_an_earlier_version_is_read_and_replaced(head):
    write_sealed(head.path, {"changes": 4, "total": (bytes([4]) * 32).hex()})
    assert head.read() == seal(4)
    head.write(seal(4))
    head.write(seal(5))
    assert head.read() == seal(5)
    assert head.path.stat().st_size == 2 * PLACE


def test_a_head_that_was_not_flushed_is_flushed_by_the_next_write(head, monkeypatch):
    """The process that wrote it was killed before the flush, or the disk failed."""
    head.write(seal(1))
    head.write(seal(2))
    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", _fail)
        with pytest.raises(OSError, match="the power is gone"):
            head.write(seal(3))
    assert head.read() == seal(3)
    written = []
    flush = os.fdatasync
    pwrite = os.pwrite

    def note(file, content, place):
        written.append(place)
        return pwrite(file, content, place)

    def note_flush(file):
        written.append("flushed")
        flush(file)

    monkeypatch.setattr(os, "pwrite", note)
    monkeypatch.setattr(os, "fdatasync", note_flush)
    HeadFile(head.path).write(seal(3))
    # The kernel takes a page for clean whose flush has failed: it is written again.
    assert len(written) == 2
    assert written[1] == "flushed"
    assert head.read() == seal(3)


def test_no_process_overwrites_the_head_that_another_one_writes(head, monkeypatch):
    head.write(seal(1))
    head.write(seal(2))
    places = HeadFile._places
    other = threading.Thread(target=HeadFile(head.path).write, args=(seal(4),))

    def places_with_another_writer(self):
        found = places(self)
        if other.ident is None:
            other.start()
            other.join(0.3)
        return found

    monkeypatch.setattr(HeadFile, "_places", places_with_another_writer)
    head.write(seal(3))
    other.join()
    assert head.read() == seal(4)


def test_of_two_processes_that_write_the_first_head_the_newer_one_stays(head, monkeypatch):
    write = head_file.write_private_file
    other = threading.Thread(target=HeadFile(head.path).write, args=(seal(4),))

    def write_after_another_writer(path, data):
        if other.ident is None:
            other.start()
            other.join(0.3)
        write(path, data)

    monkeypatch.setattr(head_file, "write_private_file", write_after_another_writer)
    head.write(seal(3))
    other.join()
    assert head.read() == seal(4)


def test_a_file_that_is_replaced_while_a_writer_waits_is_opened_again(head, monkeypatch):
    head.write(seal(1))
    checks = []
    in_place = head_file.is_in_place

    def replaced_at_first(file, path):
        if not checks:
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
        checks.append(in_place(file, path))
        return checks[-1]

    monkeypatch.setattr(head_file, "is_in_place", replaced_at_first)
    head.write(seal(2))
    assert checks == [False, True]
    assert head.read() == seal(2)


def _fail(*about):
    raise OSError("the power is gone")
