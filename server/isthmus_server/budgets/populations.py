"""The ledgers of populations, which all jobs of a server share.

{directory}/{population}.ledger    see `isthmus_privacy.dp.ledger`
{directory}/{population}.head      its last line, so that a ledger that was cut is noticed
{directory}/restored               in a directory from a backup: the populations that may be asked

{run}/privacy.shared               the populations that the run was charged to in such a directory
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from isthmus.errors import UserError
from isthmus.names import checked_name
from isthmus.system.clocks import utc
from isthmus.system.private_files import make_private_directory
from isthmus.system.sealed_files import read_sealed, write_sealed
from isthmus_privacy.dp.ledger import Guard, Ledger, LedgerDamaged, LedgerHead, kept_head
from isthmus_server.budgets.charged_runs import PRUNED, charged_runs, refuse_older

DIRECTORY = "privacy"
"""Name of the directory of a server's ledgers."""

SHARED = "privacy.shared"
"""Name of the file in the directory of a run."""

RESTORED = "restored"
"""Name of the file in a directory from a backup."""


class Populations:
    """The ledgers of the populations that some runs share: those of a server, or of a comparison.

    Guarantees:
      * jobs that run at the same time write to one ledger, so that each sees the others' charges;
      * no other process writes to a ledger while a job uses it;
      * a ledger that lacks what one of the runs has charged is not used, also if its head agrees
        with it, or both were removed.
    """

    def __init__(
        self, directory: Path, runs: Sequence[Path] = (), guard: Guard | None = None
    ) -> None:
        """Open nothing yet.

        Args:
            directory: of the ledgers; made when the first one is opened.
            runs: folders with the directories of the runs, with which a ledger is compared when it
                is opened.
            guard: see `Ledger.open`.
        """
        self.directory = directory
        self._guard = guard
        self._runs = runs
        self._open: dict[str, Ledger] = {}
        self._users = collections.Counter[str]()

    @contextlib.contextmanager
    def ledger(self, name: str) -> Iterator[Ledger]:
        """The ledger of a population, for the block; it is begun if there is none.

        Raises:
            LedgerDamaged: it was edited, cut or lost, or its head was, or it is older than a run.
            UserError: another process has it open.
        """
        if name not in self._open:
            self._open[name] = _open(self.directory, name, self._runs, self._guard)
        ledger = self._open[name]
        self._users[name] += 1
        try:
            yield ledger
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                self._open.pop(name).close()

    def has(self, name: str) -> bool:
        """Whether a population has a ledger."""
        return _path(self.directory, name).exists()

    def read(self, name: str) -> Ledger:
        """What the ledger of a population has now; another process may be writing to it.

        Raises:
            LedgerDamaged: it is not the one that was written.
        """
        known = known_head(self.directory, name)
        return Ledger.read(_path(self.directory, name), known)


def mark_restored(directory: Path, at: float, current: Iterable[str]) -> None:
    """Refuse all populations from now on: what they were asked after the backup is not known.

    Args:
        directory: of the ledgers.
        at: when it was restored, Unix seconds.
        current: the populations whose newest ledgers are there.
    """
    make_private_directory(directory)
    write_sealed(directory / RESTORED, {"at": at, "current": sorted(current)})


def accept_population(directory: Path, name: str) -> None:
    """Let a population be asked again that was refused since its directory was restored.

    Raises:
        UserError: the directory was not restored, or the population is not refused.
    """
    checked_name(name)
    try:
        values = read_sealed(directory / RESTORED)
    except FileNotFoundError:
        raise UserError(
            f"{directory.parent} was not restored from a backup: no population is refused"
        ) from None
    if name in values["current"]:
        raise UserError(f"the population {name!r} is not refused")
    mark_restored(directory, values["at"], [*values["current"], name])


def _refuse_older(directory: Path, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        values = read_sealed(directory / RESTORED)
        if name not in values["current"]:
            raise LedgerDamaged(
                f"this server was restored from a backup at {utc(values['at'])}, and what the "
                f"population {name!r} was asked between the two is not known, so nobody of it is "
                "asked; restore with --lost, or, if it was asked nothing in that time or is a new "
                f"one, run: isthmus server population {directory.parent} {name}"
            )


def of_server(state: Path, guard: Guard | None = None) -> Populations:
    """The populations of a server, by its state directory; `guard` as in `Ledger.open`."""
    return Populations(state / DIRECTORY, folders_of_runs(state), guard)


def shared_with(run: Path, name: str) -> Populations | None:
    """The populations of a comparison or a server that a run was begun by; None for one by itself.

    Args:
        run: directory of the run.
        name: of the population, whose ledger is looked for.
    """
    folder = run.resolve().parent
    # The directory of a comparison has its runs, and the ledgers next to them.
    of_comparison = Populations(folder / DIRECTORY, (folder,))
    if of_comparison.has(name):
        return of_comparison
    by_server = of_server_of(run)
    return by_server if by_server is not None and by_server.has(name) else None


def of_server_of(run: Path) -> Populations | None:
    """The populations of the server that has a run; None where its directory is not a server's."""
    folder = run.resolve().parent
    return of_server(folder.parent) if folder.name == "runs" else None


def note_shared(run: Path, name: str) -> None:
    """Note in the directory of a run that it shares the budget of a population, before a charge.

    Raises:
        DamagedError: the file is damaged.
        OSError: it cannot be written.
    """
    known = shared_by(run)
    if name not in known:
        write_sealed(run / SHARED, {"populations": sorted([*known, name])})


def shared_by(run: Path) -> Sequence[str]:
    """The populations whose budget a run shares with others, wherever its directory is now.

    Raises:
        DamagedError: the file is damaged.
        OSError: it cannot be read.
    """
    try:
        return list(read_sealed(run / SHARED)["populations"])
    except FileNotFoundError:
        return []


def folders_of_runs(state: Path) -> Sequence[Path]:
    """Where a server has what its runs have charged, by its state directory."""
    return (state / "runs", state / PRUNED)


def check_populations(state: Path) -> list[str]:
    """Compare the ledgers of a server's populations with its runs; returns their names.

    Nothing is changed, and a server may be running.

    Raises:
        LedgerDamaged: one of them was edited, cut or lost, or is older than a run.
    """
    directory = state / DIRECTORY
    # Before the ledgers of populations: a running server goes on charging both, runs first.
    runs = list(charged_runs(folders_of_runs(state)))
    names = {path.stem for path in directory.glob("*.ledger")}
    names |= {path.stem for path in directory.glob("*.head")}
    for run in runs:
        names |= {entry.charge.population for entry in run.ledger.entries.values()}
    for name in sorted(names):
        path = _path(directory, name)
        known = known_head(directory, name)
        exists = path.exists() or known is not None
        refuse_older(path, Ledger.read(path, known) if exists else None, name, runs)
    return sorted(names)


def known_head(directory: Path, name: str) -> LedgerHead | None:
    """The last line that a population's ledger must have, by the file next to it.

    Raises:
        LedgerDamaged: the file is missing although the ledger has lines, or it is damaged.
    """
    lost = f"what was spent of {name!r} is not known, so nobody is asked"
    return kept_head(_path(directory, name), directory / f"{name}.head", lost)


def _path(directory: Path, name: str) -> Path:
    return directory / f"{name}.ledger"


def _open(
    directory: Path, name: str, folders: Sequence[Path], guard: Guard | None = None
) -> Ledger:
    make_private_directory(directory)
    _refuse_older(directory, name)
    path = _path(directory, name)
    known = known_head(directory, name)
    if known is None and not path.exists():
        # Before there is a file, which would not be missing any more.
        refuse_older(path, None, name, charged_runs(folders))
    ledger = Ledger.open(path, known, guard)
    try:
        unasked = refuse_older(path, ledger, name, charged_runs(folders))
        ledger.keep_head_in(directory / f"{name}.head")
        for charge in unasked:
            ledger.reserve(charge)
    except BaseException:
        ledger.close()
        raise
    return ledger
