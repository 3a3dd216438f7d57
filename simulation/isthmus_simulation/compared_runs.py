"""Runs of a comparison with simulated participants."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from isthmus.job import Job
from isthmus_server.budgets.populations import Populations
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_simulation.run import Simulation, check, gpus_of


class SimulatedRuns:
    """Simulates one run after the other (an `isthmus_server.runs.local.compare.ComparedRuns`).

    Has to be used on a `VirtualTimeLoop`.
    """

    simulated = True

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._simulation: Simulation | None = None
        self._leaving = False

    def needs(self, job: Job) -> str:
        """See `ComparedRuns.needs`; refuses what cannot be simulated before the first run.

        Raises:
            JobError: the job cannot be simulated.
            UserError: it names a GPU that is not here.
        """
        check(job)
        gpus_of(job)
        return ""

    def devices(self, job: Job) -> int:
        """See `ComparedRuns.devices`."""
        return job.simulation.population(job.federated)

    @contextlib.asynccontextmanager
    async def participants(self, job: Job) -> AsyncIterator[None]:
        """Do nothing: each run has participants of its own."""
        yield

    def create(self, directory: Path, job: Job, base: Path) -> Store:
        """See `ComparedRuns.create`."""
        return Simulation.new(job, base, directory).store

    async def train(
        self, store: Store, populations: Populations | None
    ) -> tuple[RunState, FinalModel]:
        """See `ComparedRuns.train`."""
        simulation = self._simulation = Simulation(store, populations=populations)
        if self._leaving:
            simulation.leave()
        final = await simulation.run()
        return simulation.state, final

    def leave(self) -> None:
        """See `ComparedRuns.leave`."""
        self._leaving = True
        if self._simulation is not None:
            self._simulation.leave()
