"""The run directory: the write-ahead round log, checkpoints, and the state to resume from.

A run directory holds::

    job.json                the validated job, and the directory its relative paths start from
    place.json              which directory this is, to notice that it was copied
    run.sqlite              the round log (WAL)
    run.head                the newest commit of the log, to notice when it is lost
    checkpoints/            model-, served- and optimizer-<round>.safetensors
    model.safetensors       the final model, when the run has ended
    signed-sums.jsonl       what devices have signed in secure rounds
    logs/                   one file per process
    lock                    held by the process that executes the run

An attempt at a round is logged before it begins. One transaction makes the round visible with its
record and the state after it; its checkpoints are complete on disk before that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.layout_changes import with_layout
from isthmus_server.storage.checkpoints import Checkpoints, replacing
from isthmus_server.storage.damage_checks import (
    FINAL_MODEL,
    check_description,
    check_final_model,
    check_no_newer_checkpoint,
)
from isthmus_server.storage.events import (
    LayoutChanged,
    LoggedEvent,
    ReportedEvent,
    RunBranched,
    logged_event_from_json,
)
from isthmus_server.storage.fence import Fence
from isthmus_server.storage.range_log import RangeLog
from isthmus_server.storage.records import (
    CommittedState,
    ComparisonRecord,
    EndedAttempt,
    FailedAttempt,
    FinalModel,
    LoggedAttempt,
    PlannedAttempt,
    RoundRecord,
    parsed,
)
from isthmus_server.storage.run_description import (
    RunDescription,
    alone_in,
    begin_log,
    errors_named,
    logged_description,
    new_run_id,
    refuse_unprintable,
    unusable,
)
from isthmus_server.storage.run_place import branch_command, refuse_copy
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.schema import SCHEMA, read_log
from isthmus_server.storage.sealed_database import SealedDatabase
from isthmus_server.storage.signed_sums import SignedSums
from isthmus_server.storage.unmasking_log import UnmaskingLog
from isthmus_server.strategy.policy import Compare

KEPT_CHECKPOINTS = 2
"""Committed models kept on disk besides the final one."""

_MAX_UNSTORED = 1000
"""Latest events that are kept in memory while the log cannot be written."""

log = logging.getLogger(__name__)


class Store:
    """One run directory.

    Guarantees:
      * after a crash at any instant the last committed round is complete, with its files;
      * an attempt that was planned and not committed has no effect but its entry in the log;
      * of servers that took over from each other, only the last one commits.
    """

    def __init__(
        self,
        directory: Path,
        description: RunDescription,
        log: SealedDatabase,
        fence: Fence | None = None,
    ) -> None:
        """Use `create`, `open`, `open_to_write` or `open_to_continue`."""
        self.fence = fence
        """Keeps earlier servers out; None for commands that are no server."""
        self.directory = directory
        self.description = description
        self.job = description.job
        self.base = description.base
        self.run_id = description.run_id
        self.checkpoints = Checkpoints(directory / "checkpoints", fence)
        self.log = log
        self._db = log.connection
        self.unmaskings = UnmaskingLog(self.log)
        self.ranges = RangeLog(self.log)
        self.signed_sums = SignedSums(directory, fence)
        self._unstored_events: deque[str] = deque(maxlen=_MAX_UNSTORED)

    @classmethod
    def create(
        cls,
        directory: Path,
        job: Job,
        base: Path,
        run_id: str | None = None,
        fence: Fence | None = None,
    ) -> Store:
        """Create a run in a directory that does not have one yet; by default with a new id.

        Raises:
            UserError: the directory has a run already, or cannot be written.
            TakenOver: another server has taken over from that of the `fence`.
        """
        directory = directory.absolute()
        for path in (directory, base):
            refuse_unprintable(path)
        description = RunDescription(run_id or new_run_id(job), base, job)
        with errors_named(directory):
            begin_log(directory, description, fence)
            log = SealedDatabase(directory / "run.sqlite", SCHEMA, fence=fence)
        return cls(directory, description, log, fence)

    @classmethod
    def open(cls, directory: Path, *, check: bool = False) -> Store:
        """Open an existing run for reading; with `check`, refuse a damaged one.

        Raises:
            UserError: there is no run, it is damaged, or its log cannot be read there.
        """
        refuse_unprintable(directory)
        with errors_named(directory):
            description = RunDescription.read(directory)
            store = cls(directory, description, read_log(directory / "run.sqlite"))
            try:
                if check:
                    store.check()
                else:
                    check_description(directory, store.log)
            except BaseException:
                store.close()
                raise
        return store

    @classmethod
    def open_by_log(cls, directory: Path) -> Store:
        """Open a run for reading without its `job.json`, which may be damaged.

        Raises:
            UserError: there is no run, or its log cannot be read.
        """
        refuse_unprintable(directory)
        with errors_named(directory):
            log = read_log(directory / "run.sqlite")
            try:
                return cls(directory, logged_description(log), log)
            except BaseException:
                log.close()
                raise

    @classmethod
    def open_to_continue(cls, directory: Path) -> Store:
        """Check an existing run, and open it for writing; all that continues a run begins here.

        Raises:
            UserError: there is no run, it is damaged, its log cannot be used, or nothing may
                continue it; see `refuse_to_continue`.
        """
        store = cls.open_to_write(directory)
        try:
            store.refuse_to_continue()
        except BaseException:
            store.close()
            raise
        return store

    def refuse_to_continue(self) -> None:
        """Refuse a run that nothing may continue: a cancelled one, and a copy of another directory.

        Raises:
            UserError: it is one of these.
        """
        status, reason, _ = self.status()
        if status == "cancelled":
            raise UserError(
                f"{self.directory} is cancelled ({reason}), and nothing continues it; make a new "
                f"run of it with `{branch_command(self.directory)}`"
            )
        with errors_named(self.directory):
            refuse_copy(self.directory, private=self.is_private)

    @property
    def is_private(self) -> bool:
        """Whether the run adds noise, of whatever kind, and charges a ledger."""
        sections = (self.job.privacy, self.job.federated.privacy, self.job.datacenter.privacy)
        return any(section is not None for section in sections)

    @classmethod
    def open_to_write(cls, directory: Path, fence: Fence | None = None) -> Store:
        """Check an existing run, and open it for writing, to end it or to mark it.

        With the `fence` of a server, earlier ones write to it no more from now on.

        Raises:
            UserError: there is no run, it is damaged, or its log cannot be used.
            TakenOver: another server has taken over.
        """
        # Reading first: a connection that writes removes what SQLite ignores in a damaged log.
        with contextlib.closing(cls.open(directory, check=True)) as checked:
            description = checked.description
            seal = checked.log.seal()
        with errors_named(directory):
            log = SealedDatabase(directory / "run.sqlite", SCHEMA, fence=fence)
            store = cls(directory, description, log, fence)
            try:
                if fence is not None and log.seal() != seal:
                    store.check()  # an earlier server has written to it until now
                log.catch_up_head()
            except BaseException:
                store.close()
                raise
            return store

    def check(self) -> None:
        """Check what the run continues from, except the checkpoints, which are checked when read.

        Raises:
            DamagedError: with the first damage.
            sqlite3.Error: the log cannot be read for another reason.
        """
        self.log.check()
        check_description(self.directory, self.log)
        check_no_newer_checkpoint(self.directory, self.checkpoints, self.last_round())
        status, _, final = self.status()
        check_final_model(self.directory, self.checkpoints, status, final)

    def close(self) -> None:
        """Close the log."""
        self.log.close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock during the block; other processes can still read the run.

        If the block raises a `UserError` before the first attempt, the run is stored as failed.

        Raises:
            UserError: another process holds the lock, or the log could not be used in the block.
            TakenOver: another server has taken over.
        """
        with alone_in(self.directory, self.fence):
            try:
                yield
            except sqlite3.Error as error:
                raise self.unusable(error) from error
            except UserError as error:
                with contextlib.suppress(sqlite3.Error):
                    attempt = self._db.execute("SELECT 1 FROM attempts").fetchone()
                    # A run that was cut off keeps its state, so that it can be resumed.
                    # Before the first attempt nothing is lost: such a directory is free for the
                    # corrected job.
                    if attempt is None and self.status()[0] == "running":
                        self.finish("failed", str(error), None)
                raise

    # -- the round log -----------------------------------------------------------------------------

    def plan(self, planned: PlannedAttempt) -> None:
        """Store an attempt before it begins."""
        self._db.execute(
            "INSERT OR REPLACE INTO attempts VALUES (?, ?, 'planned', ?, NULL, NULL)",
            (planned.round, planned.attempt, json.dumps(planned.to_json())),
        )
        self.log.write_head()

    def fail(self, record: FailedAttempt) -> None:
        """Store that a planned attempt has failed."""
        self._db.execute(
            "UPDATE attempts SET state='failed', record=? WHERE round=? AND attempt=?",
            (json.dumps(record.to_json()), record.round, record.attempt),
        )
        self.log.write_head()

    def commit(self, record: RoundRecord, state: CommittedState) -> None:
        """Make a planned round visible with the state after it; then drop old checkpoints."""
        self._db.execute(
            "UPDATE attempts SET state='committed', record=?, run_state=? "
            "WHERE round=? AND attempt=?",
            (*map(json.dumps, (record.to_json(), state.to_json())), record.round, record.attempt),
        )
        self.log.write_head()
        # Last: until the commit is on disk, the run would continue from older files.
        self._drop_old_checkpoints()

    def begin_comparison(self, number: int, attempt: int, round_: int, request: Compare) -> None:
        """Store a comparison attempt before devices are asked."""
        self._db.execute(
            "INSERT INTO comparison_attempts VALUES (?, ?, ?, ?, NULL)",
            (number, attempt, round_, json.dumps(dataclasses.asdict(request))),
        )
        self.log.write_head()

    def end_comparison(self, record: ComparisonRecord) -> None:
        """Store the outcome of a comparison attempt."""
        self._db.execute(
            "UPDATE comparison_attempts SET record=? WHERE number=? AND attempt=?",
            (json.dumps(record.to_json()), record.number, record.attempt),
        )
        self.log.write_head()

    def save_elapsed(self, seconds: float) -> None:
        """Store the elapsed time of the run."""
        self._db.execute("INSERT OR REPLACE INTO running_time VALUES (1, ?)", (seconds,))

    def log_event(self, event: ReportedEvent) -> None:
        """Store an event for the report; one that cannot be stored now is stored with a later one.

        Events come from everywhere, where a failing disk must do no harm, and a slow one no delay.
        """
        # By way of a queue: events keep their order when the disk can be written again.
        self._unstored_events.append(json.dumps(event.to_json()))
        try:
            with self.log.not_synced():
                while self._unstored_events:
                    self._db.execute("INSERT INTO events VALUES (?)", (self._unstored_events[0],))
                    self._unstored_events.popleft()
        except sqlite3.Error as error:
            log.warning("%s: an event could not be stored: %s", self.directory, error)

    def finish(self, status: str, reason: str, final: FinalModel | None) -> None:
        """Store that the run has ended: `finished`, `failed` or `cancelled`, and why."""
        self._db.execute(
            "UPDATE run SET status=?, reason=?, final=?",
            (status, reason, None if final is None else json.dumps(final.to_json())),
        )
        self.log.write_head()

    def become(self, description: RunDescription, last: tuple[int, CommittedState] | None) -> None:
        """Make this log that of a new run, which begins after the last commit.

        Args:
            description: of the new run.
            last: the round of the commit, and its state; None if there is none. No datacenter holds
                a model of the new run.
        """
        round_, state = last or (0, None)
        with self.log.transaction():
            self._db.execute("DELETE FROM attempts WHERE round>?", (round_,))
            # They have no run, and the new one may train in another way from the same model.
            self._db.execute("DELETE FROM ranges")
            if state is not None:
                state = dataclasses.replace(state, holder=None)
                self._db.execute(
                    "UPDATE attempts SET run_state=? WHERE round=? AND state='committed'",
                    (json.dumps(state.to_json()), round_),
                )
            self._db.execute(
                "UPDATE run SET run_id=?, about=?, status='running', reason='', final=NULL",
                (description.run_id, description.to_text()),
            )
        self.log.write_head()
        if round_:
            self.log_event(RunBranched(round=round_))

    def change_layout(self, changes: Mapping[str, Any]) -> None:
        """Store that ranks train in another layout from the next round on.

        The job stays what it was: devices have agreed to it, and compare it with every request.

        Raises:
            UserError: the run has finished.
            JobError: with the changes a step would not be the same, see `with_layout`.
        """
        if self.status()[0] == "finished":
            raise UserError(f"{self.directory} has finished: no rank trains in it any more")
        all_changes = {**self.layout_changes(), **changes}
        with_layout(self.job, all_changes)
        if all_changes == self.layout_changes():
            return
        event = LayoutChanged(round=self.last_round() + 1, changes=all_changes)
        row = (event.round, json.dumps(all_changes))
        self._db.execute("INSERT INTO layouts VALUES (?, ?)", row)
        self.log.write_head()
        self.log_event(event)

    def reopen(self) -> None:
        """Store that the run continues after it had ended."""
        self._db.execute("UPDATE run SET status='running', reason=''")

    # -- reading back ------------------------------------------------------------------------------

    def status(self) -> tuple[str, str, FinalModel | None]:
        """Status and reason of the run, and its final model if it finished."""
        status, reason, final = self._db.execute("SELECT status, reason, final FROM run").fetchone()
        return status, reason, FinalModel.from_json(parsed(final)) if final else None

    def logged_attempts(self) -> Iterator[LoggedAttempt]:
        """All attempts, ended or not, in order of round and attempt."""
        rows = self._db.execute(
            "SELECT state, planned, record FROM attempts ORDER BY round, attempt"
        )
        for row in rows:
            yield _logged(*row)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read the log as it is now during the block, whatever another process writes to it."""
        self._db.execute("BEGIN")
        try:
            self._db.execute("SELECT 1 FROM run").fetchone()  # from the first read on
            yield
        finally:
            self._db.execute("ROLLBACK")

    def planned_attempts(self) -> set[tuple[int, int]]:
        """Round and number of all attempts, ended or not."""
        return set(self._db.execute("SELECT round, attempt FROM attempts"))

    def proved_attempts(self) -> Iterator[tuple[LoggedAttempt, CommittedState | None]]:
        """All attempts in order, one at a time, and the state that each commit left."""
        rows = self._db.execute(
            "SELECT state, planned, record, run_state FROM attempts ORDER BY round, attempt"
        )
        for *row, text in rows:
            yield (
                _logged(*row),
                None if text is None else CommittedState.from_json(parsed(text)),
            )

    def at_work(self) -> tuple[int, int]:
        """Round and number of the attempt that has not ended; if none, the last round and 0."""
        newest = self.newest_attempts(1)
        if newest and newest[0].record is None:
            return newest[0].planned.round, newest[0].planned.attempt
        return self.last_round(), 0

    def newest_attempts(self, limit: int) -> list[LoggedAttempt]:
        """At most so many of the attempts that began last, ended or not, the oldest first."""
        rows = self._db.execute(
            "SELECT state, planned, record FROM attempts ORDER BY rowid DESC LIMIT ?", (limit,)
        )
        return [_logged(*row) for row in rows][::-1]

    def attempts(self) -> Iterator[EndedAttempt]:
        """All ended attempts, in order of round and attempt, one at a time.

        The receipts of a long run do not fit into memory.
        """
        rows = self._db.execute(
            "SELECT state, record FROM attempts WHERE record NOT NULL ORDER BY round, attempt"
        )
        for state, record in rows:
            yield _record(state, record)

    def ended_since(self, number: int, limit: int) -> list[tuple[int, EndedAttempt]]:
        """The first attempts of those that ended after row `number`, with growing row numbers."""
        rows = self._db.execute(
            "SELECT rowid, state, record FROM attempts WHERE rowid>? AND record NOT NULL "
            "ORDER BY rowid LIMIT ?",
            (number, limit),
        )
        return [(rowid, _record(state, record)) for rowid, state, record in rows]

    def layout_changes(self) -> dict[str, Any]:
        """What is different in the ranks' layout from the job, by dotted key."""
        row = self._db.execute("SELECT changes FROM layouts ORDER BY rowid DESC LIMIT 1").fetchone()
        return dict(parsed(row[0])) if row else {}

    @property
    def ranks_job(self) -> Job:
        """The job with the layout in which ranks train now."""
        changes = self.layout_changes()
        return with_layout(self.job, changes) if changes else self.job

    def last_round(self) -> int:
        """The last committed round; 0 if none."""
        query = "SELECT COALESCE(MAX(round), 0) FROM attempts WHERE state='committed'"
        return int(self._db.execute(query).fetchone()[0])

    def events(self, *kinds: str) -> list[LoggedEvent]:
        """The logged events of these kinds, or all, oldest first."""
        places = ", ".join("?" * len(kinds))
        where = f"WHERE json_extract(event, '$.kind') IN ({places}) " if kinds else ""
        rows = self._db.execute(f"SELECT event FROM events {where}ORDER BY rowid", kinds)
        return [logged_event_from_json(parsed(text)) for (text,) in rows]

    def run_state(self) -> RunState:
        """The state that the run continues from."""
        newest = self._db.execute(
            "SELECT round, run_state FROM attempts WHERE state='committed' ORDER BY round DESC"
        ).fetchone()
        round_ = 0
        committed = CommittedState()
        if newest:
            round_ = newest[0]
            committed = CommittedState.from_json(parsed(newest[1]))
        last_attempt = self._db.execute(
            "SELECT attempt, planned, state, record FROM attempts WHERE round=? "
            "ORDER BY attempt DESC",
            (round_ + 1,),
        ).fetchone()
        history = []
        paid = 0.0
        moved = 0
        elapsed = self._saved_elapsed()
        # Derived from the records and not stored in addition, so that the two cannot differ.
        for record in self.attempts():
            paid += record.cost.price
            moved += record.cost.device_bytes
            # The time is saved at intervals, and a record may be newer.
            elapsed = max(elapsed, record.elapsed)
            if isinstance(record, RoundRecord):
                history.append(record.as_past_round())
        comparisons = []
        comparisons_ended = 0
        for comparison in self._comparisons():
            comparisons_ended += comparison.ended
            if comparison.round == round_ + 1:
                comparisons.append(comparison)
        # The policy has answered since the last commit; what it keeps of that is not committed yet.
        if comparisons:
            state = comparisons[-1].policy_state
            committed = dataclasses.replace(committed, policy_state=state)
        return RunState(
            **vars(committed),
            round=round_,
            attempts=last_attempt[0] if last_attempt else 0,
            history=history,
            paid=paid,
            moved=moved,
            elapsed=elapsed,
            cut_short=self._cut_short(*last_attempt[1:]) if last_attempt else None,
            comparisons=comparisons,
            comparisons_ended=comparisons_ended,
            comparison_attempts=self._db.execute(
                "SELECT COALESCE(MAX(attempt), 0) FROM comparison_attempts WHERE number=?",
                (comparisons_ended + 1,),
            ).fetchone()[0],
        )

    def _cut_short(self, planned: str, state: str, record: str | None) -> PlannedAttempt | None:
        """The last attempt at the next round, if its plan was cut short and not given up."""
        failed = _record(state, record) if record else None
        given_up = isinstance(failed, FailedAttempt) and failed.given_up
        # A run that ended by itself was not cut short: it decides anew when it continues.
        if given_up or self.status()[0] != "running":
            return None
        return PlannedAttempt.from_json(parsed(planned))

    def _comparisons(self) -> Iterator[ComparisonRecord]:
        """All ended comparison attempts, oldest first."""
        rows = self._db.execute(
            "SELECT record FROM comparison_attempts WHERE record NOT NULL ORDER BY number, attempt"
        )
        for (record,) in rows:
            yield ComparisonRecord.from_json(parsed(record))

    def _saved_elapsed(self) -> float:
        row = self._db.execute("SELECT elapsed FROM running_time").fetchone()
        return row[0] if row else 0.0

    def write_final(self, payload: bytes | bytearray | memoryview) -> Path:
        """Write the final model into the run directory; returns its path."""
        path = self.directory / FINAL_MODEL
        with replacing(path, self.fence) as file:
            file.write(payload)
        return path

    def unusable(self, error: Exception) -> UserError:
        """The user message for an error while the directory was read or written."""
        return unusable(self.directory, error)

    def newest_commits(self) -> list[tuple[int, CommittedState]]:
        """Rounds and states of the newest commits, whose checkpoints are kept; newest first."""
        rows = self._db.execute(
            "SELECT round, run_state FROM attempts WHERE state='committed' ORDER BY round DESC "
            "LIMIT ?",
            (KEPT_CHECKPOINTS,),
        )
        return [(round_, CommittedState.from_json(parsed(text))) for round_, text in rows]

    def _drop_old_checkpoints(self) -> None:
        """Keep only the files that the newest commits name."""
        commits = self.newest_commits()
        self.checkpoints.keep_only({saved.file for _, state in commits for saved in state.files})


def _logged(state: str, planned: str, record: str | None) -> LoggedAttempt:
    """Read a row of the table of attempts."""
    return LoggedAttempt(
        planned=PlannedAttempt.from_json(parsed(planned)),
        record=_record(state, record) if record else None,
    )


def _record(state: str, text: str) -> EndedAttempt:
    kind = RoundRecord if state == "committed" else FailedAttempt
    return kind.from_json(parsed(text))
