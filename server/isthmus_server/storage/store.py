"""A run on disk: the write-ahead round log, checkpoints, and what is needed to go on.

A run directory holds::

    job.json                the validated job and where it came from
    run.sqlite              the round log (WAL)
    checkpoints/            model-, served- and optimizer-<round>.safetensors
    model.safetensors       the final model, when the run has ended
    logs/                   one file per process
    lock                    held by the process that runs it

A round is planned in the log before anything runs, and becomes visible with everything that
belongs to it in one transaction. Files that a commit names are complete on disk before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.job import Job, read_job
from isthmus.system.file_lock import file_lock
from isthmus_server.storage.checkpoints import Checkpoints, Saved, replacing
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.schema import open_log
from isthmus_server.strategy.observation import past_round

KEPT_CHECKPOINTS = 2
"""Committed models kept on disk besides the final one."""


class Store:
    """One run directory.

    Guarantees:
      * after a crash at any instant the last committed round is whole, with its files;
      * a round that was planned and not committed leaves a trace in the log and nothing else.
    """

    def __init__(self, directory: Path, job: Job, base: Path, run_id: str) -> None:
        """Use `create` or `open`."""
        self.directory = directory
        self.job = job
        self.base = base
        self.run_id = run_id
        self.checkpoints = Checkpoints(directory / "checkpoints")
        self._db = open_log(directory / "run.sqlite")

    @classmethod
    def create(cls, directory: Path, job: Job, base: Path) -> Store:
        """Start a new run in a directory that does not hold one yet.

        Raises:
            UserError: it holds a run already, or cannot be written.
        """
        directory = directory.absolute()
        run_id = f"{job.name}-{uuid.uuid4().hex[:8]}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _alone_in(directory):  # or two that are started together would make one run
                if (directory / "job.json").exists():
                    raise UserError(
                        f"{directory} already holds a run; go on with it by `isthmus run --resume "
                        "--run-dir DIR`, or name another"
                    )
                (directory / "checkpoints").mkdir(exist_ok=True)
                (directory / "logs").mkdir(exist_ok=True)
                store = cls(directory, job, base, run_id)
                store._begin()
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"the run directory {directory} cannot be used: {error}") from error
        return store

    def _begin(self) -> None:
        """Write down that there is a run; one that a crash ended before its job.json never was."""
        self._db.execute("DELETE FROM run")
        self._db.execute("INSERT INTO run VALUES (?, 'running', '', NULL)", (self.run_id,))
        job = self.job.model_dump(mode="json")
        text = json.dumps({"run_id": self.run_id, "base": str(self.base), "job": job}, indent=1)
        with replacing(self.directory / "job.json") as file:
            file.write(text.encode())

    @classmethod
    def open(cls, directory: Path) -> Store:
        """Open an existing run; one on a read-only medium can be read.

        Raises:
            UserError: there is none, it is damaged, or its log cannot be read where it is.
        """
        try:
            table = json.loads((directory / "job.json").read_text())
            job = read_job(json.dumps(table["job"]))
            if not (directory / "run.sqlite").exists():
                raise UserError("run.sqlite is missing")
            store = cls(directory, job, Path(table["base"]), table["run_id"])
            if store._db.execute("SELECT COUNT(*) FROM run").fetchone() != (1,):
                store.close()
                raise UserError("run.sqlite is of no run")
        except FileNotFoundError:
            raise UserError(f"{directory} does not hold a run (no job.json)") from None
        except (OSError, sqlite3.Error, UserError) as error:
            why: object = error
            if isinstance(error, sqlite3.Error) and not os.access(directory, os.W_OK):
                why = "that takes leave to write there (SQLite's log); copy it to where you have it"
            raise UserError(f"the run in {directory} cannot be read: {why}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the run in {directory} cannot be read: job.json is damaged"
            ) from error
        return store

    def close(self) -> None:
        """Let go of the files."""
        self._db.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only process that goes on with the run, while the block lasts; others may read.

        What a run could not begin for is written down.

        Raises:
            UserError: another one does, or the log could not be used in the block.
        """
        with _alone_in(self.directory):
            try:
                yield
            except sqlite3.Error as error:
                raise self.unusable(error) from error
            except UserError as error:
                with contextlib.suppress(sqlite3.Error):
                    tried = self._db.execute("SELECT 1 FROM attempts").fetchone()
                    # One that was cut off stays as it is, and goes on where it was.
                    if tried is None and self.status()[0] == "running":
                        self.finish("failed", str(error), None)
                raise

    # -- the round log -----------------------------------------------------------------------------

    def plan(
        self, round_: int, attempt: int, plan: Mapping[str, Any], seen: Mapping[str, Any]
    ) -> None:
        """Write down what is about to be tried, before it is."""
        self._db.execute(
            "INSERT OR REPLACE INTO attempts VALUES (?, ?, 'planned', ?, ?, ?, NULL)",
            (round_, attempt, time.time(), json.dumps(plan), json.dumps(seen)),
        )

    def fail(self, round_: int, attempt: int, outcome: Mapping[str, Any]) -> None:
        """An attempt ended without a result; `outcome["last"]`: its plan is not tried again."""
        self._db.execute(
            "UPDATE attempts SET state='failed', outcome=? WHERE round=? AND attempt=?",
            (json.dumps(outcome), round_, attempt),
        )

    def commit(self, round_: int, attempt: int, outcome: Mapping[str, Any]) -> None:
        """Make a round visible, with everything in `outcome`; then drop checkpoints of old."""
        self._db.execute(
            "UPDATE attempts SET state='committed', outcome=? WHERE round=? AND attempt=?",
            (json.dumps(outcome), round_, attempt),
        )
        self._drop_old_checkpoints()

    def visit(self, number: int, attempt: int, round_: int, asked: Mapping[str, Any]) -> None:
        """Write down that devices are about to be asked to compare models for a round."""
        self._db.execute(
            "INSERT INTO visit_attempts VALUES (?, ?, ?, ?, NULL)",
            (number, attempt, round_, json.dumps(asked)),
        )

    def visited(self, number: int, attempt: int, outcome: Mapping[str, Any]) -> None:
        """A try at a visit has ended, with a result or without."""
        self._db.execute(
            "UPDATE visit_attempts SET outcome=? WHERE number=? AND attempt=?",
            (json.dumps(outcome), number, attempt),
        )

    def lasted(self, elapsed: float) -> None:
        """The run has gone on for so many seconds."""
        self._db.execute("INSERT OR REPLACE INTO lasted VALUES (1, ?)", (elapsed,))

    def event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Note something that happened, for the report and for views."""
        self._db.execute(
            "INSERT INTO events VALUES (?, ?, ?)", (time.time(), kind, json.dumps(data))
        )

    def finish(self, status: str, reason: str, final: Mapping[str, Any] | None) -> None:
        """The run ended: `finished` or `failed`, and why."""
        self._db.execute(
            "UPDATE run SET status=?, reason=?, final=?",
            (status, reason, None if final is None else json.dumps(final)),
        )

    def reopen(self) -> None:
        """The run goes on after it had stopped."""
        self._db.execute("UPDATE run SET status='running', reason=''")

    # -- reading back ------------------------------------------------------------------------------

    def status(self) -> tuple[str, str, Mapping[str, Any] | None]:
        """Status, reason and final figures of the run."""
        status, reason, final = self._db.execute("SELECT status, reason, final FROM run").fetchone()
        return status, reason, json.loads(final) if final else None

    def attempts(self, state: str) -> list[dict[str, Any]]:
        """All attempts in a state, oldest first: round, attempt, plan, observation, outcome."""
        rows = self._db.execute(
            "SELECT round, attempt, plan, observation, outcome FROM attempts WHERE state=? "
            "ORDER BY round, attempt",
            (state,),
        )
        return [
            {
                "round": round_,
                "attempt": attempt,
                "plan": json.loads(plan),
                "observation": json.loads(seen),
                "outcome": json.loads(outcome) if outcome else None,
            }
            for round_, attempt, plan, seen, outcome in rows
        ]

    def rows(self) -> Iterator[dict[str, Any]]:
        """What each attempt that ended came to, in order, one at a time; failed ones say `error`.

        The receipts of a long run are more than memory should hold.
        """
        rows = self._db.execute(
            "SELECT outcome FROM attempts WHERE state IN ('committed', 'failed') "
            "ORDER BY round, attempt"
        )
        for (outcome,) in rows:
            yield json.loads(outcome)["round"]

    def ended(self, after: int, most: int) -> list[tuple[int, str, dict[str, Any]]]:
        """Attempts that ended since, the first so many: a growing number, the state, its row."""
        rows = self._db.execute(
            "SELECT rowid, state, outcome FROM attempts WHERE rowid>? AND outcome NOT NULL "
            "ORDER BY rowid LIMIT ?",
            (after, most),
        )
        return [(number, state, json.loads(outcome)["round"]) for number, state, outcome in rows]

    def last_round(self) -> int:
        """The last committed round; 0 if none."""
        query = "SELECT COALESCE(MAX(round), 0) FROM attempts WHERE state='committed'"
        return int(self._db.execute(query).fetchone()[0])

    def events(self) -> list[dict[str, Any]]:
        """Everything noted by `event`, oldest first."""
        rows = self._db.execute("SELECT at, kind, data FROM events ORDER BY rowid")
        return [{"at": at, "kind": kind, **json.loads(data)} for at, kind, data in rows]

    def run_state(self) -> RunState:
        """Where the run stands."""
        newest = self._db.execute(
            "SELECT round, outcome FROM attempts WHERE state='committed' ORDER BY round DESC"
        ).fetchone()
        number, last = (newest[0], json.loads(newest[1])["resume"]) if newest else (0, {})
        tried = self._db.execute(
            "SELECT attempt, plan, observation, outcome FROM attempts WHERE round=? "
            "ORDER BY attempt DESC",
            (number + 1,),
        ).fetchone()
        given_up = (
            tried is not None and tried[3] is not None and json.loads(tried[3]).get("last", False)
        )
        cut_short = tried is not None and not given_up and self.status()[0] == "running"
        history, paid, moved, elapsed = [], 0.0, 0, self._lasted()
        for row in self.rows():
            paid += row["cost"]["price"]
            moved += row["cost"]["device_bytes"]
            elapsed = max(elapsed, row["elapsed"])
            if "error" not in row:
                history.append(past_round(row))
        visits, visited = [], 0
        for visit in self._visits():
            visited += visit["over"]
            if visit["round"] == number + 1:
                visits.append(visit)
        optimizer = last.get("optimizer")
        return RunState(
            round=number,
            attempts=tried[0] if tried else 0,
            models={name: Saved(**saved) for name, saved in last.get("models", {}).items()},
            averaged=last.get("averaged", 0),
            optimizer=None if optimizer is None else Saved(**optimizer),
            optimizer_numbers=last.get("optimizer_numbers", {}),
            datacenter_step=last.get("datacenter_step", 0),
            gradient_step=last.get("gradient_step", 0),
            holder=last.get("holder"),
            model_in_datacenter=last.get("model_in_datacenter", False),
            policy_state=(visits[-1] if visits else last).get("policy_state", {}),
            history=history,
            paid=paid,
            moved=moved,
            elapsed=elapsed,
            decided={
                "plan": json.loads(tried[1]),
                "observation": json.loads(tried[2]),
            }
            if cut_short
            else None,
            visits=visits,
            visited=visited,
            visit_attempts=self._db.execute(
                "SELECT COALESCE(MAX(attempt), 0) FROM visit_attempts WHERE number=?",
                (visited + 1,),
            ).fetchone()[0],
        )

    def _visits(self) -> Iterator[dict[str, Any]]:
        """What each try at a visit came to, oldest first."""
        rows = self._db.execute(
            "SELECT outcome FROM visit_attempts WHERE outcome NOT NULL ORDER BY number, attempt"
        )
        for (outcome,) in rows:
            yield json.loads(outcome)

    def _lasted(self) -> float:
        found = self._db.execute("SELECT elapsed FROM lasted").fetchone()
        return found[0] if found else 0.0

    def write_final(self, payload: bytes | bytearray | memoryview) -> Path:
        """Write the final model beside the log."""
        path = self.directory / "model.safetensors"
        with replacing(path) as file:
            file.write(payload)
        return path

    def unusable(self, error: Exception) -> UserError:
        """What to tell a person when reading or writing here failed with `error`."""
        return UserError(
            f"the run directory {self.directory} could not be used: {error}; see to it, then "
            "`isthmus run --resume` goes on from the last committed round"
        )

    def _drop_old_checkpoints(self) -> None:
        """Keep what the newest commits name; a file no commit names is of an attempt that ended."""
        newest = self._db.execute(
            "SELECT outcome FROM attempts WHERE state='committed' ORDER BY round DESC LIMIT ?",
            (KEPT_CHECKPOINTS,),
        )
        kept: set[str] = set()
        for (outcome,) in newest:
            resume = json.loads(outcome)["resume"]
            saved = [*resume["models"].values(), resume["optimizer"]]
            kept |= {one["file"] for one in saved if one is not None}
        self.checkpoints.keep_only(kept)


def _alone_in(directory: Path) -> contextlib.AbstractContextManager[None]:
    return file_lock(directory / "lock", f"another process runs {directory} already")
