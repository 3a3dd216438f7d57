"""Simulated devices of one process, which share one task and one model."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from isthmus.errors import IsthmusError, TaskError
from isthmus.job import Job
from isthmus.task import Participant
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.residuals import Residuals
from isthmus_clients.training.examples_account import ExamplesAccount
from isthmus_clients.training.local_run import DeviceRun
from isthmus_simulation.devices.forked_crew import ForkedCrew
from isthmus_simulation.devices.piece_trainer import PieceTrainer
from isthmus_simulation.devices.profiles import DeviceProfile
from isthmus_simulation.devices.stacks.training import (
    DeviceTraining,
    StackedTraining,
    TrainedOrFailed,
)
from isthmus_simulation.devices.workers import Crew, Take, TrainingWorkers

log = logging.getLogger(__name__)

TrainingMode = Literal["auto", "stacked", "one-by-one"]
"""How the devices of a round train; see `isthmus.job.simulation.SimulationSection.training`."""

_SAMPLE = 4
"""Devices whose training is timed to choose a mode."""

Waiting = tuple[DeviceTraining, "asyncio.Future[TrainedOrFailed]"]
"""A device that waits for its batch, and its result."""


def _sample(batch: Sequence[DeviceTraining]) -> list[DeviceTraining]:
    """Some devices of a batch, from the one with the fewest examples to the one with the most."""
    ordered = sorted(batch, key=lambda training: training.run.data.order.length)
    count = min(_SAMPLE, len(ordered))
    return [ordered[k * (len(ordered) - 1) // max(1, count - 1)] for k in range(count)]


class FleetRun:
    """One run on all devices of a fleet."""

    def __init__(
        self,
        work: link_pb2.OpenRun,
        participant: Participant,
        data: Path | None,
        mode: TrainingMode,
        crew: Crew | None,
        previous: FleetRun | None,
    ) -> None:
        """Load the task with a device's data, or reuse that of `previous` for the same job.

        Raises:
            UserError: the task cannot be used here, or stacked models are required and impossible.
        """
        self.run_id = work.run_id
        self.active = ActiveRun.of(work)
        self.mode = mode
        self._suffix = "" if crew is None or crew.device == "cpu" else " with the same GPU"
        self.reason = "as the job says"
        """Why the mode is what it is."""
        self._is_checked = False
        """Whether stacked models are known to be trained like single ones."""
        self._is_random = self._has_chosen = False
        self._source = _source(self.active.job, work)
        self.shared: DeviceRun
        """The first device's run, whose task and model all share."""
        self.trainer: PieceTrainer | TrainingWorkers
        if previous is not None and previous._source == self._source:
            self.shared = previous.shared
            self.trainer = previous.trainer
            self.mode = previous.mode
            self.reason = previous.reason
            self._is_checked = previous._is_checked
            self._is_random = previous._is_random
            self._has_chosen = previous._has_chosen
            self.trainer.forget_schedules()
            return
        if previous is not None:
            previous.trainer.close()
        self.shared = DeviceRun(work, participant, data)
        stacked = self._stacked()
        if crew is not None and not self.shared.personal.size:
            self.trainer = TrainingWorkers(crew, work, self.shared, stacked)
        else:
            self.trainer = PieceTrainer(self.shared, stacked)

    def _stacked(self) -> StackedTraining | None:
        if self.mode == "one-by-one":
            return None
        try:
            return StackedTraining(self.shared)
        except IsthmusError as error:
            if self.mode == "stacked":
                raise
            self._one_by_one(str(error))
            return None

    @property
    def in_batches(self) -> bool:
        """Whether the devices of a round train together, in one model or in several processes."""
        return self.mode != "one-by-one" or isinstance(self.trainer, TrainingWorkers)

    @property
    def decided(self) -> bool:
        """Whether it is known how devices train."""
        return self.mode != "auto"

    @property
    def in_words(self) -> str:
        """How devices train, and what that means for the result."""
        if self.mode == "one-by-one":
            return f"one by one ({self.reason}): the same bits as on real devices{self._suffix}"
        random = " and random numbers" if self._is_random else ""
        return f"in stacked models ({self.reason}): as on real devices up to rounding{random}"

    async def train(
        self, work: link_pb2.TrainLocal, batch: Sequence[DeviceTraining], take: Take
    ) -> None:
        """Train a batch; the first one decides how, if the job does not.

        Args:
            work: the request.
            batch: the devices.
            take: gets the number of each device and its result, in the order of the batch.

        Raises:
            TaskError: the task's code raised in stacked models that the job requires, or a process
                has ended.
        """
        if self.mode != "one-by-one" and not self._is_checked:
            self._choose(work, _sample(batch))
        if self.mode != "stacked" or not self._has_chosen:
            await self._train(work, batch, take)
            return
        received = bytes(memoryview(batch[0].memory)[batch[0].room :])
        taken = 0

        def count(number: int, result: TrainedOrFailed) -> None:
            nonlocal taken
            take(number, result)
            taken = number + 1

        try:
            await self._train(work, batch, count)
        except TaskError as error:  # something that the sample did not have
            self._one_by_one(str(error))
            # The server may be reading the updates of those that were taken.
            first = taken
            rest = batch[taken:]
            for training in rest:
                training.memory[training.room :] = received
            await self._train(work, rest, lambda number, result: take(first + number, result))

    async def _train(
        self, work: link_pb2.TrainLocal, batch: Sequence[DeviceTraining], take: Take
    ) -> None:
        is_stacked = self.mode == "stacked"
        if isinstance(self.trainer, TrainingWorkers):
            await self.trainer.train(work, batch, take, is_stacked=is_stacked)
            return
        for number, result in enumerate(self.trainer.train(work, batch, is_stacked=is_stacked)):
            take(number, result)

    def _choose(self, work: link_pb2.TrainLocal, sample: Sequence[DeviceTraining]) -> None:
        """Check that stacked models are trained like single ones, and choose if the job does not.

        Raises:
            TaskError: the job requires stacked models, and they are not.
        """
        measured = self.trainer.measure(work, sample)
        times = f"{len(sample)} devices took {{:.3g}} s, and {{:.3g}} s {{}}"
        if measured.reason and self.mode == "stacked":
            raise TaskError(f"{measured.reason}; set simulation.training to 'auto'")
        self._is_checked = True
        self._is_random = measured.is_random
        if measured.reason:
            self._one_by_one(measured.reason)
        elif self.mode == "auto" and measured.stacked < measured.single:
            self.mode = "stacked"
            self._has_chosen = True
            self.reason = times.format(measured.stacked, measured.single, "one by one")
        elif self.mode == "auto":
            self._one_by_one(times.format(measured.single, measured.stacked, "stacked"))

    def _one_by_one(self, reason: str) -> None:
        self.mode = "one-by-one"
        self.reason = reason


class VirtualFleet:
    """Simulated devices, numbered from 0; device `i` is named `client-<i>` and has shard `i`.

    Guarantees:
      * an update depends only on the job, the round, the device's name and its data, not on the
        devices that train at the same time (up to rounding in stacked models);
      * memory is O(K x N) for the K devices of one round, for any size of the fleet; with
        `federated.compression`, N more for each device that has taken part.
    """

    def __init__(
        self,
        count: int,
        data: Path | None = None,
        *,
        mode: TrainingMode = "stacked",
        profile: Callable[[int], DeviceProfile] = lambda index: DeviceProfile(),
        folder: Path | None = None,
        processes: int = 1,
        crew: Crew | None = None,
    ) -> None:
        """Set up; devices are made by `VirtualDevice`.

        Args:
            count: devices of the population.
            data: location of the data; overrides the one of a job.
            mode: how the devices of a round train.
            profile: speed and reliability of each device.
            folder: for what devices keep between rounds; None for a temporary one.
            processes: that train devices; 1 for this one.
            crew: other processes that train devices; None for `processes` forks.
        """
        self.count = count
        self.data = data
        self.mode = mode
        self.profile = profile
        self.folder = folder
        self.shard_of: Callable[[int], tuple[int, int]] = lambda index: (index, count)
        """The part of the data that the device with a number has, and how many parts there are."""
        self.residuals = Residuals(None if folder is None else folder / "residuals")
        self.accounts: dict[str, ExamplesAccount] = {}
        """What training has cost the examples of devices, by name, in jobs that protect them."""
        self._asked: dict[str, tuple[str, int]] = {}
        """The last request of each device: its purpose, and how often it came in a row."""
        self.crew = crew if crew is not None or processes == 1 else ForkedCrew(processes)
        self.lock = threading.RLock()
        """Held while the model that all devices share is used."""
        self.run: FleetRun | None = None
        """The run that was opened last."""
        self._waiting: dict[tuple[object, ...], list[Waiting]] = {}
        self._flushes: set[asyncio.Task[None]] = set()

    def participant(self, index: int) -> Participant:
        """The device with a number, as its task sees it."""
        shard = self.shard_of(index)
        return Participant(name=f"client-{index}", regime="federated", shard=shard)

    def open(self, work: link_pb2.OpenRun, participant: Participant) -> FleetRun:
        """Open a run for all devices; the first request of a device opens it.

        Raises:
            UserError: see `FleetRun`.
        """
        with self.lock:
            if self.run is None or self.run.run_id != work.run_id:
                self.run = FleetRun(work, participant, self.data, self.mode, self.crew, self.run)
            return self.run

    def memory(self, size: int) -> Buffer:
        """Memory for what a device receives, in which it may train; see `TaskHost.buffer`."""
        trainer = None if self.run is None else self.run.trainer
        return trainer.memory(size) if isinstance(trainer, TrainingWorkers) else bytearray(size)

    def nth_request(self, name: str, purpose: str) -> str:
        """A name of a device's request; a device that comes back may get one for the same purpose.

        A buffer's rounds ask it again at once, and the same name would be the same loss for ever.
        """
        before, times = self._asked.get(name, ("", 0))
        times = times + 1 if before == purpose else 1
        self._asked[name] = purpose, times
        return f"{purpose}/{times}"

    async def train(self, training: DeviceTraining, work: link_pb2.TrainLocal) -> TrainedOrFailed:
        """Train a device in the batch of its round; the update replaces the model."""
        key = (work.run_id, work.round, work.attempt, work.model.sha256)
        done: asyncio.Future[TrainedOrFailed] = asyncio.get_running_loop().create_future()
        batch = self._waiting.setdefault(key, [])
        batch.append((training, done))
        if len(batch) == 1:
            flush = asyncio.create_task(self._flush(key, work))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        return await done

    async def _flush(self, key: tuple[object, ...], work: link_pb2.TrainLocal) -> None:
        """Wait until no further device joins the batch, then train all of its devices."""
        batch = self._waiting[key]
        count = 0
        while count < len(batch):
            count = len(batch)
            await asyncio.sleep(0)
        del self._waiting[key]
        waiting = [(training, done) for training, done in batch if not done.done()]
        run = self.run
        if run is None or not waiting:
            return

        def take(number: int, result: TrainedOrFailed) -> None:
            done = waiting[number][1]
            if not done.done():
                done.set_result(result)

        try:
            with self.lock:
                await run.train(work, [training for training, _ in waiting], take)
        except TaskError as error:
            for number in range(len(waiting)):
                take(number, error)  # unless it has its result
        except Exception as error:  # noqa: BLE001 - reported for each device
            for _, done in waiting:
                if not done.done():
                    done.set_exception(error)

    def close(self) -> None:
        """End the processes that train devices."""
        if self.run is not None:
            self.run.trainer.close()


def _source(job: Job, work: link_pb2.OpenRun) -> tuple[object, ...]:
    """What runs must have in common to share a task and a model."""
    comparable = job.model_dump(exclude={"name", "strategy", "budget", "prices", "rounds"})
    return repr(comparable), job.schedule_steps, work.base, work.layout
