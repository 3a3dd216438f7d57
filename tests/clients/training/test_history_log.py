"""The file of a device's history: crashes lose nothing, and any other damage is refused."""

import random

import pytest

from isthmus.errors import UpdateError, UserError
from isthmus.system import private_files
from isthmus_clients.training import history_files, history_log
from isthmus_clients.training.history_files import LogEnd, head_of, write_head
from isthmus_clients.training.history_log import HistoryLog
from isthmus_privacy.secagg.history import Begun, Masked, Unmasked, essential

ENTRIES = [
    Begun("run", 1, 1, 1, 7),
    Masked("run", bytes(32)),
    Unmasked("run", 1, bytes(32), bytes(range(32))),
    Begun("run", 2, 1, 2, 8),
]


@pytest.fixture
def path(tmp_path):
    """A history that was begun and is empty."""
    write_head(tmp_path / "history.log", LogEnd())
    return tmp_path / "history.log"


@pytest.fixture
def written(path):
    log = HistoryLog(path)
    for entry in ENTRIES:
        log.append(entry)
    return path


def files(path):
    return [each.read_bytes() for each in (path, head_of(path))]


def test_entries_are_read_in_order(written):
    assert HistoryLog(written).entries == ENTRIES


def test_every_flip_and_every_cut_is_refused_or_changes_nothing(written):
    choose, before = random.Random(1), files(written)
    for damaged, data in zip((written, head_of(written)), before, strict=True):
        for position in (*range(0, len(data), 7), len(data) - 1):
            flipped = bytearray(data)
            flipped[position] ^= 1 << choose.randrange(8)
            for damage in (bytes(flipped), data[:position]):
                written.write_bytes(before[0])
                head_of(written).write_bytes(before[1])
                damaged.write_bytes(damage)
                with pytest.raises(UserError, match=r"records which sums .* client new-history"):
                    HistoryLog(written)


@pytest.mark.parametrize("missing", ["history.log", "history.head"])
def test_a_missing_file_is_refused(written, missing):
    (written.parent / missing).unlink()
    with pytest.raises(UserError, match="cannot be used"):
        HistoryLog(written)


def test_after_a_crash_before_the_head_was_written_the_entry_is_there(written):
    earlier = head_of(written).read_bytes()
    HistoryLog(written).append(Begun("run", 3, 1, 3, 9))
    head_of(written).write_bytes(earlier)
    assert len(HistoryLog(written).entries) == len(ENTRIES) + 1
    assert head_of(written).read_bytes() != earlier


def test_after_a_crash_within_a_line_the_earlier_entries_are_there(written):
    whole = written.read_bytes()
    written.write_bytes(whole + b"0123456789abcdef")
    assert HistoryLog(written).entries == ENTRIES
    assert written.read_bytes() == whole


def test_two_entries_more_than_the_head_are_refused(written):
    earlier = head_of(written).read_bytes()
    log = HistoryLog(written)
    for attempt in (1, 2):
        log.append(Begun("run", 3, attempt, 2 + attempt, 9))
    head_of(written).write_bytes(earlier)
    with pytest.raises(UserError, match="it has 6 complete lines"):
        HistoryLog(written)


def test_an_entry_that_cannot_be_written_leaves_the_log_as_it_was(written, monkeypatch):
    log, before = HistoryLog(written), files(written)

    def full(*args):
        raise OSError(28, "No space left on device")

    for module, where in ((history_log, "_write"), (history_files, "write_private_file")):
        with monkeypatch.context() as patched:
            patched.setattr(module, where, full)
            with pytest.raises(UpdateError, match="No space left"):
                log.append(Begun("run", 3, 1, 3, 9))
        assert files(written) == before
    log.append(Begun("run", 3, 1, 3, 9))
    assert len(HistoryLog(written).entries) == len(ENTRIES) + 1


def test_two_processes_cannot_write_the_same_log(written):
    one, other = HistoryLog(written), HistoryLog(written)
    one.append(Begun("run", 3, 1, 3, 9))
    with pytest.raises(UpdateError, match="was changed by another process"):
        other.append(Begun("run", 4, 1, 3, 9))


@pytest.fixture
def long(path, monkeypatch):
    """A log with many replaced entries; written without `fsync`, which takes long."""
    with monkeypatch.context() as patched:
        patched.setattr(history_log.os, "fsync", lambda handle: None)
        log = HistoryLog(path)
        for round_ in range(100):
            log.append(Begun("run", round_, 1, round_ + 1, 0))
            if round_ % 10 == 0:
                log.append(Unmasked("run", round_, bytes([round_] * 32), bytes(32)))
    return path


def test_replaced_entries_are_removed_when_the_log_is_read(long):
    before = HistoryLog(long).entries
    after = HistoryLog(long).entries
    assert after == essential(before)
    assert sum(isinstance(entry, Unmasked) for entry in after) == 10
    assert after[-1] == Begun("run", 99, 1, 100, 0)


@pytest.mark.parametrize("written_files", range(3))
def test_a_crash_while_entries_are_removed_loses_nothing(long, monkeypatch, written_files):
    written = []

    def crash(path, data):
        if len(written) == written_files:
            raise KeyboardInterrupt
        written.append(path)
        private_files.write_private_file(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(history_log, "write_private_file", crash)
        patched.setattr(history_files, "write_private_file", crash)
        with pytest.raises(KeyboardInterrupt):
            HistoryLog(long)
    assert essential(HistoryLog(long).entries)[-1] == Begun("run", 99, 1, 100, 0)
    HistoryLog(long).append(Begun("run", 100, 1, 101, 0))
    assert HistoryLog(long).entries[-1] == Begun("run", 100, 1, 101, 0)
