"""A run of a ServerApp: its devices, its process, and what the run directory keeps of it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

from isthmus.errors import IsthmusError
from isthmus.job import write_job
from isthmus.wire import link_pb2
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.readiness import Drain
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.storage.events import (
    Event,
    EventStream,
    ParticipantProgress,
    ReportedEvent,
    RunFailed,
    RunFinished,
)
from isthmus_server.storage.records import FinalModel
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
        self._link = link
        self._installed = installed
        opening = link_pb2.OpenRun(
            run_id=store.run_id, job=write_job(store.job), base=str(store.base)
        )
        availability = DeviceAvailability(store.job, Clock(), store.attempts())
        self.roster = ParticipantRoster(link, store.job, opening, availability, self._publish)

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
            await self.roster.wait_for_embedded()
            await self.roster.require("federated")
            reason = await self._call_main()
            self.store.finish("finished", reason, None)
            self._publish(RunFinished(reason=reason, spent=0.0, final=None))
        except (IsthmusError, OSError, sqlite3.Error) as error:
            failure = error if isinstance(error, IsthmusError) else self.store.unusable(error)
            with contextlib.suppress(OSError, sqlite3.Error):  # a full disk cannot store it
                self.store.finish("failed", str(failure), None)
            self._publish(RunFailed(reason=str(failure)))
            raise failure from error
        finally:
            await self.roster.stop(True)
        return None

    def abandon(self) -> None:
        """Nothing is kept for a later continuation."""

    async def _call_main(self) -> str:
        """Run the app's process to its end; returns why the run ended."""
        # Only such a run needs Flower on the server.
        from isthmus_server.flower.grid import LinkGrid
        from isthmus_server.server_apps.process import ServerAppProcess

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
            seconds=self.job.time.round_seconds,
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
        self._publish(ParticipantProgress(participant=NAME, note=line))

    def _publish(self, event: Event) -> None:
        if isinstance(event, ReportedEvent):
            self.store.log_event(event)
        self.events.publish(event)
