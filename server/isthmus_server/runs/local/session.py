"""Run a job on this machine: the link, the participants' processes and the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.unused_layout import unused_layout
from isthmus.system.private_socket import private_socket
from isthmus_server.budgets.run_budgets import check_budgets
from isthmus_server.observability.observers import Observers
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_loop import RunLoop, run_loop
from isthmus_server.runs.local.changed_layout import check_examples_at_once
from isthmus_server.runs.local.fork_server import ParticipantForkServer
from isthmus_server.runs.local.processes import LocalProcesses, OnFailure, started_roles
from isthmus_server.storage.events import EventStream
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.run_description import (
    alone_in,
    is_simulated,
    remove_refused_run,
    resume_command,
)
from isthmus_server.storage.store import Store
from isthmus_server.strategy.loading import check_participants, load_policy
from isthmus_server.transport.link import Link

Address = tuple[str, int]
"""Loopback host and port; port 0 selects a free one."""


class LocalRun:
    """A run on this machine, with its run directory."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._loop: RunLoop | None = None

    @classmethod
    def new(cls, job: Job, base: Path, directory: Path) -> LocalRun:
        """Create a run; the job's relative paths start at `base`.

        It takes the place of one whose job was refused before anything had begun.

        Raises:
            UserError: the directory has a run, or no noise meets a privacy budget of the job: then
                there is no directory yet, so that the corrected job can have it.
        """
        check_budgets(job)
        remove_refused_run(directory)
        return cls(Store.create(directory, job, base))

    @classmethod
    def resumed(cls, directory: Path, changes: Mapping[str, Any] | None = None) -> LocalRun:
        """Open an existing run to continue it.

        Args:
            directory: the run directory.
            changes: of the layout in which ranks train from now on, see `layout_changes`.

        Raises:
            UserError: it was simulated, or nothing may continue it.
            JobError: a step would not be the same with the changes.
        """
        if is_simulated(directory):
            raise UserError(
                f"{directory} has a simulated run; continue it with `{resume_command(directory)}`"
            )
        store = Store.open_to_continue(directory)
        if changes:
            try:
                with alone_in(store.directory):
                    check_examples_at_once(store, changes)
                    store.change_layout(changes)
            except BaseException:
                store.close()
                raise
        return cls(store)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.store.directory

    async def run(
        self,
        address: Address | None,
        console: Console,
        fork_server: ParticipantForkServer,
        observers: Observers | None = None,
    ) -> FinalModel | None:
        """Train to the end, in processes of the fork server; returns the final model.

        A run that a ServerApp directs has none.

        With an address, other processes of this machine can take part too. Without observers the
        run is shown on the console.

        Raises:
            UserError: with the sentence to show.
        """
        torch.set_num_threads(1)  # the processes of devices and ranks need the cores
        store = self.store
        # Who reaches an address could name any open file, which is opened with this user's rights.
        link = Link(store.job.time.lease_seconds, shares=address is None)
        events = EventStream()
        observers = observers or Observers(console)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.closing(store))
            stack.enter_context(store.locked())
            await stack.enter_async_context(observers.serving())
            await stack.enter_async_context(observers.watching(store, events, store.job.name))
            loop = self._loop = self._made_loop(link, events)
            loop.roster.started_here = started_roles(store.job)
            trains = isinstance(loop, Coordinator)
            if isinstance(loop, Coordinator) and loop.parts.evaluator.known_metrics == []:
                console.print(
                    "nothing evaluates this model: the task has no eval_data(), and "
                    "evaluation.devices is 0"
                )
            if trains and (note := unused_layout(store.ranks_job, joinable=address is not None)):
                console.print(note, markup=False)
            if address is None and trains:  # others could join there
                check_participants(store.job, load_policy(store.job.strategy))
            async with running_participants(
                store.ranks_job, link, address, self.directory, fork_server, loop.roster.decline
            ):
                return await loop.run()

    def _made_loop(self, link: Link, events: EventStream) -> RunLoop:
        return run_loop(self.store, link, events, installed=False)

    def leave(self) -> None:
        """End `run` after the running round, or at once if there is none."""
        if self._loop is not None:
            self._loop.drain.request()


@asynccontextmanager
async def running_participants(
    job: Job,
    link: Link,
    address: Address | None,
    directory: Path,
    fork_server: ParticipantForkServer,
    on_failure: OnFailure,
) -> AsyncIterator[LocalProcesses]:
    """Listen, and run the job's devices and ranks while the block lasts.

    These come through a socket that only this user can reach: at the address, which is for others,
    another user could listen in place of this process, and would say which code they run.

    Raises:
        UserError: the server cannot listen at the address.
    """
    with private_socket() as socket:
        try:
            await link.start_on_socket(socket)
            if address is not None:
                await link.start(*address)
            processes = LocalProcesses(job, socket, directory, fork_server, on_failure)
            try:
                processes.start()
                yield processes
            finally:
                await processes.stop()
        finally:
            await link.stop()
