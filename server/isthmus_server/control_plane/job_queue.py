"""Jobs that wait for their turn, the one that runs, and what became of the others, in SQLite.

Only the server process uses the file. What it says survives it: a job that was running when the
server died is the next to run, and goes on.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from pathlib import Path
from typing import Literal

from isthmus.errors import AdmissionRefused, UserError
from isthmus.job import Job, read_job

State = Literal["queued", "running", "finished", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("finished", "failed", "cancelled")

MAX_WAITING = 100
"""Jobs that can wait at a time."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, job TEXT NOT NULL,
    submitted_by TEXT NOT NULL, key TEXT NOT NULL, submitted_at REAL NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL, UNIQUE (submitted_by, key)
) STRICT;
"""


@dataclasses.dataclass(frozen=True)
class QueuedJob:
    """One job that was submitted."""

    number: int
    name: str
    text: str
    """The job as JSON; a later version may not be able to read it."""
    submitted_by: str
    submitted_at: float
    """Unix seconds."""
    state: State
    reason: str

    @property
    def id(self) -> str:
        """What an operator calls it, and the name of its run directory."""
        return f"{self.name}-{self.number}"

    @property
    def job(self) -> Job:
        """What is to be run.

        Raises:
            JobError: this version cannot read it.
        """
        return read_job(self.text)


class JobQueue:
    """The jobs of one server.

    Guarantees:
      * jobs run in the order in which they were submitted, one at a time;
      * a submission that is sent again, because its answer was lost, counts once.
    """

    def __init__(self, directory: Path) -> None:
        """Open the file in a state directory, and make it if it is not there.

        Raises:
            UserError: it cannot be used.
        """
        path = directory / "jobs.sqlite"
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise UserError(f"{path} cannot be used: {error}") from None

    def close(self) -> None:
        """Let the file go."""
        self._db.close()

    def submit(self, job: Job, by: str, key: str) -> QueuedJob:
        """Put a job at the end.

        Raises:
            AdmissionRefused: too many wait.
        """
        known = self._find("submitted_by=? AND key=?", (by, key))
        if known:
            return known[0]
        if len(self._find("state='queued'")) >= MAX_WAITING:
            raise AdmissionRefused(
                f"{MAX_WAITING} jobs wait already; cancel some, or try again later"
            )
        row = (job.name, job.model_dump_json(), by, key, time.time())
        number = self._db.execute(
            "INSERT INTO jobs (name, job, submitted_by, key, submitted_at, state, reason) "
            "VALUES (?, ?, ?, ?, ?, 'queued', '')",
            row,
        ).lastrowid
        return self._find("number=?", (number,))[0]

    def next(self) -> QueuedJob | None:
        """Whose turn it is: the one that was cut off, or else the first that waits."""
        found = self._find("state='running'") or self._find("state='queued'")
        return found[0] if found else None

    def mark(self, entry: QueuedJob, state: State, reason: str = "") -> None:
        """Say what has become of a job."""
        self._db.execute(
            "UPDATE jobs SET state=?, reason=? WHERE number=?", (state, reason, entry.number)
        )

    def entries(self, ended: int) -> list[QueuedJob]:
        """Those that wait or run, and the latest `ended` of the others, as they were submitted."""
        over = f"state IN {ENDED}"
        latest = f"SELECT number FROM jobs WHERE {over} ORDER BY number DESC LIMIT ?"
        return self._find(f"NOT {over} OR number IN ({latest})", (ended,))

    def get(self, id_: str) -> QueuedJob:
        """One job.

        Raises:
            AdmissionRefused: there is none with that id.
        """
        name, _, number = id_.rpartition("-")
        if number.isascii() and number.isdigit() and len(number) < 18:
            for entry in self._find("number=? AND name=?", (int(number), name)):
                return entry
        raise AdmissionRefused(f"there is no job {id_!r}; `isthmus jobs` lists those there are")

    def _find(self, where: str, values: tuple[object, ...] = ()) -> list[QueuedJob]:
        rows = self._db.execute(
            "SELECT number, name, job, submitted_by, submitted_at, state, reason FROM jobs "
            f"WHERE {where} ORDER BY number",
            values,
        )
        return [QueuedJob(*row) for row in rows]
