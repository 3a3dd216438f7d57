"""What a console shows: one run, the runs of a folder, or a server with its queue and fleet."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus_server.fleet.presence import FILE, read_snapshot
from isthmus_server.fleet.registry_file import NAME as REGISTRY
from isthmus_server.fleet.snapshot import FleetSnapshot
from isthmus_server.read.console.shown_run import ShownRun
from isthmus_server.storage.sealed_database import database_error
from isthmus_server.storage.store import Store

MAX_OPEN = 8
"""Runs that are kept open; the one that was used least recently is closed."""

_JOBS = (
    "SELECT number, name, submitted_by, submitted_at, state, reason, next_try, share, project "
    "FROM jobs "
)
_ENDED = "('finished', 'failed', 'cancelled')"


@dataclasses.dataclass(frozen=True)
class ListedJob:
    """A job of a server, or a run without one."""

    id: str
    state: str
    reason: str = ""
    submitted_by: str = ""
    submitted_at: float = 0.0
    """Unix seconds; 0 if unknown."""
    next_try: float = 0.0
    """When a paused job is tried again, in Unix seconds."""
    round: int = 0
    rounds: int = 0
    """0 if the run has not begun."""
    share: float = 1.0
    """Share of the participants' time, while other jobs run too."""
    project: str = ""
    """Empty for none."""


class ConsoleSource:
    """Reads the directory that a console was started for; use it in one thread."""

    def __init__(self, path: Path) -> None:
        """Find out what the directory is.

        Raises:
            UserError: it is neither a run, nor a server's state, nor a folder of runs.
        """
        self.path = path.absolute()
        self.opened: dict[str, ShownRun] = {}
        """Runs that are open, the one that was used last at the end."""
        self.is_run = (path / "job.json").exists()
        self.is_server = not self.is_run and any(
            (path / name).exists() for name in ("jobs.sqlite", REGISTRY, FILE)
        )
        has_runs = path.is_dir() and any(
            (each / "job.json").exists() for each in path.iterdir() if each.is_dir()
        )
        if not (self.is_run or self.is_server or has_runs):
            raise UserError(
                f"{path} is neither a run (runs/NAME-TIME), nor a folder of runs, nor the state "
                "directory of a server"
            )

    @property
    def runs_folder(self) -> Path:
        """The folder with the runs' directories."""
        if self.is_run:
            return self.path.parent
        return self.path / "runs" if self.is_server else self.path

    @property
    def title(self) -> str:
        """What is shown, in words."""
        return self.path.name

    def close(self) -> None:
        """Close all runs."""
        while self.opened:
            self.opened.popitem()[1].close()

    # -- runs --------------------------------------------------------------------------------------

    def run_names(self) -> list[str]:
        """Names of the directories of runs, newest first."""
        if self.is_run:
            return [self.path.name]
        if not self.runs_folder.is_dir():
            return []
        found = [each for each in self.runs_folder.iterdir() if (each / "job.json").exists()]
        return [each.name for each in sorted(found, key=_begun, reverse=True)]

    def run(self, name: str) -> ShownRun:
        """An open run with everything that is committed now.

        Raises:
            KeyError: there is no run with that name.
            UserError: it cannot be read.
        """
        if name not in self.run_names():
            raise KeyError(name)
        run = self.opened.pop(name, None)
        if run is not None and run.replaced:
            run.close()
            run = None
        if run is None:
            run = ShownRun(self.runs_folder / name, name)
        self.opened[name] = run
        if len(self.opened) > MAX_OPEN:
            self.opened.pop(next(iter(self.opened))).close()
        run.refresh()
        return run

    def version(self, name: str) -> str:
        """A text that changes when the run, or without a name the queue, changes.

        Raises:
            KeyError, UserError, sqlite3.Error: it cannot be read.
        """
        if name:
            run = self.opened.get(name)
            if run is None or run.replaced:
                run = self.run(name)
            return run.version()
        files = [self.path / "jobs.sqlite", self.path / "jobs.sqlite-wal", self.path / FILE]
        files += [self.runs_folder / each / "run.head" for each in self.run_names()[:MAX_OPEN]]
        return "-".join(f"{found.st_mtime_ns:x}" for file in files if (found := _stat(file)))

    # -- the queue and the fleet -------------------------------------------------------------------

    def jobs(self, first: int, count: int) -> tuple[Sequence[ListedJob], int]:
        """One page of jobs, those that have not ended first, and their number.

        Raises:
            UserError: the queue cannot be read.
        """
        file = self.path / "jobs.sqlite"
        if self.is_server and file.exists():
            try:
                rows, total = _queue(file, first, count)
            except (sqlite3.Error, OSError) as error:
                raise database_error(file, error) from None
            return [self._job(row) for row in rows], total
        names = self.run_names()
        return [self._listed(name) for name in names[first : first + count]], len(names)

    def _job(self, row: Sequence[Any]) -> ListedJob:
        number, name, by, at, state, reason, next_try, share, project = row
        id_ = f"{name}-{number}"
        listed = ListedJob(id_, state, reason, by, at, next_try, share=share, project=project)
        return self._with_rounds(listed)

    def _listed(self, name: str) -> ListedJob:
        listed = self._with_rounds(ListedJob(name, "unreadable"))
        return dataclasses.replace(listed, submitted_at=_begun(self.runs_folder / name))

    def _with_rounds(self, listed: ListedJob) -> ListedJob:
        directory = self.runs_folder / listed.id
        if not (directory / "job.json").exists():
            return listed
        try:
            with contextlib.closing(Store.open(directory)) as store:
                status, reason, _ = store.status()
                found = dataclasses.replace(
                    listed, round=store.last_round(), rounds=store.job.rounds
                )
        except (UserError, OSError, sqlite3.Error) as error:
            return dataclasses.replace(listed, reason=listed.reason or str(error))
        if listed.state == "unreadable":
            return dataclasses.replace(found, state=status, reason=reason)
        return found

    def fleet(self) -> FleetSnapshot | None:
        """What the server wrote about its participants last; None without a server."""
        return read_snapshot(self.path) if self.is_server else None


def _queue(file: Path, first: int, count: int) -> tuple[list[Any], int]:
    uri = f"{file.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as database:
        (total,) = database.execute("SELECT count(*) FROM jobs").fetchone()
        rows = database.execute(
            f"{_JOBS} ORDER BY state IN {_ENDED}, CASE WHEN state IN {_ENDED} THEN -number ELSE "
            "number END LIMIT ? OFFSET ?",
            (count, first),
        ).fetchall()
    return rows, total


def _begun(directory: Path) -> float:
    found = _stat(directory / "job.json")
    return 0.0 if found is None else found.st_mtime


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:
        return None
