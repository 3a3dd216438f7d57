"""Runs of a comparison with real participants on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from isthmus.errors import JobError
from isthmus.job import Job
from isthmus.wire import link_pb2
from isthmus_server.budgets.populations import Populations
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.runs.local.fork_server import ParticipantForkServer
from isthmus_server.runs.local.processes import participant_commands
from isthmus_server.runs.local.session import running_participants
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.loading import check_participants, load_policy
from isthmus_server.transport.link import Link


class LocalRuns:
    """Trains runs with a process for each participant, which outlives the runs of a group."""

    simulated = False

    def __init__(self, directory: Path, fork_server: ParticipantForkServer) -> None:
        """`directory` is that of the comparison."""
        self._directory = directory
        self._fork_server = fork_server
        self._link: Link | None = None
        self._coordinator: Coordinator | None = None
        self._leaving = False

    def needs(self, job: Job) -> str:
        """See `ComparedRuns.needs`; refuses what would wait for participants for ever.

        Raises:
            JobError: the job starts no participants.
        """
        commands = participant_commands(job, "", self._directory)
        if not commands:
            raise JobError(
                "federated.clients=0 and datacenter.ranks=0 start no participants to compare "
                "with; set federated.clients, or use `isthmus simulate --vary`"
            )
        return repr((commands, job.time.lease_seconds))

    def devices(self, job: Job) -> int:
        """See `ComparedRuns.devices`."""
        return job.federated.clients

    @contextlib.asynccontextmanager
    async def participants(self, job: Job) -> AsyncIterator[None]:
        """See `ComparedRuns.participants`."""
        self._link = Link(job.time.lease_seconds)
        async with running_participants(
            job, self._link, None, self._directory, self._fork_server, self._decline
        ):
            yield

    def create(self, directory: Path, job: Job, base: Path) -> Store:
        """See `ComparedRuns.create`."""
        return Store.create(directory, job, base)

    async def train(
        self, store: Store, populations: Populations | None
    ) -> tuple[RunState, FinalModel]:
        """See `ComparedRuns.train`."""
        assert self._link is not None
        with contextlib.closing(store), store.locked():
            parts = RunParts.of(store, self._link, populations=populations)
            coordinator = self._coordinator = Coordinator(parts)
            check_participants(store.job, load_policy(store.job.strategy))
            if self._leaving:
                coordinator.drain.request()
            final = await coordinator.run()
        return coordinator.state, final

    def leave(self) -> None:
        """See `ComparedRuns.leave`."""
        self._leaving = True
        if self._coordinator is not None:
            self._coordinator.drain.request()

    def _decline(self, name: str, role: link_pb2.Role, reason: str) -> None:
        """Report a failed process to the run in progress; processes outlive runs."""
        if self._coordinator is not None:
            self._coordinator.roster.decline(name, role, reason)
