"""A run's identity and job: `job.json`, of which the round log has a copy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sqlite3
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import DamagedError, JobError, TakenOver, UserError
from isthmus.job import Job, read_job
from isthmus.system.file_lock import file_lock, is_locked
from isthmus.system.private_files import make_state_directory
from isthmus_server.storage.checkpoints import replacing
from isthmus_server.storage.fence import Fence, held
from isthmus_server.storage.run_place import FILE as PLACE
from isthmus_server.storage.run_place import record_place
from isthmus_server.storage.schema import FORMAT, SCHEMA, log_format, read_log
from isthmus_server.storage.sealed_database import SealedDatabase, database_error

FILE = "job.json"
_SIMULATED = "simulated"
"""A file that a run with simulated participants has."""
_FOLDERS = ("checkpoints", "logs")
_LOG = ("run.head", "run.sqlite", "run.sqlite-shm", "run.sqlite-wal")
_BEGUN = ("attempts", "comparison_attempts", "events", "running_time", "unmaskings")
"""Tables of the log in which a run that has begun has something."""


@dataclasses.dataclass(frozen=True)
class RunDescription:
    """What a run directory is about; it never changes."""

    run_id: str
    base: Path
    """The directory from which the job's relative paths start."""
    job: Job

    def to_text(self) -> str:
        """The contents of `job.json`."""
        table = {
            "format": FORMAT,
            "run_id": self.run_id,
            "base": str(self.base),
            "job": self.job.model_dump(mode="json"),
        }
        return json.dumps(table, indent=1)

    def write(self, directory: Path) -> None:
        """Write `job.json` durably."""
        with replacing(directory / FILE) as file:
            file.write(self.to_text().encode())

    @classmethod
    def from_text(cls, text: str) -> RunDescription:
        """Read what `to_text` returned.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        table = json.loads(text)
        run_id, base = (_text(table[key]) for key in ("run_id", "base"))
        return cls(run_id, Path(base), read_job(json.dumps(table["job"])))

    @classmethod
    def read(cls, directory: Path) -> RunDescription:
        """Read `job.json`; the round log must confirm it with `check_unchanged`.

        Raises:
            DamagedError: it cannot be read.
            UserError: there is no run, or another version of Isthmus has written it.
        """
        try:
            data = (directory / FILE).read_bytes()
        except FileNotFoundError:
            if any((directory / name).exists() for name in ("run.head", "run.sqlite")):
                raise damaged(f"{FILE} is missing", directory) from None
            below = min((each.parent for each in directory.glob(f"*/{FILE}")), default=None)
            instead = f"; there are runs in the folders below it, such as {below}" if below else ""
            raise UserError(f"{directory} contains no run (no {FILE}){instead}") from None
        try:
            format_ = json.loads(data).get("format")
        except (ValueError, AttributeError, RecursionError) as error:
            raise damaged(f"{FILE} is not JSON", directory) from error
        # Before the job is parsed: a job of another format would be called damaged.
        if format_ != FORMAT:
            raise _other_format(format_, directory)
        try:
            return cls.from_text(data.decode())
        except JobError as error:
            if _log_has(directory, json.loads(data)):  # nothing was changed since the run began
                raise UserError(f"the run in {directory} cannot be read: {error}") from error
            raise damaged(f"{FILE} has no valid job", directory) from error
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"{FILE} describes no run ({error})", directory) from error

    def check_unchanged(self, directory: Path, logged: RunDescription) -> None:
        """Compare `job.json` with the copy that the round log has had since the run began.

        Raises:
            DamagedError: they differ, with the first key that does.
        """
        found = dict(_leaves(json.loads(self.to_text())))
        expected = dict(_leaves(json.loads(logged.to_text())))
        for key in expected | found:  # also one that is new, as in the options of an optimizer
            value = expected.get(key)
            if (other := found.get(key)) != value:
                raise damaged(
                    f"{FILE} was changed after the run began ({key} was {value!r}, is {other!r})",
                    directory,
                )


def new_run_id(job: Job) -> str:
    """An id for a new run of a job."""
    return f"{job.name}-{uuid.uuid4().hex[:8]}"


def begin_log(directory: Path, description: RunDescription, fence: Fence | None = None) -> None:
    """Create directory, log and `job.json`, without which, after a crash, there is no run.

    Raises:
        UserError: there is a run, or another process creates it.
        DamagedError: there is one whose `job.json` is lost.
        TakenOver: another server has taken over from that of the `fence`.
        OSError, sqlite3.Error: the directory cannot be used.
    """
    make_state_directory(directory)
    # Two processes that are started together must not create one run.
    with alone_in(directory, fence), held(fence):
        if (directory / FILE).exists():
            again = resume_command(directory)
            raise UserError(
                f"{directory} already contains a run; continue it with `{again}`, or choose "
                "another directory"
            )
        if _has_begun(directory):
            raise damaged(f"{FILE} is missing", directory)
        for name in _FOLDERS:
            make_state_directory(directory / name)
        # What a crash left of a creation before there was a `job.json`: there is no run in it.
        for path in directory.glob("run.*"):
            path.unlink()
        with contextlib.closing(SealedDatabase(directory / "run.sqlite", SCHEMA)) as log:
            row = (description.run_id, description.to_text())
            log.connection.execute("INSERT INTO run VALUES (?, ?, 'running', '', NULL)", row)
            log.write_head()
        record_place(directory)
        # Last: with this file there is a run, and its log is complete by now.
        description.write(directory)


def _has_begun(directory: Path) -> bool:
    """Whether a round log has an attempt, also one that has lost its head file."""
    if not any((directory / name).exists() for name in ("run.sqlite", "run.head")):
        return False
    with contextlib.closing(read_log(directory / "run.sqlite")) as log:
        tables = "SELECT 1 FROM sqlite_master WHERE name='attempts'"  # none after an early crash
        return bool(
            log.connection.execute(tables).fetchone()
            and log.connection.execute("SELECT 1 FROM attempts").fetchone()
        )


def remove_refused_run(directory: Path) -> None:
    """Remove the run of a refused job from a directory; any other run is left as it is.

    Some of a job can be checked only with its task: a pattern of tensors, for example. By then
    there is a run, which is stored as failed. Its directory is free for the corrected job.

    Args:
        directory: where a new run is about to be created.

    Raises:
        UserError: another process uses the directory, or it cannot be written.
    """
    if not (directory / FILE).exists():
        return
    with alone_in(directory):
        if not _was_refused(directory):
            return
        try:
            (directory / _SIMULATED).unlink(missing_ok=True)  # or the next run would have it
            (directory / FILE).unlink()  # without it there is no run, whatever else is left
            for name in (PLACE, *_LOG):
                (directory / name).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"the run directory {directory} cannot be used: {error}") from error


def _was_refused(directory: Path) -> bool:
    """Whether a run has failed before any participant was asked, and has only what it began with.

    A run whose log is damaged or cannot be read may be anything else.
    """
    try:
        # Anything unknown may be the user's, or of a run that did begin.
        names = {path.name for path in directory.iterdir()}
        if names - {FILE, _SIMULATED, PLACE, "lock", *_LOG, *_FOLDERS}:
            return False
        if any(any((directory / name).iterdir()) for name in _FOLDERS if name in names):
            return False
        with contextlib.closing(read_log(directory / "run.sqlite")) as log:
            log.check()
            statuses = log.connection.execute("SELECT status FROM run").fetchall()
            return statuses == [("failed",)] and not any(
                log.connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone()
                for table in _BEGUN
            )
    except (UserError, OSError, sqlite3.Error):
        return False


def logged_description(log: SealedDatabase) -> RunDescription:
    """The description that the round log has.

    Raises:
        DamagedError: the log describes no run.
    """
    rows = log.connection.execute("SELECT about FROM run").fetchall()
    try:
        ((text,),) = rows
        return RunDescription.from_text(text)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{log.file} describes no run; restore it from a backup") from error


def alone_in(
    directory: Path, fence: Fence | None = None
) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of the process that runs a run directory, inside the block.

    A server takes it from those that its `fence` keeps out.
    """
    path = directory / "lock"
    taken = f"another process runs {directory} already"
    if fence is None:
        return file_lock(path, taken)
    return file_lock(path, taken, signature=fence.signature, follows=fence.follows)


def is_worked_on(directory: Path) -> bool:
    """Whether a process runs, restores or removes the run in a directory now."""
    return is_locked(directory / "lock")


@contextlib.contextmanager
def errors_named(directory: Path) -> Iterator[None]:
    """Name the run in errors that occur while it is opened."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"the run in {directory} cannot be used: {error}") from error
    except sqlite3.Error as error:
        named = database_error(directory / "run.sqlite", error)
        if isinstance(named, TakenOver):
            raise named from error
        raise type(named)(f"the run in {directory} cannot be used: {named}") from error
    except OSError as error:
        raise UserError(f"the run directory {directory} cannot be used: {error}") from error


def unusable(directory: Path, error: Exception) -> UserError:
    """The user message for an error while a run directory was read or written."""
    what = f"{error}; repair it"
    if isinstance(error, sqlite3.Error):
        named = database_error(directory / "run.sqlite", error)
        if isinstance(named, TakenOver):
            return named
        what = str(named)
    return UserError(
        f"the run directory {directory} could not be used: {what}; then "
        f"`{resume_command(directory)}` continues from the last committed round"
    )


def damaged(what: str, directory: Path) -> DamagedError:
    """The error for a damaged `job.json`."""
    again = f"isthmus runs rollback {shlex.quote(str(directory))}"
    return DamagedError(f"{what}; restore it, or let `{again}` write it again")


def refuse_unprintable(path: Path) -> None:
    """Refuse a path that cannot be sent to participants, or stored.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"the path {os.fsencode(path)!r} is not valid UTF-8; choose another directory"
        ) from None


def _other_format(found: object, directory: Path) -> UserError:
    """The error for another format; only if the log has that format too, it is no damage."""
    try:
        logged = log_format(directory / "run.sqlite")
    except OSError:
        logged = None
    if found is None and logged == 0:
        return UserError(
            f"the run in {directory} was written by an older version of isthmus, before format "
            f"{FORMAT}; read it with that version"
        )
    if found == logged and isinstance(found, int):
        age = "a newer" if found > FORMAT else "an older"
        return UserError(
            f"the run in {directory} was written by {age} version of isthmus, in format {found}; "
            f"this version reads format {FORMAT}"
        )
    return damaged(f"{FILE} has the format {found!r} and run.sqlite {logged!r}", directory)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _log_has(directory: Path, table: Any) -> bool:
    """Whether the round log has the same description."""
    try:
        with contextlib.closing(read_log(directory / "run.sqlite")) as log:
            rows = log.connection.execute("SELECT about FROM run").fetchall()
        return bool(len(rows) == 1 and json.loads(rows[0][0]) == table)
    except (OSError, sqlite3.Error, IndexError, TypeError, ValueError):
        return False


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects, with dotted keys."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, f"{key}.{name}" if key else name)
    else:
        yield key, value


def mark_simulated(directory: Path) -> None:
    """Note that the run that is about to be created in a directory has simulated participants.

    A directory that has a run already is left as it is: creating another one there is refused.

    Raises:
        UserError: the directory cannot be written.
    """
    with errors_named(directory):
        make_state_directory(directory)
        if not (directory / FILE).exists() and not _has_begun(directory):
            (directory / _SIMULATED).touch()


def is_simulated(directory: Path) -> bool:
    """Whether the participants of a run are simulated, so that its durations are too."""
    return (directory / _SIMULATED).exists()


def resume_command(directory: Path) -> str:
    """The command that continues a run."""
    name = "simulate" if is_simulated(directory) else "run"
    return f"isthmus {name} --resume --run-dir {shlex.quote(str(directory))}"
