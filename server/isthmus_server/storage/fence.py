"""The right of one server to change its state directory, until another server has it.

Every server that starts from a directory raises the directory's *epoch*, a number in the header of
its queue of jobs (`PRAGMA application_id`), by one. From then on each earlier one is fenced off,
whatever state it is in: stopped, swapped out, or on a machine that is cut off and comes back.

* What is in a database: its header has the epoch of the server that may write to it, and triggers
  compare it with that of the connection in the transaction of each change. So a round is committed
  in the same atomic step in which its epoch is found to be the current one.
* What is in files: the change is made while a transaction keeps the write lock of the queue, which
  another server needs to raise the epoch. So it is complete before another server begins, or is not
  made.

Both rest on the locks and the atomic commits of SQLite, and so on those of the volume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import TakenOver

QUEUE = "jobs.sqlite"
"""The database of a state directory whose header has the epoch."""

STANDBY = "standby.sqlite"
"""The database with which a server and its standby tell each other that they are alive."""

_LEAST_STEP = 1 << 19
"""More starts than a server has between a backup and its restore."""

_HIGHEST = (1 << 31) - (1 << 20)
"""The number in the header has 31 bits; what is left is for starts."""

_BUSY_SECONDS = 10.0
"""Time to wait for the write lock, which others have for milliseconds."""


@dataclasses.dataclass(frozen=True)
class Takeover:
    """A standby that has taken the place of an earlier server."""

    at: float
    """When, in Unix seconds."""
    by: str
    """The server that serves from then on, such as `process 12 on hub-b`."""
    before: str
    """The earlier one, in the same form."""
    why: str
    """Why, in words that follow after a name: `had ended`, `was gone` or that it was silent."""


@dataclasses.dataclass(frozen=True)
class KeptTakeover:
    """A takeover by another server, which may have ended before it wrote it to the runs."""

    takeover: Takeover
    runs: frozenset[str]
    """Names of the runs that had begun: no clock of two machines tells that afterwards."""


class Fence:
    """The epoch of one server process in its state directory.

    Guarantees:
      * in a block of `held` no other server can begin from the directory;
      * after another one has begun, no block of `held` is entered.
    """

    def __init__(self, state: Path, epoch: int, *, forced: bool = False) -> None:
        """Use the epoch that this server has raised that of the directory to.

        `forced`: an earlier server may still run.
        """
        self.state = state
        self.epoch = epoch
        self.forced = forced

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other servers from taking over while the block changes files, for milliseconds.

        Raises:
            TakenOver: one has taken over.
            sqlite3.Error: the queue cannot be used.
        """
        with write_lock(self.state / QUEUE) as queue:
            self._check(epoch_of(queue))
            yield

    def check(self) -> None:
        """Refuse to go on after another server has taken over.

        Raises:
            TakenOver: one has.
            sqlite3.Error: the queue cannot be read.
        """
        with contextlib.closing(_connected(self.state / QUEUE)) as queue:
            self._check(epoch_of(queue))

    def claim(self, file: Path) -> None:
        """Fence off earlier servers from a database, which nobody writes to but servers.

        Raises:
            TakenOver: another server has taken over.
            sqlite3.Error: the database or the queue cannot be used.
        """
        with self.held():
            if file.samefile(self.state / QUEUE):  # claimed when this fence was made
                return
            with write_lock(file) as database:
                if epoch_of(database) == self.epoch:
                    return
                # Also a larger one, of the directory that a run was moved from.
                database.execute(f"PRAGMA application_id={self.epoch}")
                database.execute("COMMIT")

    def _check(self, found: int) -> None:
        if found != self.epoch:
            raise TakenOver(
                f"another server has taken over {self.state}: this one has changed nothing there "
                "since, and ends"
            )

    @property
    def signature(self) -> str:
        """What this server writes into the locks that it holds."""
        return f"server {self.epoch}"

    def follows(self, signature: str) -> bool:
        """Whether a lock is that of an earlier server, which is fenced off."""
        match = re.fullmatch(r"server (\d+)", signature)
        return match is not None and int(match[1]) < self.epoch


def held(fence: Fence | None) -> contextlib.AbstractContextManager[None]:
    """See `Fence.held`; without a fence, which only servers have, nothing is kept out."""
    return contextlib.nullcontext() if fence is None else fence.held()


def move_on(state: Path) -> None:
    """Raise the epoch of a directory that takes the place of another one, as of a restored one.

    A copy is behind: a server that still runs, and has started from the original after it was made,
    may have the epoch that the next one of the copy would get. The step is drawn at random, as
    nobody knows how far the original has come, nor another copy.

    Raises:
        sqlite3.Error: the queue cannot be used.
    """
    if not (state / QUEUE).exists():
        return
    with write_lock(state / QUEUE) as queue:
        step = _LEAST_STEP + secrets.randbelow(_LEAST_STEP)
        queue.execute(f"PRAGMA application_id={min(epoch_of(queue) + step, _HIGHEST)}")
        queue.execute("COMMIT")


def epoch_of(database: sqlite3.Connection) -> int:
    """The epoch in the header of a database, as of the current transaction."""
    (found,) = database.execute("PRAGMA application_id").fetchone()
    return int(found)


@contextlib.contextmanager
def write_lock(file: Path) -> Iterator[sqlite3.Connection]:
    """Keep all others from writing to a database; what the block has not committed is undone.

    Raises:
        sqlite3.Error: it cannot be used.
    """
    with contextlib.closing(_connected(file)) as database:
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
        finally:
            if database.in_transaction:
                database.execute("ROLLBACK")


def _connected(file: Path) -> sqlite3.Connection:
    # `rw` and not `rwc`: a lost database must not become an empty one.
    uri = f"{file.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)
