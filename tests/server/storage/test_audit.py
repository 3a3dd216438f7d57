"""The audit log: every change of it is noticed, and writers do not disturb each other."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from isthmus.errors import UserError
from isthmus.system.chained_log import line_digest
from isthmus_server.storage import audit

FORMAT = (
    '{"time": 1700000000.124, "by": "user me", "action": "revoke", "name": "phone-é", "previous": '
    '"0000000000000000000000000000000000000000000000000000000000000000"}\n'
    '{"time": 1700000001.124, "by": "operator me", "action": "cancel", "job": "job-1", "previous": '
    '"aa0085cb2247f25c04c57a9207aebd5564d9a314d9b0381335c17dc5a90375e6"}\n'
)
"""A log of version 0.2.0: `write_format` writes it, and every later version reads it."""

FORMAT_HEAD = """{
 "bytes": 324,
 "last": "bd152b20daca5fba6f691f6402e0f825f2e9eb425ed8bc7277ec783aa773b0c8",
 "sha256": "b263df62e852d4dc85e97555650f25233cab4363118b5d37608271491c2d6dcd"
}
"""


def write_format(state, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1700000000.1239)
    audit.record(state, "revoke", by="user me", name="phone-é")
    monkeypatch.setattr("time.time", lambda: 1700000001.1239)
    audit.record(state, "cancel", by="operator me", job="job-1")


@pytest.fixture
def log(tmp_path):
    for name in ("a", "b", "c"):
        audit.record(tmp_path, "revoke", by="user me", name=name)
    return tmp_path / "audit.log"


def test_only_the_owner_can_read_it(log):
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda lines: lines[1:], "line 1 does not continue an empty log"),
        (lambda lines: [lines[0], lines[2]], "line 2 does not continue line 1"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], "line 2 does not continue line 1"),
        (lambda lines: [lines[0][:20], *lines[1:]], "line 1 is not a record"),
        (lambda lines: [lines[0].replace('"a"', '"x"'), *lines[1:]], "line 2 does not continue"),
    ],
    ids=["removed first", "removed", "inserted", "cut short", "changed"],
)
def test_a_change_is_reported_with_its_line(log, tmp_path, change, sentence):
    log.write_text("\n".join(change(log.read_text().splitlines())) + "\n")
    with pytest.raises(UserError, match=f"was changed: {sentence}"):
        audit.read(tmp_path)


def test_the_bytes_of_a_log_are_those_of_earlier_versions(tmp_path, monkeypatch):
    write_format(tmp_path, monkeypatch)
    assert (tmp_path / "audit.log").read_text(encoding="utf-8") == FORMAT
    assert (tmp_path / "audit.head").read_text() == FORMAT_HEAD


def test_a_log_of_an_earlier_version_is_continued(tmp_path, monkeypatch):
    log = tmp_path / "audit.log"
    log.write_text(FORMAT, encoding="utf-8")
    (tmp_path / "audit.head").write_text(FORMAT_HEAD)
    monkeypatch.setattr("time.time", lambda: 1700000002)
    audit.record(tmp_path, "join", by="phone-1")
    assert log.read_text(encoding="utf-8") == FORMAT + (
        '{"time": 1700000002, "by": "phone-1", "action": "join", "previous": '
        '"bd152b20daca5fba6f691f6402e0f825f2e9eb425ed8bc7277ec783aa773b0c8"}\n'
    )
    assert [entry.by for entry in audit.read(tmp_path)] == ["user me", "operator me", "phone-1"]
    (tmp_path / "audit.log").write_text(FORMAT, encoding="utf-8")
    with pytest.raises(UserError, match=r"was cut short to 324 of 460 bytes"):
        audit.read(tmp_path)


def test_writers_at_the_same_time_keep_one_chain(log, tmp_path):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: audit.record(tmp_path, "join", by=f"p{i}"), range(20)))
    entries = audit.read(tmp_path)
    assert {entry.by for entry in entries[3:]} == {f"p{i}" for i in range(20)}


def test_a_line_that_a_crash_cut_short_does_not_merge_with_the_next(log, tmp_path):
    log.write_bytes(log.read_bytes()[:-10])
    audit.record(tmp_path, "cancel", by="operator me", job="job-1")
    with pytest.raises(UserError, match="line 3 is not a record"):
        audit.read(tmp_path)
    assert '"cancel"' in log.read_text().splitlines()[3]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from isthmus_server.storage import audit

template, folder = map(Path, sys.argv[1:3])
write, seal = os.write, audit.write_sealed
left = None

def die_after(file, data):
    global left
    written = write(file, data[:left])
    left -= written
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return written

def die(*arguments):
    if left == "head":
        seal(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

def record():
    audit.record(state, "revoke", by="user me", name="c", mark="m")

for left in [*map(int, sys.argv[3:]), "line", "head"]:
    state = folder / str(left)
    shutil.copytree(template, state)
    child = os.fork()
    if not child:
        audit.write_sealed = die
        if isinstance(left, int):
            os.write = die_after
        record()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, left
"""
"""A process that is killed after each byte of a record, before its head is written and after."""


@pytest.mark.parametrize("first", [True, False])
def test_a_kill_at_each_byte_of_a_record_loses_nothing_that_was_confirmed(first, tmp_path, caplog):
    template = tmp_path / "template"
    template.mkdir()
    names = [] if first else ["a", "b"]
    for name in names:
        audit.record(template, "revoke", by="user me", name=name)
    whole = tmp_path / "whole"
    shutil.copytree(template, whole)
    audit.record(whole, "revoke", by="user me", name="c", mark="m")
    line = audit.size(whole) - audit.size(template)
    # A time without decimals is shorter than one with three.
    cuts = range(1, line - 4, 20 if first else 1)
    subprocess.run([sys.executable, "-c", KILLED, template, tmp_path, *map(str, cuts)], check=True)
    for cut in [*cuts, "line", "head"]:
        state = tmp_path / str(cut)
        recorded = names if isinstance(cut, int) else [*names, "c"]
        caplog.clear()
        assert [entry.details["name"] for entry in audit.read(state)] == recorded, cut
        assert bool(caplog.messages) == isinstance(cut, int)
        # The registry writes again what has no mark, and not what has one.
        assert audit.marks_since(state, 0) == ({"m"} if "c" in recorded else set())
        audit.record(state, "revoke", by="user me", name="d")
        caplog.clear()
        assert [entry.details["name"] for entry in audit.read(state)] == [*recorded, "d"]
        assert not caplog.messages


def test_a_line_of_which_a_crash_cut_only_the_end_is_not_recorded(log, tmp_path, caplog):
    last = log.read_bytes().splitlines()[-1]
    before = {"time": 1, "by": "user me", "action": "revoke", "name": "d", "mark": "m"}
    before["previous"] = line_digest(last)
    with log.open("ab") as file:
        file.write(json.dumps(before).encode())
    assert len(audit.read(tmp_path)) == 3
    assert "ends in a line that a crash cut short" in caplog.text
    assert audit.marks_since(tmp_path, 0) == set()
    audit.record(tmp_path, "revoke", by="user me", name="d", mark="m")
    assert "ended in a line that a crash had cut short" in caplog.text
    assert [entry.details["name"] for entry in audit.read(tmp_path)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_lines_that_were_lost_are_still_missed_after_further_ones(log, tmp_path, kept):
    """The next record once continued what was left, and the loss was not noticed any more."""
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:kept]))
    if not kept:
        log.unlink()
    audit.record(tmp_path, "token", by="user me", name="d")
    with pytest.raises(UserError, match=f"was changed: line {kept + 1} does not continue"):
        audit.read(tmp_path)


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"time": 1e300, "by": "me", "action": "x", "previous": ""}']
)
def test_a_line_that_cannot_be_read_or_printed_is_no_record(log, tmp_path, line):
    log.write_text(log.read_text() + line + "\n")
    with pytest.raises(UserError, match="line 4 is not a record"):
        audit.read(tmp_path)


def test_an_action_that_cannot_be_recorded_leaves_the_log_as_it_was(log, tmp_path, monkeypatch):
    """Half a record once stayed after a full disk, and the log could not be read any more."""
    before = log.read_bytes()
    write = os.write
    room = [5, 0]

    def full(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: room.pop(0)])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(UserError, match=r"No space left on device.*'revoke' is not recorded"):
            audit.record(tmp_path, "revoke", by="user me", name="d")
    assert log.read_bytes() == before
    audit.record(tmp_path, "revoke", by="user me", name="d")
    assert [entry.details["name"] for entry in audit.read(tmp_path)] == ["a", "b", "c", "d"]


def test_an_action_that_cannot_be_recorded_is_reported(tmp_path):
    (tmp_path / "audit.log").mkdir()
    with pytest.raises(UserError, match="so that 'revoke' is not recorded there"):
        audit.record(tmp_path, "revoke", by="user me", name="a")
