"""The head of a database is whole after a crash at any instant, and each of its bytes counts."""

import os
from pathlib import Path

import pytest

from isthmus.errors import DamagedError
from isthmus.system.sealed_files import write_sealed
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

    def fail(*about):
        raise OSError("the power is gone")

    monkeypatch.setattr(os, "pwrite", fail)
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
