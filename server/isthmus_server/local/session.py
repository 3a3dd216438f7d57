"""One embedded run from start to end: the link, the other roles' processes, the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from rich.console import Console

from isthmus.job import Job
from isthmus.wire import link_pb2
from isthmus_server.local.fork_server import ParticipantForkServer
from isthmus_server.local.private_socket import private_socket
from isthmus_server.local.processes import Embedded
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.events import EventStream, ParticipantProgress
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import ParticipantListener
from isthmus_server.views.progress import ProgressView

Address = tuple[str, int]
"""Loopback host and port; port 0 takes a free one."""


class Session:
    """A run directory and what it takes to run it here."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def new(cls, job: Job, base: Path, directory: Path) -> Session:
        """A run that begins; `base` is where the job's relative paths start."""
        return cls(Store.create(directory, job, base))

    @classmethod
    def resumed(cls, directory: Path) -> Session:
        """A run that goes on."""
        return cls(Store.open(directory))

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.store.directory

    async def run(
        self, address: Address | None, console: Console, template: ParticipantForkServer
    ) -> FinalModel:
        """Train to the end, in processes forked from a template; returns the final model.

        At an address others on this machine can take part; without one nobody else can.

        Raises:
            UserError: with the one sentence to show.
        """
        torch.set_num_threads(1)  # the devices and ranks beside it need the cores
        store, link = self.store, Link(self.store.job.time.lease_seconds)
        events = EventStream()
        with contextlib.closing(store), store.locked(), ProgressView(console) as view:
            events.subscribe(view)
            link.listeners.attach(_ProgressPublisher(events))
            coordinator = Coordinator(store, link, events)
            async with participants(store.job, link, address, self.directory, template) as embedded:
                embedded.on_gone = coordinator.roster.decline
                return await coordinator.run()


class _ProgressPublisher(ParticipantListener):
    """Publishes the progress that participants report as events of the run."""

    def __init__(self, events: EventStream) -> None:
        self._events = events

    def progressed(self, name: str, progress: link_pb2.Progress) -> None:
        self._events.publish(ParticipantProgress.from_message(name, progress))


@asynccontextmanager
async def participants(
    job: Job, link: Link, address: Address | None, directory: Path, template: ParticipantForkServer
) -> AsyncIterator[Embedded]:
    """Listen, and have the job's devices and ranks running, for as long as the block lasts.

    Raises:
        UserError: nobody can listen there.
    """
    with private_socket() if address is None else contextlib.nullcontext() as socket:
        try:
            server = await _listen(link, socket, address)
            embedded = Embedded(job, server, directory, template, lambda name, role, reason: None)
            try:
                embedded.start()
                yield embedded
            finally:
                await embedded.stop()
        finally:
            await link.stop()


async def _listen(link: Link, socket: str | None, address: Address | None) -> str:
    """Returns what participants dial."""
    if socket is not None:
        await link.start_on_socket(socket)
        return socket
    assert address is not None
    host, port = address
    return f"{host}:{await link.start(host, port)}"
