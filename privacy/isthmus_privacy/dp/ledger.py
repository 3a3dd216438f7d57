"""The ledger: everything that a population was ever asked for, before it was asked.

A file of JSON lines, each with the hash of the line before it. A charge is on disk before anybody
is asked for what it is about. One line alone takes it back: that it was *released*, because it is
certain that nobody who was asked has accepted. A crash before that line, or a failed attempt that
somebody may have accepted, has spent it. Epsilon is computed from the charges whenever it is
wanted.

>>> import tempfile
>>> from isthmus_privacy.dp.accounting import ZeroConcentrated
>>> path = Path(tempfile.mkdtemp()) / "privacy.ledger"
>>> with Ledger.open(path) as ledger:
...     number = ledger.reserve(Charge(
...         population="devices", unit="device", adjacency="zero-out", mechanism="distributed",
...         event=ZeroConcentrated(rho=0.5), run="demo", round=1, attempt=1, what="round",
...         devices=("a", "b")))
...     ledger.settle(number, "committed")
...     round(ledger.epsilon("devices", 1e-6), 4)
5.2215

What a file cannot know is whether its last lines are missing: `open` compares it with a line that
the caller remembers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Self, get_args

from isthmus.errors import CannotContinue, UserError
from isthmus.system.chained_log import (
    ChainedLog,
    LineTooLong,
    LogEnd,
    append_line,
    line_digest,
)
from isthmus.system.private_files import sync_directory, write_private_file
from isthmus_privacy.dp.accounting import (
    Composition,
    Event,
    event_from_json,
    event_to_json,
)

LEDGER_FILE = "privacy.ledger"
"""Name of a run's ledger in its directory."""

HEAD_FILE = "privacy.head"
"""Name of the file with its last line, next to it."""

MAX_LINE = 1 << 20
"""Bytes of a line: a charge of the largest cohort has a quarter of them."""

Guard = Callable[[], AbstractContextManager[None]]
"""Is entered around each change of a ledger and its head."""

Outcome = Literal["committed", "failed", "released"]
"""How what a charge is about has ended; only `released` gives it back."""


class LedgerDamaged(UserError):
    """The ledger is not the one that was written: what was spent is not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Charge:
    """One release of something that depends on the data of a population."""

    population: str
    """Name of the population."""
    unit: str
    """What a neighbouring data set differs in: device, or example."""
    adjacency: str
    """How it differs: zero-out (zeros in place of it), or add-or-remove."""
    mechanism: str
    event: Event
    run: str
    round: int
    attempt: int
    what: str
    """round, evaluation, comparison or training."""
    devices: tuple[str, ...] = ()
    """Who is asked; empty if it is the whole population."""


class LedgerHead(LogEnd):
    """A line of a ledger that somebody remembers."""

    def __str__(self) -> str:
        """The text that `of` reads."""
        return f"{self.number}:{self.digest}"

    @classmethod
    def of(cls, text: str) -> Self | None:
        """The head that was written as text; None if none was."""
        number, _, digest = text.partition(":")
        return cls(int(number), digest) if number.isdecimal() and digest else None


def _locked(path: Path) -> int | None:
    """Open a ledger to write, and lock it; None if another process has it open."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return file


def kept_head(path: Path, head: Path, lost: str) -> LedgerHead | None:
    """The last line of a ledger that a file next to it names; None if neither was begun.

    Args:
        path: of the ledger.
        head: the file.
        lost: what is not known without it, for the sentence of the error.

    Raises:
        LedgerDamaged: the file is missing although the ledger has lines, or it is damaged.
    """
    known = LedgerHead.of(head.read_text(errors="replace")) if head.exists() else None
    if known is None and (head.exists() or (path.exists() and path.stat().st_size)):
        raise LedgerDamaged(f"{head} is missing or damaged: {lost}; restore it from a backup")
    return known


def last_known(directory: Path, committed: str) -> LedgerHead | None:
    """The last line that a run remembers of its ledger; `committed` is that of its last commit."""
    heads = [LedgerHead.of(committed)]
    with contextlib.suppress(FileNotFoundError):
        heads.append(LedgerHead.of((directory / HEAD_FILE).read_text(errors="replace")))
    return max(filter(None, heads), key=lambda head: head.number, default=None)


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """A charge, with its number and how it ended."""

    number: int
    charge: Charge
    outcome: Outcome | None = None
    """None while it is open, and after a crash: the charge is spent then."""

    @property
    def is_spent(self) -> bool:
        """Whether somebody may have accepted what was charged."""
        return self.outcome != "released"


class Ledger:
    """The charges of a file.

    Guarantees:
      * `reserve` returns when the charge is on disk;
      * a line that was changed, removed or moved is noticed when the file is opened, the last ones
        if they are older than what the caller remembers;
      * one process at a time has it open to write;
      * memory and time in proportion to the charges, and not to what epsilon costs for each device.
    """

    def __init__(self, path: Path, file: int | None, guard: Guard = nullcontext) -> None:
        """Use `open` or `read`."""
        self.path = path
        self._guard = guard
        self.remember: Callable[[LedgerHead], None] = lambda head: None
        """Is called with each line that is on disk, before it is used."""
        self._file = file
        self._log = ChainedLog(path, max_line=MAX_LINE)
        self.entries: dict[int, LedgerEntry] = {}
        self._spent: dict[str, dict[str, Composition]] = {}
        """By population and device; the device "" is everybody."""
        self._outdated: set[str] = set()
        """Populations of which a charge was released since these sums were made."""
        try:
            self._log.read(self._take)
        except LineTooLong:
            raise LedgerDamaged(
                f"the privacy ledger {path} has a line of more than {MAX_LINE} bytes; restore the "
                "file from a backup"
            ) from None

    @classmethod
    def open(cls, path: Path, known: LedgerHead | None = None, guard: Guard | None = None) -> Self:
        """Open a ledger to write, and create it if there is none.

        A last line without its end is of a write that a crash cut short: nobody has used it, and it
        is removed.

        Args:
            path: of the file; its directory exists.
            known: a line that it must have.
            guard: of a server from which another one may take over; keeps that one waiting, or
                raises after it has taken over. A server with a guard does not wait for an earlier
                one that has the ledger open, and cannot write to it any more.

        Raises:
            LedgerDamaged: it is not the one that was written.
            CannotContinue: another process has it open.
        """
        with (guard or nullcontext)():
            file = _locked(path)
            if file is None and guard is not None:
                # Its process goes on with a file that has no name.
                write_private_file(path, path.read_bytes())
                file = _locked(path)
        if file is None:
            raise CannotContinue(
                f"the privacy ledger {path} is in use by another process; end it first"
            )
        try:
            ledger = cls(path, file, guard or nullcontext)
            ledger._check(known)
            ledger._log.remove_torn_line(file)
            # Also the lines that were read: a process that was killed may not have synchronised
            # its last one, and what is charged from now on follows it.
            os.fsync(file)
            sync_directory(path.parent)
        except BaseException:
            os.close(file)
            raise
        return ledger

    @classmethod
    def read(cls, path: Path, known: LedgerHead | None = None) -> Self:
        """Read a ledger, which another process may be writing.

        Raises:
            LedgerDamaged: it is not the one that was written.
        """
        try:
            ledger = cls(path, None)
        except FileNotFoundError:
            raise LedgerDamaged(
                f"there is no privacy ledger {path}: what was spent is not known; restore the file "
                "from a backup"
            ) from None
        ledger._check(known)
        return ledger

    def keep_head_in(self, head: Path) -> None:
        """Write the last line to a file next to the ledger, now and whenever a line was added.

        Raises:
            OSError: it cannot be written; nobody may be asked then.
        """
        self.remember = lambda last: write_private_file(head, str(last).encode())
        with self._guard():  # an earlier server would write what is no longer the last line
            self.remember(self.head)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes open it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def head(self) -> LedgerHead:
        """The last line."""
        end = self._log.end
        return LedgerHead(end.number, end.digest)

    # -- write ---------------------------------------------------------------------------------

    def reserve(self, charge: Charge) -> int:
        """Charge: reserve the epsilon, until `settle`; returns the charge's number, on disk then.

        Raises:
            OSError: it cannot be written, so nobody may be asked.
        """
        table = dataclasses.asdict(charge) | {"event": event_to_json(charge.event)}
        self._append({"charge": table})
        return self.head.number

    def settle(self, number: int, outcome: Outcome) -> None:
        """Note how what a charge is about has ended; unless it was released, it is spent.

        Raises:
            OSError: it cannot be written, so the charge is spent.
        """
        assert self.entries[number].outcome is None
        self._append({"settles": number, "outcome": outcome})

    def _append(self, content: dict[str, Any]) -> None:
        assert self._file is not None
        before = self._log.end
        line = _canonical({"number": before.number + 1, "previous": before.digest, **content})
        if len(line) > MAX_LINE:
            raise UserError(
                f"a charge of {len(line)} bytes does not fit the privacy ledger; invite fewer "
                "devices"
            )
        with self._guard():
            append_line(self._file, line)
            self._log.follow(line, self._take(line, before))
            self.remember(self.head)

    # -- read ----------------------------------------------------------------------------------

    def epsilon(self, population: str, delta: float, plus: Charge | None = None) -> float:
        """What was spent: the largest epsilon of a device of a population.

        Args:
            population: its name.
            delta: at which.
            plus: a further charge, which is only asked about.
        """
        return max(each.epsilon(delta) for each in self.largest(population, plus))

    def epsilon_together(self, populations: tuple[str, str], delta: float) -> float:
        """What was spent of somebody who has one member in each of two populations."""
        first, second = map(self.largest, populations)
        return max(one.together_with(two).epsilon(delta) for one in first for two in second)

    def largest(self, population: str, plus: Charge | None = None) -> list[Composition]:
        """What the devices were asked for, without what another one was asked for too."""
        spent = dict(self._spent_of(population))
        if plus is not None:
            for name in plus.devices or ("",):
                spent[name] = spent.get(name, Composition()).plus(plus.event)
        everybody = spent.pop("", Composition())
        largest: list[Composition] = [everybody]
        for each in {everybody.together_with(one) for one in spent.values()}:
            if not any(other.covers(each) for other in largest):
                largest = [other for other in largest if not each.covers(other)] + [each]
        return largest

    def spent_by(self, population: str, device: str) -> Composition:
        """Everything that one device of a population was asked for."""
        spent = self._spent_of(population)
        everybody = spent.get("", Composition())
        return everybody.together_with(spent.get(device, Composition()))

    def of_run(self, run: str) -> list[LedgerEntry]:
        """The charges of one run, in order, those that were released included."""
        return [entry for entry in self.entries.values() if entry.charge.run == run]

    def _spent_of(self, population: str) -> dict[str, Composition]:
        """What each device of a population was asked for."""
        if population in self._outdated:
            # Added up anew, and only when it is wanted: floats that were subtracted from a sum
            # would not leave what was there before.
            self._outdated.discard(population)
            self._spent.pop(population, None)
            for entry in self.entries.values():
                if entry.charge.population == population and entry.is_spent:
                    self._add(entry.charge)
        return self._spent.get(population, {})

    # -- lines ---------------------------------------------------------------------------------

    def _take(self, line: bytes, before: LogEnd) -> str:
        """Add what a line says; returns its hash."""
        number = before.number + 1
        try:
            table = json.loads(line)
            fits = (
                line == _canonical(table)
                and table.pop("number") == number
                and table.pop("previous") == before.digest
            )
            if not fits:
                raise ValueError("it does not follow the line before it")
            if "charge" in table:
                self._charge(number, table["charge"])
            else:
                entry = self.entries[table["settles"]]
                outcome = table["outcome"]
                if outcome not in get_args(Outcome):
                    raise ValueError(f"the outcome {outcome!r} is not known")
                if entry.outcome is not None:
                    raise ValueError(f"the charge {entry.number} has ended before")
                if outcome == "released":
                    self._outdated.add(entry.charge.population)
                self.entries[entry.number] = dataclasses.replace(entry, outcome=outcome)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LedgerDamaged(
                f"line {number} of the privacy ledger {self.path}, or the one before it, was "
                f"changed ({error}): what was spent is not known, so nobody is asked; restore the "
                "file from a backup"
            ) from None
        return line_digest(line)

    def _charge(self, number: int, table: dict[str, Any]) -> None:
        event = event_from_json(table["event"])
        devices = tuple(map(sys.intern, table["devices"]))
        charge = Charge(**{**table, "event": event, "devices": devices})
        self.entries[number] = LedgerEntry(number, charge)
        self._add(charge)

    def _add(self, charge: Charge) -> None:
        event = charge.event
        spent = self._spent.setdefault(charge.population, {})
        nothing = Composition()
        sums = dict[int, tuple[Composition, Composition]]()
        for name in charge.devices or ("",):
            before = spent.get(name, nothing)
            if id(before) not in sums:  # devices share few compositions, of which this is fast
                sums[id(before)] = before, before.plus(event)
            spent[name] = sums[id(before)][1]

    def _check(self, known: LedgerHead | None) -> None:
        if known is None:
            return
        if known.number > self.head.number:
            raise LedgerDamaged(
                f"the privacy ledger {self.path} has {self.head.number} lines and had "
                f"{known.number}: the last ones were removed; restore the file from a backup"
            )
        if self._log.lines_after(known) is None:
            raise LedgerDamaged(
                f"line {known.number} of the privacy ledger {self.path} is not the one that was "
                "written; restore the file from a backup"
            )


def _canonical(table: dict[str, Any]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
