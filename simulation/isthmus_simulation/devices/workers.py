"""Divides the devices of a batch among processes, which are forks or ranks of other machines.

Each gets the devices of a batch in pieces, with the model, and returns their updates, which are the
same in whichever process a device was trained.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from isthmus.errors import TaskError
from isthmus.system.channel import Channel
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_simulation.devices.messages import Kind, Measured, PieceAnswer, PieceRequest
from isthmus_simulation.devices.stacks.sizes import FIRST_STACK
from isthmus_simulation.devices.stacks.training import (
    DeviceTraining,
    StackedTraining,
    TrainedOrFailed,
)

Take = Callable[[int, TrainedOrFailed], None]
"""Gets the number of a device of a batch, and its result."""

_DEVICES = 64  # of one piece
_PIECES = 4  # of each process, at least
_UPDATE_BYTES = 256 << 20  # of the updates of one piece, unless a single one is larger


def most_devices(layout: TensorLayout) -> int:
    """Most devices of a piece, for models of a layout."""
    return max(1, min(_DEVICES, _UPDATE_BYTES // layout.nbytes))


class PieceWorker(abc.ABC):
    """One process that answers with `PieceTrainer.answer`, as the simulation sees it.

    Methods raise `EOFError` or `OSError` if it has ended.
    """

    def __init__(self, channel: Channel, layout: TensorLayout) -> None:
        """`layout` is the model's."""
        self.channel = channel
        self.devices = most_devices(layout)
        self._update_bytes = layout.gradient_and_update.nbytes

    def ask(
        self,
        kind: Kind,
        work: link_pb2.TrainLocal,
        batch: Sequence[DeviceTraining],
        *,
        is_stacked: bool,
    ) -> None:
        """Have it train a piece, whose devices have all received the model that was sent last."""
        first = batch[0]
        participants = [training.run.participant for training in batch]
        received = len(first.memory) - first.room
        encoded = work.SerializeToString()
        blocks = self.blocks(batch)
        self.send(
            PieceRequest(kind, encoded, participants, received, first.room, is_stacked, blocks)
        )

    def send(self, request: PieceRequest) -> None:
        """Send a request."""
        self.channel.send(request.encode())

    async def answer(self) -> PieceAnswer:
        """What it answers; other work goes on meanwhile."""
        loop = asyncio.get_running_loop()
        number = self.channel.fileno()
        ready = asyncio.Event()
        loop.add_reader(number, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(number)
        return self.wait()

    def wait(self) -> PieceAnswer:
        """What it answers."""
        return PieceAnswer.decode(self.channel.receive())

    def take(self, batch: Sequence[DeviceTraining], answer: PieceAnswer) -> list[TrainedOrFailed]:
        """Take the updates of a piece, in the memory of its devices."""
        taken: list[TrainedOrFailed] = []
        for training, result in zip(batch, answer.results, strict=True):
            if result.error:
                taken.append(TaskError(result.error))
                continue
            if not 0 < result.size <= self._update_bytes:
                raise OSError(f"an update of {result.size} bytes")
            training.result = training.place(result.size)
            self.take_update(training.result)
            taken.append(link_pb2.Trained.FromString(result.trained))
        return taken

    @abc.abstractmethod
    def blocks(self, batch: Sequence[DeviceTraining]) -> Sequence[int]:
        """See `PieceRequest`."""

    @abc.abstractmethod
    def send_model(self, received: Buffer) -> None:
        """Send what all devices of the next pieces have received, if it has not their memory."""

    @abc.abstractmethod
    def take_update(self, place: Buffer) -> None:
        """Receive the next update of a piece, if it is not written there."""

    @abc.abstractmethod
    def lost(self) -> TaskError:
        """Take note that the process has ended; returns the error for its devices."""


class Crew(Protocol):
    """Where the processes of a simulation come from."""

    @property
    def device(self) -> str:
        """What they train on, `cpu` or `cuda`."""
        ...

    @property
    def in_words(self) -> str:
        """What they are, for the console; empty if they are usual."""
        ...

    def open(
        self, work: link_pb2.OpenRun, shared: DeviceRun, stacked: StackedTraining | None
    ) -> Sequence[PieceWorker]:
        """Processes that have opened a run, each with a model of its own.

        Raises:
            UserError: some process cannot open it.
        """
        ...

    def memory(self, size: int) -> Buffer:
        """Memory for what a device receives in the run that was opened last."""
        ...

    def leave(self) -> None:
        """End the processes that `open` has started."""
        ...


class TrainingWorkers:
    """The processes that train the devices of one run."""

    def __init__(
        self,
        crew: Crew,
        work: link_pb2.OpenRun,
        shared: DeviceRun,
        stacked: StackedTraining | None,
    ) -> None:
        """Open a run; see `Crew.open`."""
        self._crew = crew
        self._layout = shared.layout
        compression = shared.job.federated.compression
        self._own_models = compression is not None and compression.step_ahead > 0
        """Whether each device of a batch begins at a model of its own, see `Residual`."""
        self._workers = crew.open(work, shared, stacked)
        self._free = asyncio.Lock()
        """Locked while a batch is trained."""

    async def train(
        self,
        work: link_pb2.TrainLocal,
        batch: Sequence[DeviceTraining],
        take: Take,
        *,
        is_stacked: bool,
    ) -> None:
        """Train all devices of a batch; simulated time stands still meanwhile.

        Args:
            work: the request.
            batch: the devices.
            take: gets the number of each device and its result, in the order of the batch.
            is_stacked: whether to train in stacked models.

        Raises:
            TaskError: the task's code raised in stacked models, or a process has ended.
        """
        pieces = iter(self._pieces(batch, is_stacked=is_stacked))
        results: list[TrainedOrFailed | None] = [None] * len(batch)
        taken = 0

        async def use(worker: PieceWorker) -> None:
            nonlocal taken
            has_model = False
            for chosen in pieces:
                devices = [batch[k] for k in chosen]
                with _noticing(worker):
                    if not has_model or self._own_models:
                        worker.send_model(_received(devices[0]))
                        has_model = True
                    worker.ask("train", work, devices, is_stacked=is_stacked)
                    answer = await worker.answer()
                    if answer.error:
                        raise TaskError(answer.error)
                    trained = worker.take(devices, answer)
                for k, result in zip(chosen, trained, strict=True):
                    results[k] = result
                while taken < len(batch) and (first := results[taken]) is not None:
                    take(taken, first)
                    taken += 1

        held = getattr(asyncio.get_running_loop(), "held", contextlib.nullcontext)
        async with self._free:
            with held():
                ended = await asyncio.gather(*map(use, self._workers), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    def measure(self, work: link_pb2.TrainLocal, batch: Sequence[DeviceTraining]) -> Measured:
        """Time both ways of training in all processes at once; the means of their times.

        Raises:
            TaskError: the process has ended, or the task's code raised.
        """
        for worker in self._workers:
            with _noticing(worker):
                worker.send_model(_received(batch[0]))
                worker.ask("measure", work, batch[: worker.devices], is_stacked=False)
        answers = []
        for worker in self._workers:
            with _noticing(worker):
                answers.append(worker.wait())
        measured = [answer.measured for answer in answers if answer.measured is not None]
        if len(measured) < len(answers):
            raise TaskError(next(answer.error for answer in answers if answer.measured is None))
        return Measured(
            sum(each.stacked for each in measured) / len(measured),
            sum(each.single for each in measured) / len(measured),
            next((each.reason for each in measured if each.reason), ""),
            any(each.is_random for each in measured),
        )

    def forget_schedules(self) -> None:
        """See `PieceTrainer.forget_schedules`."""
        for worker in self._workers:
            with _noticing(worker):
                worker.send(PieceRequest("forget"))
                worker.wait()

    def memory(self, size: int) -> Buffer:
        """See `Crew.memory`."""
        return self._crew.memory(size)

    def close(self) -> None:
        """See `Crew.leave`."""
        self._crew.leave()

    def _pieces(self, batch: Sequence[DeviceTraining], *, is_stacked: bool) -> list[list[int]]:
        """Numbers of the devices that are trained by one process at a time.

        A process gets several: the updates of one are added up while the next one trains. Stacked
        devices have about as many steps, so that few steps are padding.
        """
        order = list(range(len(batch)))
        if self._own_models:
            return [[k] for k in order]
        unit = 1
        if is_stacked:
            order.sort(key=lambda k: batch[k].run.data.order.length)
            unit = FIRST_STACK
        units = -(-len(order) // unit)
        most = max(1, self._workers[0].devices // unit)  # of one piece
        count = -(-units // min(most, -(-units // (len(self._workers) * _PIECES))))
        ends = [unit * (units * (k + 1) // count) for k in range(count)]  # all about as long
        return [order[start:end] for start, end in itertools.pairwise([0, *ends])]


def _received(training: DeviceTraining) -> memoryview:
    """What a device has received."""
    return memoryview(training.memory)[training.room :]


@contextlib.contextmanager
def _noticing(worker: PieceWorker) -> Iterator[None]:
    """Turn the end of a process into an error."""
    try:
        yield
    except (EOFError, OSError):
        raise worker.lost() from None
