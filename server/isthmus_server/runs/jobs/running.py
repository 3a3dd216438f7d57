"""One job of a server while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import CannotContinue, IsthmusError, UserError
from isthmus.job import Job
from isthmus.task import keep_process, load_task, user_code
from isthmus_server.budgets.populations import Populations
from isthmus_server.observability.observers import Observers
from isthmus_server.read.report.progress import waiting_for
from isthmus_server.runs.jobs.queue import QueuedJob
from isthmus_server.storage.events import (
    Event,
    EventStream,
    Paused,
    RoundPlanned,
    ServerTakenOver,
    WaitingForParticipants,
)
from isthmus_server.storage.fence import Fence, Takeover
from isthmus_server.storage.run_journal import RunJournal
from isthmus_server.storage.store import Store
from isthmus_server.transport.job_link import JobLink
from isthmus_server.transport.link import Link

if TYPE_CHECKING:
    from isthmus_server.rounds.run_loop import RunLoop

CANCELLED = "an operator cancelled it"

MODELS_IN_MEMORY = 8
"""Copies of a model for which a server needs memory: the model, its update and their sums, the
states of the optimizer and the averages."""


class RunningJob:
    """A job with its run, from when it is begun to when it ends, pauses or is cancelled."""

    def __init__(
        self,
        entry: QueuedJob,
        link: Link,
        fence: Fence | None = None,
        takeovers: Sequence[Takeover] = (),
    ) -> None:
        """Nothing runs yet.

        Args:
            entry: the job.
            link: the server's, or a view of it as one of several jobs.
            fence: the server's, if others may take over from it.
            takeovers: in which servers inherited the run, the oldest first.
        """
        self.entry = entry
        self._fence = fence
        self._takeovers = takeovers
        self.link = link
        self.cancelled = False
        self.paused_by = ""
        """The operator who has paused it; empty if nobody has."""
        self.task: asyncio.Task[None] | None = None
        """Runs it."""
        self._loop: RunLoop | None = None
        self._leaving = False
        self._waiting: WaitingForParticipants | Paused | None = None

    @property
    def waits(self) -> WaitingForParticipants | Paused | None:
        """What it waits for at the moment."""
        return self._waiting

    def waits_in_words(self, sees: Callable[[str], bool] = lambda project: True) -> str:
        """What it waits for, or the jobs whose turn it is; empty if for nothing.

        `sees` says of a project whether its jobs may be named.
        """
        if others := self.link.waits_for:
            names = [each.name for each in others if sees(each.project)]
            if len(names) < len(others):
                names.append("jobs of other projects")
            return f"waiting for its turn: its participants work for {', '.join(names)}"
        if isinstance(self._waiting, WaitingForParticipants):
            return waiting_for(self._waiting)
        return f"waiting: {self._waiting.reason}" if isinstance(self._waiting, Paused) else ""

    def leave(self) -> None:
        """End it after its running round, or at once if there is none."""
        self._leaving = True
        if self._loop is not None:
            self._loop.drain.request()

    def cancel(self) -> bool:
        """End it at once, for good; returns whether it had not ended by itself."""
        assert self.task is not None
        self.cancelled = self.task.cancel()
        if self.cancelled and self._loop is not None:
            self._loop.abandon()
        return self.cancelled

    async def train(
        self, runs: Path, tasks: Path, observers: Observers, populations: Populations
    ) -> str:
        """Run the job to its end; returns why it ended.

        Args:
            runs: directory of the runs.
            tasks: directory of the server's own tasks.
            observers: what watches the run.
            populations: privacy ledgers that all jobs share.

        Raises:
            UserError: it cannot be run.
            CannotContinue: it cannot go on now.
            TakenOver: another server has taken over.
        """
        store = open_run(self.entry, runs / self.entry.id, tasks, self._fence)
        try:
            await asyncio.to_thread(import_training)  # the link is served meanwhile
            import torch

            from isthmus_server.rounds.run_loop import run_loop

            # The link needs the cores more than the server's own computation.
            torch.set_num_threads(1)
            events = EventStream()
            with store.locked():
                async with observers.watching(store, events, self.entry.id, waits=False):
                    events.subscribe(self._note_waiting)
                    note_takeovers(store, events, self._takeovers)
                    if isinstance(self.link, JobLink):
                        check_memory(store.job, tasks)
                    self._loop = run_loop(
                        store, self.link, events, installed=True, populations=populations
                    )
                    if self._leaving:
                        self._loop.drain.request()
                    await self._loop.run()
                    return store.status()[1]
        except asyncio.CancelledError:
            if self.cancelled:
                store.finish("cancelled", CANCELLED, None)
            raise
        except CannotContinue as error:
            with contextlib.suppress(OSError, sqlite3.Error):
                store.finish("paused", str(error), None)
            raise
        finally:
            self._loop = None
            store.close()

    def _note_waiting(self, event: Event) -> None:
        """Keep the last event about what it waits for, for those who follow it."""
        if isinstance(event, WaitingForParticipants | Paused):
            self._waiting = event
        elif isinstance(event, RoundPlanned):
            self._waiting = None


def note_takeovers(store: Store, events: EventStream, takeovers: Sequence[Takeover]) -> None:
    """Have the run's log and its watchers know of takeovers that the log does not have yet.

    It changes nothing of what the run does: the next attempt is that after a restart.
    """
    if not takeovers:
        return
    known = {
        (each.at, each.by)
        for each in store.events(ServerTakenOver.kind)
        if isinstance(each, ServerTakenOver)
    }
    round_, attempt = store.at_work()
    for takeover in takeovers:
        if (takeover.at, takeover.by) not in known:  # before a pause, or by an earlier server
            event = ServerTakenOver(
                **dataclasses.asdict(takeover),
                round=round_,
                attempt=attempt,
            )
            RunJournal(store, events).publish(event)


def import_training() -> None:
    """Import PyTorch and what trains with it: for a server's first job, and for seconds."""
    if "isthmus_server.rounds.run_loop" in sys.modules:
        return
    importlib.import_module("isthmus_server.rounds.run_loop")
    gc.freeze()  # imported modules stay: exclude them from every later collection


def check_memory(job: Job, tasks: Path) -> None:
    """Refuse a further job for which this machine has no memory left.

    Raises:
        CannotContinue: it is tried again later.
    """
    needed = MODELS_IN_MEMORY * _model_bytes(job, tasks)
    available = _available_memory()
    if available is not None and needed > available:
        raise CannotContinue(
            f"about {needed / 1e9:.1f} GB of memory are needed, and {available / 1e9:.1f} GB are "
            "available while others run"
        )


def _model_bytes(job: Job, tasks: Path) -> int:
    """Size of a job's model, which is not allocated; 0 for an app."""
    if job.federated.app is not None:
        return 0
    import torch

    keep_process()
    task = load_task(job.task.source, job.task.settings, base=tasks, data=job.task.data_in(tasks))
    with torch.device("meta"), user_code("model()"):
        model = task.model()
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    return None


def open_run(entry: QueuedJob, directory: Path, tasks: Path, fence: Fence | None = None) -> Store:
    """Create the run of a job, or continue it.

    Raises:
        UserError: it is damaged or was cancelled, or the directory has the run of another job.
        TakenOver: another server has taken over from that of the `fence`.
    """
    if not (directory / "job.json").exists():
        return Store.create(directory, entry.job, tasks, entry.run_id, fence)
    store = Store.open_to_write(directory, fence)
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
    try:
        if refused:
            raise UserError(refused)
        store.refuse_to_continue()
    except BaseException:
        store.close()
        raise
    return store


def cancel_resting(directory: Path, fence: Fence | None = None) -> None:
    """Record in the run of a job that does not run that it ended, so that it need not be kept.

    A run that is damaged stays as it is: its job is cancelled all the same.
    """
    if not (directory / "job.json").exists():  # it has not begun
        return
    with (
        contextlib.suppress(IsthmusError, OSError, sqlite3.Error),
        contextlib.closing(Store.open_to_write(directory, fence)) as store,
        store.locked(),
    ):
        store.finish("cancelled", CANCELLED, None)
