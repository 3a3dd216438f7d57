"""The ledger never forgets a charge, and notices what is done to its file."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.privacy.dp.charges import charge

from isthmus.errors import UserError
from isthmus_privacy.dp.accounting import Composition
from isthmus_privacy.dp.ledger import Ledger, LedgerDamaged, LedgerHead

DELTA = 1e-6

FORMAT = (
    b'{"charge":{"adjacency":"zero-out","attempt":1,"devices":["a","b"],'
    b'"event":{"kind":"zero-concentrated","rho":0.1},"mechanism":"distributed",'
    b'"population":"devices","round":1,"run":"run","unit":"device","what":"round"},"number":1,'
    b'"previous":"0000000000000000000000000000000000000000000000000000000000000000"}\n'
    b'{"number":2,"outcome":"committed",'
    b'"previous":"5d7c43239d0b92c63073eb903737b70a9c6808264848471116b42fcbdacf5eff","settles":1}\n'
    b'{"charge":{"adjacency":"zero-out","attempt":1,"devices":[],'
    b'"event":{"kind":"zero-concentrated","rho":0.1},"mechanism":"distributed",'
    b'"population":"devices","round":2,"run":"run","unit":"device","what":"round"},"number":3,'
    b'"previous":"ad96fa8fa32c62f05d69f24d6b4ef55cf7076ffee25ea110ae61a37274929ac6"}\n'
)
"""A ledger of version 0.2.0: `write_format` writes it, and every later version reads it."""

FORMAT_HEAD = "3:c6c8c846c67ab2631aae22f52be84987f5937b0fa7cbffc879d9f3f3559c69e3"


def write_format(path):
    with Ledger.open(path) as ledger:
        number = ledger.reserve(charge("ab"))
        ledger.settle(number, "committed")
        ledger.reserve(charge((), round=2))
        return ledger.head


def written(path, *charges):
    with Ledger.open(path) as ledger:
        for number, each in enumerate(charges):
            given_number = ledger.reserve(each)
            if number % 2:
                ledger.settle(given_number, "committed")
        return ledger.head


@pytest.fixture
def path(tmp_path):
    return tmp_path / "privacy.ledger"


def test_epsilon_is_that_of_the_device_that_was_asked_most(path):
    written(path, charge("ab"), charge("bc"), charge("c", population="others"))
    ledger = Ledger.read(path)
    twice = Composition(rho=0.2).epsilon(DELTA)
    assert ledger.epsilon("devices", DELTA) == twice
    assert ledger.spent_by("devices", "a") == Composition(rho=0.1)
    assert ledger.epsilon("others", DELTA) == Composition(rho=0.1).epsilon(DELTA)
    assert ledger.epsilon("nobody", DELTA) == 0
    # What was not committed counts as well, and a charge without devices is for all.
    more = charge((), rho=1.0)
    assert ledger.epsilon("devices", DELTA, plus=more) == Composition(rho=1.2).epsilon(DELTA)
    assert ledger.epsilon("devices", DELTA) == twice


def test_a_charge_that_nobody_accepted_is_released_and_others_stay(path):
    with Ledger.open(path) as ledger:
        first = ledger.reserve(charge("ab"))
        released = ledger.reserve(charge("bc", round=2))
        before = ledger.spent_by("devices", "b")
        ledger.settle(released, "released")
        assert ledger.spent_by("devices", "c") == Composition()
        ledger.settle(ledger.reserve(charge("a", round=3)), "committed")
        with pytest.raises(AssertionError):
            ledger.settle(released, "failed")
    again = Ledger.read(path)
    alone = written(path.with_name("other"), charge("ab"), charge("a", round=3))
    other = Ledger.read(path.with_name("other"), alone)
    for device in "abcd":  # the very bits, and not sums from which something was subtracted
        assert again.spent_by("devices", device) == other.spent_by("devices", device)
    assert again.epsilon("devices", DELTA) == other.epsilon("devices", DELTA)
    assert before != again.spent_by("devices", "b")
    assert [each.is_spent for each in again.of_run("run")] == [True, False, True]
    assert again.entries[first].outcome is None


def test_the_file_is_private_and_has_the_same_charges_again(path):
    head = written(path, charge("a"), charge("b", round=2))
    assert path.stat().st_mode & 0o777 == 0o600
    with Ledger.open(path, head) as ledger:
        assert [entry.outcome for entry in ledger.of_run("run")] == [None, "committed"]
        assert ledger.reserve(charge("a")) == 4
    assert Ledger.read(path, head).epsilon("devices", DELTA) > 0


@given(st.data())
def test_any_change_of_the_file_is_noticed(tmp_path_factory, data):
    """Bytes that change, and lines that are removed, repeated or swapped."""
    path = tmp_path_factory.mktemp("ledger") / "privacy.ledger"
    head = written(path, charge("a"), charge("b"), charge("c"))
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    what = data.draw(st.sampled_from(["byte", "remove", "repeat", "swap"]))
    at = data.draw(st.integers(0, len(lines) - 1))
    if what == "byte":
        place = data.draw(st.integers(0, len(before) - 1))
        byte = data.draw(st.integers(0, 255))
        after = before[:place] + bytes([byte]) + before[place + 1 :]
    elif what == "remove":
        after = b"".join(lines[:at] + lines[at + 1 :])
    elif what == "repeat":
        after = b"".join([*lines[: at + 1], lines[at], *lines[at + 1 :]])
    else:
        other = data.draw(st.integers(0, len(lines) - 1))
        lines[at], lines[other] = lines[other], lines[at]
        after = b"".join(lines)
    path.write_bytes(after)
    if after == before:
        assert Ledger.read(path, head).head == head
        return
    for use in (Ledger.read, Ledger.open):
        with pytest.raises(LedgerDamaged, match=r"restore the file from a backup"):
            use(path, head)


def test_the_bytes_of_a_ledger_are_those_of_earlier_versions(path):
    assert str(write_format(path)) == FORMAT_HEAD
    assert path.read_bytes() == FORMAT


@pytest.mark.parametrize("torn", [b"", b'{"number":4,"prev'])
def test_a_ledger_of_an_earlier_version_is_continued(path, torn):
    path.write_bytes(FORMAT + torn)
    head = LedgerHead.of(FORMAT_HEAD)
    with Ledger.open(path, head) as ledger:
        assert ledger.head == head
        assert [entry.outcome for entry in ledger.of_run("run")] == ["committed", None]
        ledger.settle(3, "failed")
    assert path.read_bytes() == FORMAT + (
        b'{"number":4,"outcome":"failed",'
        b'"previous":"c6c8c846c67ab2631aae22f52be84987f5937b0fa7cbffc879d9f3f3559c69e3",'
        b'"settles":3}\n'
    )


def test_lines_that_a_crash_cut_short_were_used_by_nobody(path):
    head = written(path, charge("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"number":2,"prev')
    assert Ledger.read(path, head).head == head
    with Ledger.open(path, head) as ledger:
        ledger.reserve(charge("b"))
    assert Ledger.read(path).head.number == 2
    assert path.read_bytes().startswith(whole)


def test_another_ledger_is_noticed(path, tmp_path):
    head = written(path, charge("a"))
    written(tmp_path / "other", charge("b"))
    with pytest.raises(LedgerDamaged, match=r"line 1 of the privacy ledger .* is not the one"):
        Ledger.read(tmp_path / "other", head)
    with pytest.raises(LedgerDamaged, match=r"has 1 lines and had 2: the last ones were removed"):
        Ledger.read(path, LedgerHead(2, head.digest))


def test_one_process_at_a_time_writes(path):
    with (
        Ledger.open(path),
        pytest.raises(UserError, match=r"in use by another process; end it first"),
    ):
        Ledger.open(path)
    Ledger.open(path).close()


def test_a_full_disk_leaves_the_file_as_it_was(path, monkeypatch):
    with Ledger.open(path) as ledger:
        ledger.reserve(charge("a"))
        before = path.read_bytes()
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="full"):
            ledger.reserve(charge("b"))
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert ledger.reserve(charge("c")) == 2
    assert Ledger.read(path).head.number == 2


def fail(_):
    raise OSError("the disk is full")


WRITER = """
import sys
from pathlib import Path
from tests.privacy.dp.test_ledger import charge
from isthmus_privacy.dp.ledger import Ledger
with Ledger.open(Path(sys.argv[1])) as ledger:
    for number in range(1_000_000):
        print(ledger.reserve(charge("a", round=number)), flush=True)
"""


def test_a_charge_that_was_given_out_survives_kill(path):
    """`kill -9` at some moment between two writes, or within one."""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        for _ in range(25):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
    given_out = max([25, *(int(line) for line in rest[:-1])])
    with Ledger.open(path) as ledger:
        assert len(ledger.entries) in (given_out, given_out + 1)
        assert ledger.epsilon("devices", DELTA) >= Composition(rho=0.1 * given_out).epsilon(DELTA)


def test_many_devices_and_rounds_are_read_in_seconds(path):
    """The largest cohorts of a long run: what is computed is for distinct compositions only."""
    names = [f"device-{number}" for number in range(300)]
    with Ledger.open(path) as ledger:
        for round_ in range(100):
            ledger.reserve(charge(names[round_ % 7 :: 2], round=round_))
    ledger = Ledger.read(path)
    assert len({ledger.spent_by("devices", name) for name in names}) > 1
    assert ledger.epsilon("devices", DELTA) > 0


def test_a_charge_too_long_for_a_line_is_refused(path):
    with Ledger.open(path) as ledger:
        with pytest.raises(UserError, match="does not fit the privacy ledger"):
            ledger.reserve(charge(["x" * 64] * 20_000))
        assert ledger.reserve(dataclasses.replace(charge(), run="next")) == 1
