"""Run the jobs that operators submit, one after another."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import torch
from rich.console import Console

from isthmus.errors import AdmissionRefused, IsthmusError, UserError
from isthmus.job import Job
from isthmus.task import check_installed
from isthmus_server.control_plane.job_queue import ENDED, JobQueue, QueuedJob, State
from isthmus_server.control_plane.server import ControlPlaneServer
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.events import Event, EventStream, JobEnded, attempt_event
from isthmus_server.storage.store import Store
from isthmus_server.strategy import load_policy
from isthmus_server.views.progress import ProgressView

_FOLLOW_SECONDS = 0.5
"""Interval in which the log of a followed run is read."""

_ROWS = 20
"""Rounds that are read at a time, because reading blocks the event loop."""

_FULL_SECONDS = 30.0
"""Interval of attempts to continue a run after the disk was full."""

_CANCELLED = "an operator cancelled it"

log = logging.getLogger(__name__)


class JobRunner:
    """Runs the jobs of a queue, one after another, while the server runs.

    Guarantees:
      * a job that fails is marked with its reason, and the next one runs; a job that fills the disk
        waits for free space and then continues;
      * a cancelled job is never continued, also after a crash of the server;
      * a task is loaded only from the server's own directory of tasks: operators cannot
        submit code.
    """

    def __init__(self, server: ControlPlaneServer, state: Path, console: Console) -> None:
        """`state` is the server's state directory."""
        self.server = server
        self.queue = JobQueue(state)
        self.tasks = state / "tasks"
        self.runs = state / "runs"
        self.console = console
        self._running: tuple[int, asyncio.Task[None]] | None = None
        self._cancelled = False
        self._coordinator: Coordinator | None = None
        self._submitted = asyncio.Event()

    async def run(self) -> None:
        """Run jobs until cancelled; an interrupted job continues when the server is started again.

        Raises:
            UserError: the queue's file cannot be used any more.
        """
        try:
            while True:
                self._submitted.clear()
                entry = self.queue.next()
                if entry is None:
                    await self._submitted.wait()
                else:
                    await self._run_job(entry)
        except sqlite3.Error as error:
            raise UserError(
                f"the queue of jobs cannot be used: {error}; repair it, then restart the server"
            ) from error

    async def _run_job(self, entry: QueuedJob) -> None:
        self._print(f"{entry.id}, submitted by {entry.submitted_by}")
        if entry.state != "running":
            self.queue.mark(entry, "running")
        task = asyncio.create_task(self._train(entry))
        self._running, self._cancelled = (entry.number, task), False
        try:
            await asyncio.shield(task)
        except IsthmusError as error:
            if _disk_is_full(error.__cause__) and not self._cancelled:
                self._print(f"{entry.id} waits for free disk space: {error.__cause__}")
                self._running = None  # meanwhile it can be cancelled like a queued job
                await asyncio.sleep(_FULL_SECONDS)
                return  # it is next again, and continues from its last round
            self._mark(entry, "failed", str(error))
            self._print(f"{entry.id} failed: {error}")
        except asyncio.CancelledError:
            current_task = asyncio.current_task()
            if current_task is not None and current_task.cancelling():  # the server stops
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise
            self._print(f"{entry.id} is cancelled")
        except Exception as error:
            log.exception("%s failed", entry.id)
            self._mark(entry, "failed", f"internal error: {type(error).__name__}: {error}")
        else:
            self._mark(entry, "finished")
        finally:
            self._running = None

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _mark(self, entry: QueuedJob, state: State, reason: str = "") -> None:
        """Record how a run has ended, unless an operator has cancelled it."""
        if not self._cancelled:
            self.queue.mark(entry, state, reason)

    async def _train(self, entry: QueuedJob) -> None:
        job = entry.job
        self._check(job)
        directory = self.runs / entry.id
        store = self._open_run(entry, job, directory)
        torch.set_num_threads(1)  # the link needs the cores more than the server's own computation
        try:
            with store.locked(), ProgressView(self.console) as view:
                events = EventStream()
                events.subscribe(view)
                self._coordinator = Coordinator(store, self.server.link, events)
                await self._coordinator.run()
        except asyncio.CancelledError:
            if self._cancelled:
                store.finish("cancelled", _CANCELLED, None)
            raise
        finally:
            self._coordinator = None
            store.close()

    def _open_run(self, entry: QueuedJob, job: Job, directory: Path) -> Store:
        """Create the run of a job, or continue it.

        Raises:
            UserError: it is damaged, or the directory has the run of another job.
        """
        if not (directory / "job.json").exists():
            return Store.create(directory, job, self.tasks, entry.run_id)
        store = Store.open_to_continue(directory)
        if store.run_id != entry.run_id:
            store.close()
            raise UserError(
                f"{directory} has the run {store.run_id!r} of another job, and this job has the "
                f"run {entry.run_id!r}; move the directory away, and submit the job again"
            )
        return store

    def _check(self, job: Job) -> None:
        _check_participants(job)
        federated = job.federated
        if federated.selection == "utility" and federated.secure_aggregation:
            raise UserError(
                'federated.selection="utility" lets the server choose the devices of a secure sum, '
                "which the devices of this server refuse: they are selected by lottery; remove it, "
                "or set federated.secure_aggregation=false"
            )
        lease = self.server.link.lease_seconds
        if job.time.lease_seconds != lease:
            raise UserError(
                f"time.lease_seconds={job.time.lease_seconds:g}, but this server has one "
                f"lease for all jobs: add --set time.lease_seconds={lease:g}"
            )
        check_installed(job.task.source, self.tasks, movable=False)
        for key, name in _named_code(job):
            self._check_module(job, key, name)
        if ":" not in job.strategy.policy:  # an external module is in the folder of the task
            load_policy(job.strategy)
        if job.task.data is not None:
            path = (self.tasks / job.task.data).resolve()
            if not path.is_relative_to(self.tasks.resolve()):
                raise UserError(f"task.data={job.task.data!r} is not below {self.tasks}")

    def _check_module(self, job: Job, key: str, name: str) -> None:
        """Refuse `module:Name` unless the module is in the task's folder: loading it executes it.

        Raises:
            UserError: with the key to change.
        """
        folder = (self.tasks / job.task.source.rpartition(":")[0]).parent
        module = name.partition(":")[0]
        file = folder / f"{module}.py"
        if not module.isidentifier() or module in sys.stdlib_module_names or not file.is_file():
            raise UserError(
                f"{key}={name!r} is not in the task's folder; this server loads only built-in "
                f"policies and strategies, and those in {folder}"
            )

    # -- requests of operators ---------------------------------------------------------------------

    def submit(self, job: Job, by: str, key: str) -> QueuedJob:
        """Append a job to the queue.

        Raises:
            UserError: it cannot run on this server.
            AdmissionRefused: the queue is full.
        """
        self._check(job)
        entry = self.queue.submit(job, by, key)
        self._submitted.set()
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
            if self._coordinator is not None:
                self._coordinator.abandon()
        self.queue.mark(
            entry, "cancelled", _CANCELLED
        )  # recorded now, because the server may die before the run has ended
        return "cancelled"

    async def progress(self, entry: QueuedJob) -> int:
        """Return the number of committed rounds of a job; 0 if its run cannot be read."""

        def read_progress() -> int:
            try:
                with self._store(entry) as store:
                    return 0 if store is None else store.last_round()
            except UserError as error:
                log.warning("%s: %s", entry.id, error)
                return 0

        return await asyncio.to_thread(read_progress)

    async def events(self, id_: str, follow: bool) -> AsyncIterator[Event]:
        """Yield the ended attempts of a job so far; with `follow`, until the job ends.

        Raises:
            AdmissionRefused: there is no such job.
        """
        last = 0
        while True:
            entry = self.queue.get(id_)
            with self._store(entry) as store:
                while store is not None and (rows := store.ended_since(last, _ROWS)):
                    for number, record in rows:
                        last = number
                        yield attempt_event(record)
            if entry.state in ENDED:
                yield JobEnded(state=entry.state, reason=entry.reason)
            if entry.state in ENDED or not follow:
                return
            await asyncio.sleep(_FOLLOW_SECONDS)

    @contextlib.contextmanager
    def _store(self, entry: QueuedJob) -> Iterator[Store | None]:
        directory = self.runs / entry.id
        store = Store.open(directory) if (directory / "job.json").exists() else None
        try:
            yield store
        except sqlite3.Error as error:
            raise UserError(f"the run in {directory} cannot be read: {error}") from error
        finally:
            if store is not None:
                store.close()


def _disk_is_full(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _named_code(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the keys and values `module:Name` of a job that name code for the server to load."""
    if ":" in job.strategy.policy:
        yield "strategy.policy", job.strategy.policy
    flower = job.federated.flower
    strategy, key = (None if flower is None else flower.strategy), "federated.flower.strategy"
    while strategy is not None:
        if ":" in strategy.name:
            yield f"{key}.name", strategy.name
        strategy, key = strategy.inner, f"{key}.inner"


def _check_participants(job: Job) -> None:
    """Refuse a job whose participants would have to be started by this server.

    Raises:
        UserError: with the keys to change.
    """
    for key, count in (
        ("federated.clients", job.federated.clients),
        ("datacenter.ranks", job.datacenter.ranks),
    ):
        if count:
            raise UserError(
                f"{key}={count} applies to `isthmus run`; participants of this server join "
                f"by themselves: add --set {key}=0"
            )
