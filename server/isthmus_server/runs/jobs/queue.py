"""The queue of submitted jobs, with their states, in SQLite.

Only the server process uses the file. A job that was running when the server died is the next to
run, and continues. A job that cannot go on now is paused until its next try, or until an operator
resumes it; meanwhile the next jobs run.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import sqlite3
import time
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from isthmus.errors import AdmissionRefused, DamagedError, JobError, UserError
from isthmus.job import Job, read_job
from isthmus_server.storage.fence import QUEUE, Fence
from isthmus_server.storage.run_description import new_run_id
from isthmus_server.storage.sealed_database import SealedDatabase, check_database, database_error

State = Literal["queued", "running", "paused", "held", "finished", "failed", "cancelled"]
"""`paused`: it is tried again by itself; `held`: an operator has to resume it."""
ENDED: tuple[State, ...] = ("finished", "failed", "cancelled")

MAX_WAITING = 100
"""Maximum number of queued and paused jobs."""

SHORTEST_PAUSE = 5.0
"""Seconds of the first pause of a job; each further one without a new round is twice as long."""
LONGEST_PAUSE = 600.0

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, job TEXT NOT NULL,
    run_id TEXT NOT NULL, submitted_by TEXT NOT NULL, key TEXT NOT NULL, submitted_at REAL NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL, next_try REAL NOT NULL, pauses INTEGER NOT NULL,
    share REAL NOT NULL, project TEXT NOT NULL,
    UNIQUE (submitted_by, key)
) STRICT;
"""


@dataclasses.dataclass(frozen=True)
class QueuedJob:
    """A submitted job."""

    number: int
    name: str
    text: str
    """The job as JSON; another version of Isthmus may not be able to read it."""
    run_id: str
    """The id of its run, which no other run has: its directory belongs to this job."""
    submitted_by: str
    submitted_at: float
    """Unix seconds."""
    state: State
    reason: str
    """Why the job ended or was paused."""
    next_try: float
    """When a paused job is tried again, in Unix seconds; otherwise 0."""
    pauses: int
    """Pauses since it last committed a round."""
    share: float
    """Share of the participants' time, while other jobs run too; see
    `isthmus_server.transport.turns`."""
    project: str
    """See `isthmus_server.runs.jobs.projects`; empty for none."""

    @property
    def id(self) -> str:
        """The job's id for operators, and the name of its run directory."""
        return f"{self.name}-{self.number}"

    @property
    def job(self) -> Job:
        """The parsed job.

        Raises:
            JobError: this version cannot read it.
        """
        return read_job(self.text)

    @property
    def runs_alone(self) -> bool:
        """Whether it uses all participants all the time."""
        try:
            federated = self.job.federated
        except JobError:  # of another version; it ends as soon as it begins
            return True
        return federated.mode == "buffered" or federated.flower is not None


class JobQueue:
    """The jobs of one server.

    Guarantees:
      * jobs begin in the order in which they were submitted or, after a pause, became
        due again;
      * a submission that is repeated because its answer was lost is queued once.
    """

    def __init__(self, directory: Path, fence: Fence | None = None) -> None:
        """Check and open the file in a state directory; creates it if there was no job yet.

        Raises:
            UserError: it is damaged, missing although jobs have run, or cannot be used.
            TakenOver: another server has taken over from that of the `fence`.
        """
        path = directory / QUEUE
        _refuse_lost(path)
        try:
            self._log = SealedDatabase.checked(path, SCHEMA, fence)
            self._db = self._log.connection
        except (OSError, sqlite3.Error) as error:
            raise database_error(path, error) from None

    def error(self, error: Exception) -> UserError:
        """The error for users when the file fails: what is wrong, and what to do."""
        return database_error(self._log.file, error)

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def _check_room(self, project: str) -> None:
        """Refuse a job for which there is no place.

        A project gets a place only while it has fewer than are free, so that those who come later
        find some, however many projects there are (Choudhury and Hahne 1998). Operators of no
        project have all rights.
        """
        waiting = self._find("state IN ('queued', 'paused', 'held')")
        free = MAX_WAITING - len(waiting)
        if free <= 0:
            raise AdmissionRefused(
                f"{MAX_WAITING} jobs are queued already; cancel some, or try again later"
            )
        own = sum(job.project == project for job in waiting)
        if project and own >= free:
            raise AdmissionRefused(
                f"{own} jobs of the project {project!r} are queued already, and the other projects "
                f"need the {free} places that are left; cancel some, or try again later"
            )

    def submit(
        self, job: Job, by: str, key: str, share: float = 1.0, project: str = ""
    ) -> QueuedJob:
        """Append a job to the queue.

        Raises:
            AdmissionRefused: the queue is full, or too full for a further job of this project.
        """
        known = self._find("submitted_by=? AND key=?", (by, key))
        if known:
            return known[0]
        self._check_room(project)
        text = job.model_dump_json()
        now = time.time()
        row = (job.name, text, new_run_id(job), by, key, now, share, project)
        number = self._db.execute(
            "INSERT INTO jobs (name, job, run_id, submitted_by, key, submitted_at, state, reason, "
            "next_try, pauses, share, project) "
            "VALUES (?, ?, ?, ?, ?, ?, 'queued', '', 0, 0, ?, ?)",
            row,
        ).lastrowid
        self._write_head()
        return self._find("number=?", (number,))[0]

    def next(self, running: Collection[int] = ()) -> QueuedJob | None:
        """Return the next job: an interrupted one, or the one that waits for the longest.

        `running` are the numbers of those that have begun already.

        A paused job waits from its next try on: jobs that never go on would otherwise take turns
        in front of all later ones. One later than the longest pause is due, for the clock was set
        back since; it comes first, because nobody knows for how long it has waited.
        """
        due = "state='queued' OR (state='paused' AND NOT next_try BETWEEN ? AND ?)"
        now = time.time()
        jobs = [job for job in self._find("state='running'") if job.number not in running]
        jobs = jobs or self._find(due, (now, now + LONGEST_PAUSE))
        jobs = [job for job in jobs if job.number not in running]

        def waits_since(job: QueuedJob) -> float:
            since = job.next_try or job.submitted_at
            return since if since <= now else 0.0

        return min(jobs, key=waits_since, default=None)

    def seconds_until_due(self) -> float | None:
        """Seconds until the next paused job is tried again; None if none is paused."""
        times = [entry.next_try for entry in self._find("state='paused'")]
        return min(max(min(times) - time.time(), 0.0), LONGEST_PAUSE) if times else None

    def pause(self, entry: QueuedJob, reason: str, *, progressed: bool) -> QueuedJob:
        """Pause a job, for longer with every pause in which it did not progress.

        Returns the job with its next try.
        """
        pauses = 1 if progressed else entry.pauses + 1
        longest = min(SHORTEST_PAUSE * 2.0 ** min(pauses - 1, 16), LONGEST_PAUSE)
        next_try = time.time() + longest * random.uniform(0.75, 1.0)  # noqa: S311 - jitter
        self._db.execute(
            "UPDATE jobs SET state='paused', reason=?, next_try=?, pauses=? WHERE number=?",
            (reason, next_try, pauses, entry.number),
        )
        self._write_head()
        return self._find("number=?", (entry.number,))[0]

    def end_pause(self, number: int) -> None:
        """Have a paused job tried after those that have waited for longer.

        Its next pause is longer all the same, unless it progresses.
        """
        self._db.execute(
            "UPDATE jobs SET next_try=min(next_try, ?) WHERE number=? AND state='paused'",
            (time.time(), number),
        )
        self._write_head()

    def resume(self, entry: QueuedJob) -> None:
        """Have a paused or failed job tried as soon as it is its turn.

        Raises:
            AdmissionRefused: it has failed, and there is no place for it, see `submit`.
        """
        if entry.state in ENDED:
            self._check_room(entry.project)
        self._db.execute(
            "UPDATE jobs SET state='paused', next_try=0 WHERE number=?", (entry.number,)
        )
        self._write_head()

    def mark(self, entry: QueuedJob, state: State, reason: str = "") -> None:
        """Record the state of a job."""
        self._db.execute(
            "UPDATE jobs SET state=?, reason=?, next_try=0 WHERE number=?",
            (state, reason, entry.number),
        )
        self._write_head()

    def entries(self, ended: int) -> list[QueuedJob]:
        """Return all jobs that have not ended, and the latest `ended` others, by submission."""
        over = f"state IN {ENDED}"
        latest = f"SELECT number FROM jobs WHERE {over} ORDER BY number DESC LIMIT ?"
        return self._find(f"NOT {over} OR number IN ({latest})", (ended,))

    def get(self, id_: str) -> QueuedJob:
        """Return a job by its id.

        Raises:
            AdmissionRefused: there is none with that id.
        """
        name, _, number = id_.rpartition("-")
        if number.isascii() and number.isdigit() and len(number) < 18:
            for entry in self._find("number=? AND name=?", (int(number), name)):
                return entry
        raise no_such_job(id_)

    def _write_head(self) -> None:
        try:
            self._log.write_head()
        except (
            OSError,
            sqlite3.Error,
        ) as error:  # the change is made, and the next one writes the head
            log.warning("%s cannot be written: %s", self._log.head, error)

    def _find(self, where: str, values: tuple[object, ...] = ()) -> list[QueuedJob]:
        rows = self._db.execute(
            "SELECT number, name, job, run_id, submitted_by, submitted_at, state, reason, "
            f"next_try, pauses, share, project FROM jobs WHERE {where} ORDER BY number",
            values,
        )
        return [QueuedJob(*row) for row in rows]


def no_such_job(id_: str) -> AdmissionRefused:
    """The error for an id of no job."""
    return AdmissionRefused(f"there is no job {id_!r}; see `isthmus jobs`")


def check(directory: Path) -> None:
    """Check the queue in a state directory, if there is one yet, without changing it.

    Raises:
        DamagedError: it is damaged or missing.
        UserError: it cannot be read for another reason.
    """
    path = directory / QUEUE
    _refuse_lost(path)
    if path.exists() or path.with_suffix(".head").exists():
        check_database(path, SCHEMA, may_be_new=True)  # servers may start at the same time


def _refuse_lost(path: Path) -> None:
    runs = path.parent / "runs"
    if not path.exists() and runs.is_dir() and any(runs.iterdir()):
        raise DamagedError(
            f"{path} is missing, but {runs} has the runs of jobs; restore it and jobs.head from a "
            f"backup, or, to begin with an empty queue, move {runs} and jobs.head away"
        )
