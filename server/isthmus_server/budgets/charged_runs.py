"""What the runs of a folder have charged, compared with the ledger of their population.

A population's ledger cannot show by itself that it is an older copy, if its head is one too, nor
that both were removed. The runs can: each has its own charges, which were written before those of
the population.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from isthmus.errors import IsthmusError
from isthmus.job import Job
from isthmus_privacy.dp.ledger import (
    LEDGER_FILE,
    Charge,
    Ledger,
    LedgerDamaged,
    LedgerEntry,
    last_known,
)
from isthmus_server.storage.run_description import RunDescription
from isthmus_server.storage.store import Store

PRUNED = "pruned"
"""In the state directory of a server: the ledgers of runs that were deleted, in a folder each."""


@dataclasses.dataclass(frozen=True)
class Absent:
    """Charges of a run that the ledger of their population does not have."""

    lost: Sequence[Charge]
    """Charges that the ledger had: the run has noted how they ended, which it does when both have
    them."""
    unasked: Sequence[Charge]
    """Charges of which this is not known, as after a crash between both ledgers."""


@dataclasses.dataclass(frozen=True)
class ChargedRun:
    """The ledger of one run."""

    directory: Path
    """Directory of the run, with the ledger."""
    ledger: Ledger
    job: Job | None
    """Job of the run; None if only the ledger is left."""

    def charges_of(self, population: str) -> list[LedgerEntry]:
        """Charges of the run for a population, also those of a run that it was branched from."""
        entries = self.ledger.entries.values()
        return [entry for entry in entries if entry.charge.population == population]

    def shown(self, population: str) -> str:
        """Epsilon of its charges of a population, in words; empty if its job is not known."""
        privacies = [] if self.job is None else [self.job.privacy, self.job.datacenter.privacy]
        for privacy in privacies:
            if privacy is not None and privacy.population == population:
                spent = self.ledger.epsilon(population, privacy.delta)
                return f", epsilon {spent:.4g} at delta {privacy.delta:g} for this run alone"
        return ""


def absent_from(shared: Ledger, entries: Sequence[LedgerEntry]) -> Absent:
    """Which of a run's charges of a population the ledger of this population does not have.

    Charges can be equal, as of a round that is done again after a rollback, so they are counted. A
    charge that the population has given back, and the run has not, is one that was changed.
    """
    known = Counter(entry.charge for entry in shared.entries.values())
    spent = Counter(entry.charge for entry in shared.entries.values() if entry.is_spent)
    charged = Counter[Charge]()
    ended = Counter[Charge]()
    lost = []
    unasked = []
    for entry in entries:
        charge = entry.charge
        charged[charge] += 1
        ended[charge] += entry.outcome in ("committed", "failed")
        if charged[charge] > known[charge] and entry.outcome is None:
            unasked.append(charge)
        elif charged[charge] > known[charge] or ended[charge] > spent[charge]:
            lost.append(charge)
    return Absent(lost, unasked)


def charged_runs(folders: Sequence[Path]) -> Iterator[ChargedRun]:
    """The ledgers of all runs in some folders, one at a time.

    Raises:
        LedgerDamaged: one of them is not the one that was written.
    """
    for folder in folders:
        for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
            # Half of a directory that is being deleted, or written, has no run.
            if directory.name.startswith(".") or not directory.is_dir():
                continue
            if (run := charged_run(directory)) is not None:
                yield run


def charged_run(directory: Path) -> ChargedRun | None:
    """The ledger in a directory; None without a run that has charged anything.

    Raises:
        LedgerDamaged: it is not the one that was written.
    """
    path = directory / LEDGER_FILE
    committed = ""
    job = None
    # A run that is damaged is no reason to ask nobody: its ledger has a head of its own.
    with contextlib.suppress(IsthmusError, OSError, sqlite3.Error):
        job = RunDescription.read(directory).job
        if job.privacy is not None or job.datacenter.privacy is not None:
            with contextlib.closing(Store.open(directory)) as store:
                committed = next((state.ledger_head for _, state in store.newest_commits()), "")
    known = last_known(directory, committed)
    if known is None and not path.exists():
        return None
    return ChargedRun(directory, Ledger.read(path, known), job)


def refuse_older(
    path: Path, shared: Ledger | None, population: str, runs: Iterable[ChargedRun]
) -> list[Charge]:
    """Refuse a ledger of a population that lacks what runs have charged.

    Args:
        path: of the ledger.
        shared: it; None if there is no file.
        population: its name.
        runs: that may have charged it.

    Returns:
        Charges that it does not have, and that are to be added: those that a crash kept from it.

    Raises:
        LedgerDamaged: it is an older copy, was removed, or is that of another population; or the
            ledger of a run is damaged.
    """
    if shared is not None:
        _refuse_foreign(path, shared, population)
    add: list[Charge] = []
    for run in runs:
        entries = run.charges_of(population)
        if not entries:
            continue
        if shared is None:  # it is made before a run is charged
            absent = Absent([entry.charge for entry in entries], [])
        else:
            absent = absent_from(shared, entries)
        if absent.lost:
            first = absent.lost[0]
            what = "is missing and had" if shared is None else "does not have"
            raise LedgerDamaged(
                f"{path} {what} {len(absent.lost)} of {len(entries)} charges of the run in "
                f"{run.directory}, the first of {first.what} {first.round} attempt {first.attempt}"
                f"{run.shown(population)}: it was removed, or is an older copy, so what was spent "
                f"of {population!r} is not known and nobody is asked; restore the newer ledger "
                "with its head, or, if another server has charged that run, move it out of "
                f"{run.directory.parent}"
            )
        # A run and a copy of it have the same charge, which is added once.
        add += list((Counter(absent.unasked) - Counter(add)).elements())
    return add


def _refuse_foreign(path: Path, shared: Ledger, population: str) -> None:
    """Refuse the ledger of another population, which was copied or renamed.

    Raises:
        LedgerDamaged: it has charges of another one.
    """
    for entry in shared.entries.values():
        if entry.charge.population != population:
            raise LedgerDamaged(
                f"{path} is the ledger of the population {entry.charge.population!r}, and not of "
                f"{population!r}: it was renamed or copied, so nobody is asked; restore both, with "
                "their heads, from a backup"
            )
