"""The file of a device's history: crashes lose nothing, and any other damage is refused."""

import random

import pytest

from isthmus.errors import UpdateError, UserError
from isthmus.system import private_files
from isthmus_clients.training import history_files, history_log
from isthmus_clients.training.history_files import EMPTY, head_of, write_head
from isthmus_clients.training.history_log import HistoryLog
from isthmus_privacy.secagg.history import Begun, Masked, Unmasked, essential

ENTRIES = [
    Begun("run", 1, 1, 1, 7),
    Masked("run", bytes(32)),
    Unmasked("run", 1, bytes(32), bytes(range(32))),
    Begun("run", 2, 1, 2, 8),
]

EMPTY_HEAD = b"0 c3ee4aec4f3eccac33bec27be52baecf8875d82ef38857b563190dddf8de37e0\n"
FORMAT = (
    b"6d484ff568245d46ca12043686440b8b973a77ebf166161e95868eb8a41d8966 "
    b'["begun","run",1,1,1,7,0.0]\n'
    b"6e3b3b4536e70a3e82ae422e5d2b37c3a03e435c8975df1ad152196476185472 "
    b'["masked","run","0000000000000000000000000000000000000000000000000000000000000000"]\n'
    b"7a6dec01c42e34d608ec8d3c715bcd91761cdc2dc4e00f2a4ed8de0940fa7c0c "
    b'["unmasked","run",1,"0000000000000000000000000000000000000000000000000000000000000000",'
    b'"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"]\n'
    b"2b5b457d8459a3492e5714a8c1be52dd0230502dfb9db450707798d4ac0a8d53 "
    b'["begun","run",2,1,2,8,0.0]\n'
)
"""`ENTRIES` in a log of version 0.2.0, which every later version writes and reads."""

FORMAT_HEAD = b"4 2b5b457d8459a3492e5714a8c1be52dd0230502dfb9db450707798d4ac0a8d53\n"


@pytest.fixture
def path(tmp_path):
    """A history that was begun and is empty."""
    write_head(tmp_path / "history.log", EMPTY)
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


def test_masked_vectors_are_read_until_a_sum_of_their_model_is_unmasked(path):
    masked = [Masked("run", bytes(32), bytes([way]) * 16, bytes(16), 3) for way in range(2)]
    other = Masked("run", bytes([1]) * 32, bytes(16), bytes(16), 3)
    log = HistoryLog(path)
    for entry in (*masked, other, *masked):
        log.append(entry)
    assert HistoryLog(path).entries == [*masked, other, *masked]
    unmasked = Unmasked("run", 1, bytes(32), bytes(range(32)))
    assert essential([*masked, other, *masked, unmasked]) == [other, unmasked]


def test_the_bytes_of_a_history_are_those_of_earlier_versions(path):
    assert head_of(path).read_bytes() == EMPTY_HEAD
    log = HistoryLog(path)
    for entry in ENTRIES:
        log.append(entry)
    assert files(path) == [FORMAT, FORMAT_HEAD]


@pytest.mark.parametrize("torn", [b"", b"2b5b457d"])
@pytest.mark.parametrize("head", [FORMAT_HEAD, EMPTY_HEAD + FORMAT_HEAD, FORMAT_HEAD + EMPTY_HEAD])
def test_a_history_of_an_earlier_version_is_continued(path, head, torn):
    path.write_bytes(FORMAT + torn)
    head_of(path).write_bytes(head)
    log = HistoryLog(path)
    assert log.entries == ENTRIES
    assert files(path) == [FORMAT, FORMAT_HEAD]
    log.append(Masked("run", bytes(32)))
    digest = b"f0c00c99c6cf19fbe1a0e7368cee179f52b1ce17ad7dd6c294879881e3a40911"
    assert path.read_bytes() == FORMAT + digest + (
        b' ["masked","run","0000000000000000000000000000000000000000000000000000000000000000"]\n'
    )
    assert head_of(path).read_bytes() == b"5 " + digest + b"\n"


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

    for module, where in ((history_log, "append_line"), (history_files, "write_private_file")):
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
