"""Trains some devices of a batch in one process, which may get them from another one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from isthmus.errors import IsthmusError, TaskError
from isthmus.task import Participant
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.device.task_host import train_in
from isthmus_clients.training.local_run import DeviceRun
from isthmus_simulation.devices.messages import DeviceResult, Measured, PieceAnswer, PieceRequest
from isthmus_simulation.devices.stacks.randomness import Predictable
from isthmus_simulation.devices.stacks.training import (
    DeviceTraining,
    StackedTraining,
    TrainedOrFailed,
)

log = logging.getLogger(__name__)

_KEPT = 4096  # devices whose data a process keeps
_MOST_DIFFERENCE = 0.01
"""Largest relative difference between the updates of both ways of training; rounding alone is below
a thousandth of it."""


class PieceTrainer:
    """Trains the devices of a piece, in the process that it is called in."""

    def __init__(self, shared: DeviceRun, stacked: StackedTraining | None) -> None:
        """Use the task and the model of `shared`."""
        self._shared = shared
        self._stacked = stacked
        self._runs: dict[str, DeviceRun] = {shared.participant.name: shared}

    def train(
        self, work: link_pb2.TrainLocal, batch: Sequence[DeviceTraining], *, is_stacked: bool
    ) -> list[TrainedOrFailed]:
        """Train devices; their `result` is set.

        Raises:
            TaskError: the task's code raised, in stacked models.
        """
        if not is_stacked:
            return [_train_alone(work, training) for training in batch]
        assert self._stacked is not None
        return self._stacked.train(work, batch)

    def measure(self, work: link_pb2.TrainLocal, batch: Sequence[DeviceTraining]) -> Measured:
        """Time both ways of training, and compare their updates; nothing of it is kept."""
        assert self._stacked is not None

        def trained(*, is_stacked: bool) -> tuple[float, list[Buffer], list[TrainedOrFailed]]:
            copies = [training.copy() for training in batch]
            start = time.perf_counter()
            results = self.train(work, copies, is_stacked=is_stacked)
            return time.perf_counter() - start, [each.result for each in copies], results

        try:
            trained(is_stacked=True)  # loads the data and records the computation
            stacked, found, results = trained(is_stacked=True)
        except Exception as error:
            log.debug("stacked models cannot be trained", exc_info=True)
            return Measured(float("inf"), 0.0, reason_of(error))
        finally:
            self._stacked.forget_schedules()
        single, expected, _ = trained(is_stacked=False)
        steps = [0 if isinstance(each, TaskError) else each.steps for each in results]
        # Stacks of a whole batch have devices with about as many steps.
        stacked *= sum(steps) / max(1, len(steps) * max(steps))
        is_random = self._stacked.gradients.are_random
        if is_random:
            with Predictable():
                _, found, _ = trained(is_stacked=True)
                _, expected, _ = trained(is_stacked=False)
            self._stacked.forget_schedules()
        difference = max(map(self._difference, found, expected))
        if not difference <= _MOST_DIFFERENCE:  # nan, too
            return Measured(
                float("inf"),
                single,
                f"updates of stacked models differ by {difference:.1%} from those of single ones",
            )
        return Measured(stacked, single, is_random=is_random)

    def _difference(self, found: Buffer, expected: Buffer) -> float:
        """The length of the difference of two encoded updates, as a part of the second one's."""
        if not found or not expected:  # training has failed
            return float(bool(found) != bool(expected))
        layout = self._shared.layout
        if len(found) != layout.nbytes:
            layout = layout.gradient_and_update
        first = layout.decode(found)
        second = layout.decode(expected)
        return float((first - second).norm() / second.norm().clamp(min=1e-30))

    def answer(self, request: PieceRequest, memories: Sequence[Buffer]) -> PieceAnswer:
        """Do what another process asks.

        Args:
            request: `train`, `measure` or `forget`.
            memories: of each device, with what it has received, see `TaskHost.buffer`. Its first
                bytes become its encoded update, unless that has failed.
        """
        if request.kind == "forget":
            self.forget_schedules()
            return PieceAnswer()
        work = link_pb2.TrainLocal.FromString(request.work)
        batch = [
            DeviceTraining(self._run_of(participant), memory, request.room)
            for participant, memory in zip(request.participants, memories, strict=True)
        ]
        try:
            if request.kind == "measure":
                return PieceAnswer(measured=self.measure(work, batch))
            trained = self.train(work, batch, is_stacked=request.is_stacked)
        except Exception as error:
            log.debug("a piece failed", exc_info=True)
            return PieceAnswer(reason_of(error))
        return PieceAnswer(
            results=[
                DeviceResult(b"", 0, str(figures))
                if isinstance(figures, TaskError)
                else DeviceResult(figures.SerializeToString(), len(training.result))
                for figures, training in zip(trained, batch, strict=True)
            ]
        )

    def _run_of(self, participant: Participant) -> DeviceRun:
        """A device, with its data."""
        run = self._runs.get(participant.name)
        if run is None:
            run = self._runs[participant.name] = self._shared.for_device(participant)
            if len(self._runs) > _KEPT:
                del self._runs[next(iter(self._runs))]
        return run

    def forget_schedules(self) -> None:
        """Begin a new run: schedules of the learning rate start anew."""
        if self._stacked is not None:
            self._stacked.forget_schedules()
        self._runs = {self._shared.participant.name: self._shared}

    def close(self) -> None:
        """Do nothing: there is no other process."""


def reason_of(error: Exception) -> str:
    """Why a piece or a process failed."""
    return str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"


def _train_alone(work: link_pb2.TrainLocal, training: DeviceTraining) -> TrainedOrFailed:
    """Train one device as a real one; its result replaces the payload."""
    try:
        trained, training.result = train_in(
            training.run, work, training.memory, lambda progress: None, lambda: False
        )
        return trained
    except TaskError as error:
        return error
