"""Run a job with simulated devices: the real coordinator, on a link without a network."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch
from rich.console import Console

from isthmus.errors import JobError, UserError
from isthmus.job import Job
from isthmus.system.process import keep_freed_memory
from isthmus.transport.blobs import Buffer
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.training.accelerator import Accelerators
from isthmus_datacenter.virtual import VirtualDatacenter
from isthmus_server.budgets.populations import Populations
from isthmus_server.budgets.run_budgets import check_budgets
from isthmus_server.observability.observers import Observers
from isthmus_server.regimes.secure_sums.robust_rule import check_robust
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.run_description import (
    FILE,
    RunDescription,
    is_simulated,
    mark_simulated,
    remove_refused_run,
    resume_command,
)
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.loading import check_participants, load_policy
from isthmus_server.transport.inprocess import InProcessLink
from isthmus_simulation.devices.device import VirtualHost
from isthmus_simulation.devices.fleet import VirtualFleet
from isthmus_simulation.devices.forked_crew import ForkedCrew
from isthmus_simulation.devices.profiles import DeviceProfile
from isthmus_simulation.devices.stacks.requirements import check_settings
from isthmus_simulation.devices.workers import Crew
from isthmus_simulation.population import Population, SimulationEvents
from isthmus_simulation.progress import SimulationProgress, errors_of_devices_once
from isthmus_simulation.rank_crew import RankCrew
from isthmus_simulation.virtual_time import VirtualClock


class Simulation:
    """A run with simulated participants, with its run directory.

    Guarantees:
      * whatever `isthmus run` stores of a run is stored, with the same meaning; durations are
        simulated;
      * the result depends on the job and its seed only, not on the speed of this machine, if the
        job says how devices train (`simulation.training`).
    """

    def __init__(
        self, store: Store, crew: RankCrew | None = None, populations: Populations | None = None
    ) -> None:
        """Simulate the run of a store.

        Args:
            store: the run on disk.
            crew: trains its devices; None for this machine.
            populations: privacy ledgers that runs share; None for a run by itself.

        Raises:
            JobError: the job cannot be simulated.
        """
        self.store = store
        self._crew = crew
        self._populations = populations
        check(store.job)
        self._gpus = gpus_of(store.job) if crew is None else []
        self._coordinator: Coordinator | None = None
        self._leaving = False

    @classmethod
    def new(cls, job: Job, base: Path, directory: Path, crew: RankCrew | None = None) -> Self:
        """Create a run; the job's relative paths start at `base`.

        It takes the place of one whose job was refused before anything had begun.

        Raises:
            JobError: the job cannot be simulated, its robust rule cannot be used, or no noise
                meets a privacy budget of it.
            UserError: it names a GPU that is not here.
        """
        check(job)
        if crew is None:
            gpus_of(job)
        check_budgets(job)
        check_robust(job.federated)
        remove_refused_run(directory)
        mark_simulated(directory)
        return cls(Store.create(directory, job, base), crew)

    @classmethod
    def new_or_resumed(
        cls, job: Job, base: Path, directory: Path, crew: RankCrew | None = None
    ) -> Simulation:
        """Create a run, or open the one that is in the directory.

        Raises:
            JobError: the job cannot be simulated, or no noise meets a privacy budget of it.
            UserError: the run in the directory is of another job, or was not simulated.
        """
        remove_refused_run(directory)
        if not (directory / FILE).exists():
            return cls.new(job, base, directory, crew)
        found = RunDescription.read(directory)
        if found.job.model_dump_json() != job.model_dump_json() or found.base != base:
            raise UserError(
                f"{directory} has a run of another job, in another folder, or with other options; "
                "choose another --run-dir"
            )
        return cls.resumed(directory, crew)

    @classmethod
    def resumed(cls, directory: Path, crew: RankCrew | None = None) -> Simulation:
        """Open an existing run to continue it.

        Raises:
            UserError: it was not simulated.
        """
        if not is_simulated(directory):
            raise UserError(
                f"{directory} has a run with real participants; continue it with "
                f"`{resume_command(directory)}`"
            )
        return cls(Store.open_to_continue(directory), crew)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.store.directory

    async def run(self, observers: Observers | None = None) -> FinalModel:
        """Train to the end; has to run on a `VirtualTimeLoop`. Returns the final model.

        Raises:
            UserError: with the sentence to show.
        """
        torch.set_num_threads(1)  # as real devices
        keep_freed_memory()
        store = self.store
        job = self.store.job
        link = InProcessLink()
        observers = observers or Observers(Console(quiet=True))
        events = SimulationEvents()
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.closing(store))
            stack.enter_context(store.locked())
            await stack.enter_async_context(observers.serving())
            await stack.enter_async_context(observers.watching(store, events, job.name))
            stack.enter_context(errors_of_devices_once())
            fleet = fleet_of(job, store.directory, self._profile, self._crew or self._forks())
            stack.enter_context(contextlib.closing(fleet))
            population = Population(job, link, fleet, self._host)
            events.whole_population = population.is_whole
            check_participants(job, load_policy(job.strategy), population.count)
            clock = VirtualClock(store.run_state().elapsed)
            parts = RunParts.of(store, link, events, clock, self._populations)
            self._watch(parts, fleet)
            coordinator = self._coordinator = Coordinator(parts)
            coordinator.roster.started_clients = population.count if population.is_whole else 0
            coordinator.roster.waits_for_connected = not population.is_whole
            if self._leaving:
                coordinator.drain.request()
            if job.datacenter.ranks:
                seconds = job.simulation.datacenter_step_seconds
                link.join("datacenter-0", link_pb2.DATACENTER, TimedDatacenter(seconds))
            population.connect(coordinator.state.round + 1)
            events.subscribe(population.follow)
            if fleet.crew is not None and fleet.crew.in_words:
                observers.console.print(fleet.crew.in_words, soft_wrap=True)
            progress = SimulationProgress(observers.console, job, fleet, clock)
            events.subscribe(progress)
            with _existing_objects_kept():
                final = await self._end_of(coordinator)
        progress.end()
        return final

    def _host(self, fleet: VirtualFleet, index: int) -> VirtualHost:
        """What runs the task of the device with a number."""
        return VirtualHost(fleet, fleet.participant(index))

    def _profile(self, index: int) -> DeviceProfile:
        """Speed and reliability of the device with a number."""
        return DeviceProfile.drawn(self.store.job.simulation, self.store.job.seed, index)

    def _watch(self, parts: RunParts, fleet: VirtualFleet) -> None:
        """Called before the run begins, for what watches it; here nothing does."""

    def _forks(self) -> ForkedCrew | None:
        """Processes on the GPUs of this machine, if the job names some."""
        processes = self.store.job.simulation.processes or len(self._gpus)
        return ForkedCrew(processes, self._gpus) if self._gpus else None

    async def _end_of(self, coordinator: Coordinator) -> FinalModel:
        """Run the coordinator; it is cancelled if a rank is lost."""
        running = asyncio.ensure_future(coordinator.run())
        if self._crew is not None:
            self._crew.on_failure = running.cancel
        try:
            return await running
        except BaseException:
            if self._crew is not None and self._crew.failure is not None:
                raise self._crew.failure from None
            raise

    @property
    def state(self) -> RunState:
        """What the run has reached, once `run` has ended."""
        assert self._coordinator is not None
        return self._coordinator.state

    def leave(self) -> None:
        """End `run` after the running round, or at once if there is none."""
        self._leaving = True
        if self._coordinator is not None:
            self._coordinator.drain.request()


@contextlib.contextmanager
def _existing_objects_kept() -> Iterator[None]:
    """Have garbage collections pass over what exists: most objects live as long as the run.

    Nothing is done where a caller has seen to that for what existed before: at the end it would be
    undone for all objects together, and each collection looks through a million of them again.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def gpus_of(job: Job) -> list[str]:
    """The GPUs of this machine that the processes of a simulation train on; none for its cores.

    Raises:
        UserError: there is no such GPU, or the job cannot be simulated on one.
    """
    choice = job.federated.device
    if choice == "cpu":
        return []
    present = Accelerators.present()  # does not begin to use them
    choice, is_asked = present.choose(choice), choice != "auto"
    if not is_asked and (choice != "cuda" or job.exchange.has_personal):
        return []
    if job.exchange.has_personal:
        raise JobError(
            "simulated devices with personal parameters (exchange.personal, "
            "exchange.buffers = 'local') train on the cores of this machine; set "
            "federated.device to 'cpu'"
        )
    if choice == "mps":
        raise JobError(
            "federated.device is 'mps', and simulated devices train on cores or on CUDA devices; "
            "choose 'auto' or 'cpu'"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # of PyTorch
        raise JobError(
            "this process has used CUDA, and processes that it forks cannot; begin the simulation "
            "in a new process, before anything uses a GPU"
        )
    return [choice] if ":" in choice else [f"cuda:{number}" for number in range(present.cuda)]


def fleet_of(
    job: Job, directory: Path, profile: Callable[[int], DeviceProfile], crew: Crew | None = None
) -> VirtualFleet:
    """The simulated devices of a job; `directory` is the run's."""
    section = job.simulation
    return VirtualFleet(
        section.population(job.federated),
        mode=section.training,
        profile=profile,
        folder=directory / "devices",
        processes=section.processes or len(os.sched_getaffinity(0)),
        crew=crew,
    )


def check(job: Job) -> None:
    """Refuse a job that cannot be simulated.

    Raises:
        JobError: it names no devices or too few, apps that are not a task, or a training that
            stacked models cannot have.
    """
    population = job.simulation.population(job.federated)
    job.simulation.connections(population, job.federated.invited)
    if job.simulation.training == "stacked":
        check_settings(job.federated)
    if job.federated.app is not None or job.federated.server_app is not None:
        raise JobError(
            "`isthmus simulate` trains a task, and federated.flower names an app; use "
            "`isthmus run`, or Flower's own simulation"
        )
    if job.federated.control_variates is not None:
        raise JobError(
            "simulated devices keep no control variates; remove federated.control_variates, or use "
            "`isthmus run`"
        )
    if job.statistics.collect:
        raise JobError("statistics.collect counts real data; use `isthmus statistics`")


class TimedDatacenter(VirtualDatacenter):
    """A simulated datacenter whose steps take simulated time."""

    def __init__(self, step_seconds: float) -> None:
        """`step_seconds` is the simulated duration of a step."""
        super().__init__(step_seconds=step_seconds)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        """See `VirtualDatacenter`."""
        reply, payload = await super().work(request, model, progress)
        if reply.HasField("trained") and reply.trained.seconds:
            await asyncio.sleep(reply.trained.seconds)
        return reply, payload
