"""Run the jobs that operators submit, one after another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import torch
from rich.console import Console

from isthmus.errors import (
    AdmissionRefused,
    CannotContinue,
    IsthmusError,
    ParticipantsMissing,
    UserError,
)
from isthmus.job import Job
from isthmus.printable import in_lines
from isthmus.system.faults import is_transient
from isthmus_server.control_plane.early_returns import EarlyReturns
from isthmus_server.control_plane.job_checks import check_job
from isthmus_server.control_plane.job_queue import ENDED, JobQueue, QueuedJob, State
from isthmus_server.control_plane.server import ControlPlaneServer
from isthmus_server.server_apps.loop import RunLoop, run_loop
from isthmus_server.storage.events import (
    Event,
    EventStream,
    JobEnded,
    JobPaused,
    Paused,
    RoundPlanned,
    WaitingForParticipants,
    attempt_event,
)
from isthmus_server.storage.sealed_database import database_error
from isthmus_server.storage.store import Store
from isthmus_server.views.progress import ProgressView, waiting_for

_FOLLOW_SECONDS = 0.5
"""Interval in which the log of a followed run is read."""

_ROWS = 20
"""Rounds that are read at a time, because reading blocks the event loop."""

_QUEUE_SECONDS = 10.0
"""Interval of attempts to use a queue that could not be read or written."""

_CANCELLED = "an operator cancelled it"

log = logging.getLogger(__name__)


class JobRunner:
    """Runs the jobs of a queue, one after another, while the server runs.

    Guarantees:
      * a job that cannot continue is paused with the reason, the next one runs, and it is tried
        again later, or when a participant comes that it was missing; only what is the user's
        mistake for certain fails it;
      * a cancelled job is never continued, also after a crash of the server;
      * `leave` lets the running round end, and begins nothing new;
      * a task is loaded only from the server's own directory of tasks: operators cannot
        submit code.
    """

    def __init__(self, server: ControlPlaneServer, state: Path, console: Console) -> None:
        """`state` is the server's state directory."""
        self.server = server
        self.queue = JobQueue(state)
        self.tasks = state / "tasks"
        self.runs = state / "runs"
        self.populations = state / "privacy"
        self.console = console
        self._running: tuple[int, asyncio.Task[str]] | None = None
        self._cancelled = False
        self._leaving = False
        self._loop: RunLoop | None = None
        self._waiting: WaitingForParticipants | Paused | None = None
        """What the running job waits for."""
        self._woken = asyncio.Event()
        self._returns = EarlyReturns(self._woken.set)

    async def run(self) -> None:
        """Run jobs until cancelled, or until the running round has ended after `leave`.

        An interrupted job continues when the server is started again.

        Raises:
            UserError: the queue's file cannot be used any more.
        """
        self.server.link.listeners.attach(self._returns)
        try:
            await self._run_jobs()
        finally:
            self.server.link.listeners.detach(self._returns)

    async def _run_jobs(self) -> None:
        while not self._leaving:
            self._woken.clear()
            try:
                for number in self._returns.take():
                    self.queue.end_pause(number)
                entry = self.queue.next()
                if entry is None:
                    await self._wait(self.queue.seconds_until_due())
                else:
                    await self._run_job(entry)
            except (sqlite3.Error, OSError) as error:  # the database, or its head file
                if not is_transient(error):
                    raise UserError(
                        f"the queue of jobs cannot be used: {self.queue.error(error)}; then "
                        "restart the server"
                    ) from error
                now = self.queue.error(error)
                self._print(f"the queue of jobs cannot be used now: {now}; it is tried again")
                await self._wait(_QUEUE_SECONDS)

    def leave(self) -> None:
        """End `run` after the running round, or at once if there is none."""
        self._leaving = True
        self._woken.set()
        if self._loop is not None:
            self._loop.drain.request()

    async def _wait(self, seconds: float | None) -> None:
        """Wait for an operator, for a participant that a job is missing, or for that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    async def _run_job(self, entry: QueuedJob) -> None:
        self._print(f"{entry.id}, submitted by {entry.submitted_by}")
        rounds = await self.progress(entry)
        if self._leaving or self.queue.get(entry.id).state in ENDED:  # cancelled meanwhile
            return
        self._returns.forget(entry.number)
        if entry.state != "running":
            self.queue.mark(entry, "running")
        task = asyncio.create_task(self._train(entry))
        self._running, self._cancelled = (entry.number, task), False
        try:
            reason = await asyncio.shield(task)
        except asyncio.CancelledError:
            current_task = asyncio.current_task()
            if current_task is not None and current_task.cancelling():  # the server stops
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise
            if self._cancelled:
                self._print(f"{entry.id} is cancelled")
            else:
                self._print(f"{entry.id} continues when the server is started again")
        except Exception as error:  # noqa: BLE001 - whatever it is, the next job runs
            await self._end_or_pause(entry, error, rounds)
        else:
            self._mark(entry, "finished", reason)
        finally:
            self._running = None
            self._waiting = None

    async def _end_or_pause(self, entry: QueuedJob, error: Exception, rounds: int) -> None:
        """Pause a job that could not go on; only what is the user's mistake for certain fails it.

        `rounds` had been committed when it began.
        """
        transient = isinstance(error, CannotContinue) or is_transient(error)
        reason = in_lines(str(error))  # the queue and the console take only what is UTF-8
        if isinstance(error, UserError) and not transient:
            self._mark(entry, "failed", reason)
            self._print(f"{entry.id} failed: {reason}")
            return
        if not isinstance(error, IsthmusError):
            log.error("%s is interrupted", entry.id, exc_info=error)
            reason = f"internal error: {type(error).__name__}: {reason}"
        if self._cancelled:
            return
        progressed = await self.progress(entry) > rounds
        self._running = None  # from now on it can be cancelled like a queued job
        paused = self.queue.pause(entry, reason, progressed=progressed)
        if isinstance(error, ParticipantsMissing):
            connected = list(self.server.link.peers.values())
            self._returns.await_missing(entry.number, error, connected, progressed=progressed)
        until = time.strftime("%H:%M:%S UTC", time.gmtime(paused.next_try))
        self._print(f"{entry.id} is paused until {until}: {reason}")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _mark(self, entry: QueuedJob, state: State, reason: str = "") -> None:
        """Record how a run has ended, unless an operator has cancelled it."""
        self._returns.forget(entry.number, ended=True)
        if not self._cancelled:
            self.queue.mark(entry, state, reason)

    async def _train(self, entry: QueuedJob) -> str:
        """Run a job to its end; returns why it ended."""
        job = entry.job
        self._check(job)
        directory = self.runs / entry.id
        store = self._open_run(entry, job, directory)
        torch.set_num_threads(1)  # the link needs the cores more than the server's own computation
        try:
            with store.locked(), ProgressView(self.console) as view:
                events = EventStream()
                events.subscribe(view)
                events.subscribe(self._note_waiting)
                self._loop = run_loop(
                    store,
                    self.server.link,
                    events,
                    installed=True,
                    populations=self.populations,
                )
                if self._leaving:
                    self._loop.drain.request()
                await self._loop.run()
                return store.status()[1]
        except asyncio.CancelledError:
            if self._cancelled:
                store.finish("cancelled", _CANCELLED, None)
            raise
        except CannotContinue as error:
            with contextlib.suppress(OSError, sqlite3.Error):
                store.finish("paused", str(error), None)
            raise
        finally:
            self._loop = None
            store.close()

    def _note_waiting(self, event: Event) -> None:
        """Keep the last event about what the running job waits for, for those who follow it."""
        if isinstance(event, WaitingForParticipants | Paused):
            self._waiting = event
        elif isinstance(event, RoundPlanned):
            self._waiting = None

    def _check(self, job: Job) -> None:
        check_job(job, self.tasks, self.server.link.lease_seconds)

    def _open_run(self, entry: QueuedJob, job: Job, directory: Path) -> Store:
        """Create the run of a job, or continue it.

        Raises:
            UserError: it is damaged or was cancelled, or the directory has the run of another job.
        """
        if not (directory / "job.json").exists():
            return Store.create(directory, job, self.tasks, entry.run_id)
        store = Store.open_to_continue(directory)
        refused = ""
        if store.run_id != entry.run_id:
            refused = (
                f"{directory} has the run {store.run_id!r} of another job, and this job has the "
                f"run {entry.run_id!r}; move the directory away, and submit the job again"
            )
        elif store.status()[0] == "cancelled":
            refused = (
                f"{directory} was cancelled, which the queue of jobs has lost: jobs.sqlite is an "
                "older copy; submit the job again"
            )
        if refused:
            store.close()
            raise UserError(refused)
        return store

    # -- requests of operators ---------------------------------------------------------------------

    def submit(self, job: Job, by: str, key: str) -> QueuedJob:
        """Append a job to the queue.

        Raises:
            UserError: it cannot run on this server.
            AdmissionRefused: the queue is full.
        """
        self._check(job)
        entry = self.queue.submit(job, by, key)
        self._woken.set()
        return entry

    def cancel(self, id_: str) -> State:
        """Remove a job from the queue, or stop it; committed rounds are kept.

        Raises:
            AdmissionRefused: there is no such job, or it has ended.
        """
        entry = self.queue.get(id_)
        if entry.state in ENDED:
            raise AdmissionRefused(f"{id_} has ended already: {entry.state}")
        if self._running is not None and self._running[0] == entry.number:
            self._cancelled = self._running[1].cancel()
            if not self._cancelled:
                raise AdmissionRefused(f"{id_} has ended just now")
            if self._loop is not None:
                self._loop.abandon()
        self._returns.forget(entry.number, ended=True)
        self.queue.mark(
            entry, "cancelled", _CANCELLED
        )  # recorded now, because the server may die before the run has ended
        self._woken.set()
        return "cancelled"

    def resume(self, id_: str) -> State:
        """Have a paused job tried as soon as it is its turn; returns its state until then.

        A failed one too: what made it fail may have been repaired.

        Raises:
            AdmissionRefused: there is no such job, or it is neither paused nor failed.
        """
        entry = self.queue.get(id_)
        if entry.state not in ("paused", "failed"):
            raise AdmissionRefused(f"{id_} is neither paused nor failed: it is {entry.state}")
        self.queue.resume(entry)
        self._woken.set()
        return "paused"

    async def progress(self, entry: QueuedJob) -> int:
        """Return the number of committed rounds of a job; 0 if its run cannot be read."""

        def read_progress() -> int:
            try:
                with self._store(entry) as store:
                    return 0 if store is None else store.last_round()
            except (UserError, OSError, sqlite3.Error) as error:
                log.warning("%s: %s", entry.id, error)
                return 0

        return await asyncio.to_thread(read_progress)

    async def events(self, id_: str, follow: bool) -> AsyncIterator[Event]:
        """Yield the ended attempts of a job so far; with `follow`, until the job ends.

        Raises:
            AdmissionRefused: there is no such job.
        """
        last, shown = 0, None
        while True:
            entry = self.queue.get(id_)
            with self._store(entry) as store:
                while store is not None and (rows := store.ended_since(last, _ROWS)):
                    for number, record in rows:
                        last = number
                        yield attempt_event(record)
            if entry.state in ENDED:
                yield JobEnded(state=entry.state, reason=entry.reason)
            now = self._hindrance(entry)
            if now is not None and not _is_same_wait(now, shown):
                yield now
            shown = now
            if entry.state in ENDED or not follow:
                return
            await asyncio.sleep(_FOLLOW_SECONDS)

    def waiting_for(self, entry: QueuedJob) -> str:
        """What a running job waits for at the moment, in words; empty if for nothing."""
        now = None if entry.state == "paused" else self._hindrance(entry)
        if isinstance(now, WaitingForParticipants):
            return waiting_for(now)
        return f"waiting: {now.reason}" if isinstance(now, Paused) else ""

    def _hindrance(self, entry: QueuedJob) -> Event | None:
        """Why a job does not go on at the moment."""
        if entry.state == "paused":
            return JobPaused(reason=entry.reason, next_try=entry.next_try)
        running = self._running is not None and self._running[0] == entry.number
        return self._waiting if running else None

    @contextlib.contextmanager
    def _store(self, entry: QueuedJob) -> Iterator[Store | None]:
        directory = self.runs / entry.id
        store = Store.open(directory) if (directory / "job.json").exists() else None
        try:
            yield store
        except sqlite3.Error as error:
            raise database_error(directory / "run.sqlite", error) from error
        finally:
            if store is not None:
                store.close()


def _is_same_wait(now: Event, shown: Event | None) -> bool:
    """Whether a log has said it already: that more participants are ready is not said again."""
    if isinstance(now, WaitingForParticipants) and isinstance(shown, WaitingForParticipants):
        return (now.clients, now.datacenters) == (shown.clients, shown.datacenters)
    if isinstance(now, Paused) and isinstance(shown, Paused):
        return (now.round, now.reason) == (shown.round, shown.reason)
    return now == shown
