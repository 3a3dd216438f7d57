"""Verify a run directory, and go back to an earlier commit of its log."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from isthmus.errors import DamagedError, UserError
from isthmus.start.files import StartFiles, digest_of_all
from isthmus.system.private_files import create_state_file, make_state_directory
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger, last_known
from isthmus_server.storage import run_description, signed_sums
from isthmus_server.storage.damage_checks import (
    FINAL_MODEL,
    check_description,
    check_final_model,
    check_no_newer_checkpoint,
)
from isthmus_server.storage.records import CommittedState
from isthmus_server.storage.run_description import RunDescription, alone_in, refuse_unprintable
from isthmus_server.storage.schema import SCHEMA
from isthmus_server.storage.sealed_database import SealedDatabase
from isthmus_server.storage.store import KEPT_CHECKPOINTS, Store


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    checked: str
    """What was checked, and its extent."""
    damage: str = ""
    """What is damaged and what to do; empty if it is intact."""


def verify(directory: Path) -> Iterator[Finding]:
    """Check everything in a run directory that can be checked, also what the run may not need.

    Raises:
        UserError: there is no run, another version has written it, or it cannot be read.
    """
    # Another format is an error here; damage of `job.json` is one of the findings below.
    with contextlib.suppress(DamagedError):
        RunDescription.read(directory)
    try:
        store = Store.open_by_log(directory)
    except DamagedError as error:
        yield Finding("round log", str(error))
        return
    with contextlib.closing(store):
        yield from _findings(store)


def _start(store: Store) -> Iterator[Finding]:
    """The files that the model starts from, which are outside of the run's directory."""
    section = store.job.model
    if section.start is None:
        return
    path = store.base / section.start
    if not path.exists():
        yield Finding(f"model.start: not checked, as {path} is not on this machine")
        return

    def files() -> str:
        base = None if section.base is None else store.base / section.base
        found = digest_of_all(StartFiles.find_all(path, base))
        if found != section.sha256:
            raise DamagedError(
                f"{path} has the digest {found}, and the run began with {section.sha256}; put the "
                "files back, if the run is to be continued or has parameters that are not exchanged"
            )
        return f"model.start: {path}"

    yield _finding("model.start", files)


def _ledger(store: Store, head: str) -> str:
    known = last_known(store.directory, head)
    ledger = Ledger.read(store.directory / LEDGER_FILE, known)
    return f"privacy ledger: {ledger.head.number} lines"


def _signed_sums(store: Store) -> str:
    from isthmus_server.storage.signed_sums_check import check_signed_sums  # loads PyTorch

    return check_signed_sums(store)


def _findings(store: Store) -> Iterator[Finding]:
    rows = 0

    def log() -> str:
        nonlocal rows
        rows = store.log.check()
        attempts = sum(1 for _ in store.logged_attempts())
        store.run_state()
        events = len(store.events())
        return f"round log: {rows} rows, {attempts} attempts, {events} events"

    def description() -> str:
        check_description(store.directory, store.log)
        return "job.json"

    def checkpoints() -> str:
        last = store.last_round()
        check_no_newer_checkpoint(store.directory, store.checkpoints, last)
        return f"checkpoints: none is newer than the last round, {last}"

    yield _finding("round log", log)
    yield _finding("job.json", description)
    if not rows:
        return  # what follows depends on the log
    yield _finding("checkpoints", checkpoints)
    yield from _start(store)
    if (head := store.run_state().ledger_head) or (store.directory / LEDGER_FILE).exists():
        yield _finding("privacy ledger", lambda: _ledger(store, head))
    if (store.directory / signed_sums.FILE).exists():
        yield _finding(signed_sums.FILE, lambda: _signed_sums(store))
    verified = set()
    for round_, state in store.newest_commits():
        paths = {saved: store.checkpoints.directory / saved.file for saved in state.files}
        missing = {saved for saved, path in paths.items() if not path.exists()}
        if round_ == store.last_round():
            missing = set()  # damage: the run continues from them
        elif missing:
            yield Finding(
                f"checkpoints of round {round_}: none, as after a rollback; the run cannot go "
                f"back to round {round_}"
            )
        for saved, path in paths.items():
            if saved in missing or path in verified:
                continue
            verified.add(path)

            def file(round_: int = round_, path: Path = path, digest: str = saved.sha256) -> str:
                store.checkpoints.check_file(path, digest)
                return f"checkpoints/{path.name} of round {round_}: {path.stat().st_size} bytes"

            yield _finding(f"checkpoints/{path.name}", file)
    status, _, final = store.status()
    if status == "finished":

        def model() -> str:
            check_final_model(store.directory, store.checkpoints, status, final)
            return FINAL_MODEL

        yield _finding(FINAL_MODEL, model)


@dataclasses.dataclass(frozen=True)
class RolledBack:
    """What a rollback has done."""

    round: int
    """The last committed round now; 0 if none."""
    restored: bool
    """`job.json` was damaged, and was written again."""
    dropped: Path
    """The directory with a copy of what was changed or removed."""


def roll_back(directory: Path) -> RolledBack:
    """Go back to the newest commit that is intact; if nothing is damaged, to the one before.

    The attempt at the next round is then one that was cut short, as after a crash, so the run
    continues with the same plan and the same devices, and gives the same models.

    Raises:
        UserError: another process runs it, or no earlier commit can be continued.
        DamagedError: the log itself is damaged.
    """
    refuse_unprintable(directory)
    with alone_in(directory), contextlib.closing(Store.open_by_log(directory)) as store:
        store.log.check_rows()
        store.refuse_to_continue()
        try:
            return _Rollback(store).carry_out()
        except (sqlite3.Error, OSError) as error:
            raise store.unusable(error) from error


class _Rollback:
    """One rollback of a run whose log is intact, though it may have lost commits."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.directory = store.directory
        self.last = store.last_round()
        self.status, _, self.final = store.status()
        checkpoints = store.checkpoints
        self.job_damaged = not self._passes(partial(check_description, self.directory, store.log))
        self.model_damaged = not self._passes(
            partial(check_final_model, self.directory, checkpoints, self.status, self.final)
        )
        log_damaged = not self._passes(store.log.check)
        newer = not self._passes(
            partial(check_no_newer_checkpoint, self.directory, checkpoints, self.last)
        )
        self.damaged = self.job_damaged or self.model_damaged or log_damaged or newer

    def carry_out(self) -> RolledBack:
        target, state = self._target()
        if target < self.last or self.model_damaged:
            self._refuse_if_it_cannot_continue(target, state)
        kept = {saved.file for saved in state.files}
        folder = self.store.checkpoints.directory
        doomed = [path for path in folder.iterdir() if path.name not in kept]
        reopened = target < self.last or self.model_damaged
        if reopened and (self.directory / FINAL_MODEL).exists():
            doomed.append(self.directory / FINAL_MODEL)
        # Everything is copied before anything is changed, and files are deleted last: a crash in
        # between leaves files that no commit names, and loses none.
        dropped = self._copy(doomed)
        with contextlib.closing(SealedDatabase(self.store.log.file, SCHEMA)) as log:
            _drop_rounds_after(log.connection, target, reopened=reopened)
            log.head.unlink(missing_ok=True)  # it may name commits that are lost
            log.write_head()
        # Last of what changes: sums of rounds that the log has not are of no account.
        signed_sums.drop_after(self.directory, target)
        for path in doomed:
            path.unlink()
        if self.job_damaged:
            self.store.description.write(self.directory)
        return RolledBack(target, self.job_damaged, dropped)

    def _target(self) -> tuple[int, CommittedState]:
        """The commit to go back to, and its state."""
        commits = self.store.newest_commits()
        checkpoints = self.store.checkpoints
        candidates: list[tuple[int, CommittedState]] = list(commits)
        if len(commits) < KEPT_CHECKPOINTS:
            candidates.append((0, CommittedState()))
        for round_, state in candidates:
            if not all(self._passes(partial(checkpoints.check, saved)) for saved in state.files):
                self.damaged = True
            elif self.damaged or round_ < self.last:
                return round_, state
        if not self.last:
            raise UserError(f"{self.directory} has no committed round to go back from")
        raise DamagedError(
            f"the checkpoints of the last {KEPT_CHECKPOINTS} committed rounds of {self.directory} "
            "are damaged or missing; restore them from a backup, or begin a new run"
        )

    def _refuse_if_it_cannot_continue(self, target: int, state: CommittedState) -> None:
        if state.datacenter_step and self.status in ("finished", "cancelled"):
            raise UserError(
                f"the datacenter has deleted its checkpoints since {self.directory} was "
                f"{self.status}, so it cannot go back to round {target}; restore "
                "the directory from a backup, or begin a new run"
            )
        # Devices of this machine keep their history for one run; others keep it for good, and
        # refuse rounds before the last one that they have begun.
        federated = self.store.job.federated
        if federated.secure_aggregation and not federated.clients:
            for attempt in self.store.logged_attempts():
                if attempt.planned.round > target + 1 and attempt.planned.invited:
                    raise UserError(
                        f"devices have begun round {attempt.planned.round} of {self.directory}, "
                        f"and take part in no earlier round any more, so it cannot go back to "
                        f"round {target}; restore what is damaged from a backup"
                    )

    def _copy(self, files: Sequence[Path]) -> Path:
        """Copy what changes, and link what is removed, into a new directory."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        dropped = self.directory / f"dropped-{stamp}-{os.getpid()}"
        make_state_directory(dropped)
        create_state_file(dropped / "run.sqlite")
        with contextlib.closing(sqlite3.connect(dropped / "run.sqlite")) as copy:
            self.store.log.connection.backup(copy)
        for name in (run_description.FILE, "run.head", signed_sums.FILE):
            with contextlib.suppress(FileNotFoundError):
                _copy_state_file(self.directory / name, dropped / name)
        for path in files:
            try:
                (dropped / path.name).hardlink_to(path)
            except OSError:  # the file system has no hard links
                _copy_state_file(path, dropped / path.name)
        return dropped

    @staticmethod
    def _passes(check: Callable[[], object]) -> bool:
        try:
            check()
        except UserError:
            return False
        return True


def _copy_state_file(source: Path, target: Path) -> None:
    """Copy what a file has, and not its mode.

    Raises:
        FileNotFoundError: there is no such file.
    """
    with source.open("rb") as file:
        create_state_file(target)
        with target.open("wb") as copy:
            shutil.copyfileobj(file, copy)


def _drop_rounds_after(db: sqlite3.Connection, last: int, *, reopened: bool) -> None:
    """Leave the attempt at the next round as one that was cut short, and remove later ones."""
    db.execute("BEGIN IMMEDIATE")
    db.execute(
        "UPDATE attempts SET state='planned', record=NULL, run_state=NULL "
        "WHERE round=? AND state='committed'",
        (last + 1,),
    )
    db.execute("DELETE FROM attempts WHERE round>?", (last + 1,))
    # Their numbers stay used: devices refuse a comparison that they have seen.
    db.execute("UPDATE comparison_attempts SET record=NULL WHERE round>?", (last + 1,))
    if reopened:
        db.execute("UPDATE run SET status='running', reason='', final=NULL")
    db.execute("COMMIT")


def _finding(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(check())
    except (UserError, OSError, sqlite3.Error) as error:
        return Finding(what, str(error))
