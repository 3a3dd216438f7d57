"""The ledgers of populations, which all jobs of a server share.

{directory}/{population}.ledger    see `isthmus_privacy.dp.ledger`
{directory}/{population}.head      its last line, so that a ledger that was cut is noticed
{directory}/restored               in a directory from a backup: the populations that may be asked
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from isthmus.errors import UserError
from isthmus.names import checked_name
from isthmus.system.clocks import utc
from isthmus.system.private_files import make_private_directory
from isthmus.system.sealed_files import read_sealed, write_sealed
from isthmus_privacy.dp.ledger import Ledger, LedgerDamaged, kept_head

RESTORED = "restored"
"""Name of the file in a directory from a backup."""


class Populations:
    """The ledgers of a server's populations.

    Guarantees:
      * jobs that run at the same time write to one ledger, so that each sees the others' charges;
      * no other process writes to a ledger while a job uses it.
    """

    def __init__(self, directory: Path) -> None:
        """`directory` is made when the first ledger is opened."""
        self._directory = directory
        self._open: dict[str, Ledger] = {}
        self._users = collections.Counter[str]()

    @contextlib.contextmanager
    def ledger(self, name: str) -> Iterator[Ledger]:
        """The ledger of a population, for the block; it is begun if there is none.

        Raises:
            LedgerDamaged: it was edited, cut or lost, or its head was.
            UserError: another process has it open.
        """
        if name not in self._open:
            self._open[name] = _open(self._directory, name)
        ledger = self._open[name]
        self._users[name] += 1
        try:
            yield ledger
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                self._open.pop(name).close()


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


def _open(directory: Path, name: str) -> Ledger:
    make_private_directory(directory)
    _refuse_older(directory, name)
    path = directory / f"{name}.ledger"
    head = directory / f"{name}.head"
    lost = f"what was spent of {name!r} is not known, so nobody is asked"
    ledger = Ledger.open(path, kept_head(path, head, lost))
    try:
        ledger.keep_head_in(head)
    except BaseException:
        ledger.close()
        raise
    return ledger
