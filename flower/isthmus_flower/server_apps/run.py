"""A run of a ServerApp: its devices, its process, and what the run directory keeps of it."""

from __future__ import annotations

import asyncio

from isthmus.job import write_job
from isthmus.wire import link_pb2
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.drain import Drain
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.storage.events import EventStream, ParticipantProgress
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.run_journal import RunJournal
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

DIRECTORY = "server_app"
"""Directory of a run in which its ServerApp works and leaves its files."""

NAME = "server-app"


class ServerAppRun:
    """Runs the ServerApp of a job, in place of a `Coordinator`.

    Guarantees:
      * `main` begins when the quorum of devices is ready, and the run ends when it returns;
      * when the run is stopped, the app's process is killed, and a run that continues calls `main`
        again from its beginning: nothing of what it did is replayed or restored.
    """

    def __init__(
        self, store: Store, link: Link, events: EventStream | None = None, *, installed: bool
    ) -> None:
        """Prepare; `run` opens the run on the devices.

        Args:
            store: the run on disk.
            link: connects the participants; it may outlive the run.
            events: receives every event of the run.
            installed: whether the job's paths start at a directory of installed tasks.
        """
        self.store = store
        self.job = store.job
        self.events = events or EventStream()
        self.drain = Drain()
        self._journal = RunJournal(store, self.events)
        self._link = link
        self._installed = installed
        opening = link_pb2.OpenRun(
            run_id=store.run_id, job=write_job(store.job), base=str(store.base)
        )
        availability = DeviceAvailability(store.job, Clock(), store.attempts())
        self.roster = ParticipantRoster(
            link, store.job, opening, availability, self._journal.publish
        )

    async def run(self) -> FinalModel | None:
        """Call the app's `main` until it returns; there is no final model.

        Raises:
            UserError: the run cannot continue; it is stored as failed, with the reason.
        """
        if self.store.status()[0] == "finished":
            return None
        self.drain.begin()
        self.store.reopen()
        self.roster.start()
        try:
            with self._journal.failure_noted():
                await self.roster.wait_for_embedded()
                await self.roster.require("federated")
                self._journal.finish(await self._call_main())
        finally:
            await self.roster.stop(True)
        return None

    def abandon(self) -> None:
        """Nothing is kept for a later continuation."""

    async def _call_main(self) -> str:
        """Run the app's process to its end; returns why the run ended."""
        # Only such a run needs Flower on the server.
        from isthmus_flower.server.grid import LinkGrid
        from isthmus_flower.server_apps.process import ServerAppProcess

        flower = self.job.federated.flower
        assert flower is not None
        directory = self.store.directory / DIRECTORY
        logs = self.store.directory / "logs"
        for path in (directory, logs):
            path.mkdir(exist_ok=True)
        grid = LinkGrid(
            self._link,
            asyncio.get_running_loop(),
            self.store.run_id,
            self.roster.available,
            max_bytes=flower.max_bytes,
            seconds=self.job.time.first_round_seconds,
        )
        start = {
            "source": flower.server_app,
            "base": str(self.store.base),
            "installed": self._installed,
            "config": dict(flower.config),
            "seed": self.job.seed,
        }
        process = ServerAppProcess(grid, logs / f"{NAME}.log", self._show)
        try:
            await process.run(directory, start)
        finally:
            await grid.close()
        return f"the ServerApp returned; its files are in {directory}"

    def _show(self, line: str) -> None:
        self._journal.publish(ParticipantProgress(participant=NAME, note=line))
