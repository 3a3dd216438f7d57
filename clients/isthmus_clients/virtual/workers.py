"""Processes that train simulated devices: forks, which have the task and the model of the run.

Each gets the devices of a batch in pieces, with the model, and returns their updates, which are the
same in whichever process a device was trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from isthmus.errors import TaskError
from isthmus.system.process import die_with_parent, keep_freed_memory
from isthmus.task import Participant
from isthmus.wire import link_pb2
from isthmus_clients.device.task_host import train_in
from isthmus_clients.training.local_run import DeviceRun
from isthmus_clients.virtual.stacked_training import (
    STACK,
    DeviceTraining,
    StackedTraining,
    TrainedOrFailed,
    stack_size,
)

Take = Callable[[int, TrainedOrFailed], None]
"""Gets the number of a device of a batch, and its result."""

_LOST = "a process that trains simulated devices has ended; was there enough memory?"
_STOP_SECONDS = 5.0
_SHARED_BYTES = 256 << 20  # for the updates of one process, unless a single one is larger
_KEPT = 4096  # devices whose data a process keeps


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Devices to train from one model, in one process."""

    work: bytes
    participants: Sequence[Participant]
    received: int
    """Bytes at the end of the shared memory that each of them has received, as `TaskHost.buffer`
    lays them out."""
    room: int
    is_stacked: bool


@dataclasses.dataclass(frozen=True)
class _DeviceResult:
    """Figures and update of one device, or its error."""

    trained: bytes
    size: int
    """Of the update, in the device's slot of the shared memory."""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds that a piece took in both ways of training."""

    stacked: float
    """Infinite if stacked models cannot train it, for `reason`."""
    single: float
    reason: str = ""


class PieceTrainer:
    """Trains the devices of a piece, in the process that it is called in."""

    def __init__(self, shared: DeviceRun, stacked: StackedTraining | None) -> None:
        """Use the task and the model of `shared`."""
        self._shared, self._stacked = shared, stacked
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
        """Time both ways of training; nothing of it is kept."""

        def seconds(*, is_stacked: bool) -> float:
            copies = [training.copy() for training in batch]
            start = time.perf_counter()
            self.train(work, copies, is_stacked=is_stacked)
            return time.perf_counter() - start

        single = min(seconds(is_stacked=False) for _ in range(2))
        assert self._stacked is not None
        try:
            seconds(is_stacked=True)  # records the computation
            return Measured(seconds(is_stacked=True), single)
        except TaskError as error:
            return Measured(float("inf"), single, str(error))
        finally:
            self._stacked.forget_schedules()

    def batch_of(self, piece: _Piece, received: memoryview) -> list[DeviceTraining]:
        """The devices of a piece, each with its data and with memory of its own."""
        batch = []
        for participant in piece.participants:
            run = self._runs.get(participant.name)
            if run is None:
                run = self._runs[participant.name] = self._shared.for_device(participant)
                if len(self._runs) > _KEPT:
                    del self._runs[next(iter(self._runs))]
            batch.append(DeviceTraining(run, bytearray(received), piece.room))
        return batch

    def forget_schedules(self) -> None:
        """Begin a new run: schedules of the learning rate start anew."""
        if self._stacked is not None:
            self._stacked.forget_schedules()
        self._runs = {self._shared.participant.name: self._shared}

    def close(self) -> None:
        """Do nothing: there is no other process."""


class _SharedMemory:
    """Memory of this process and of one worker: a slot for each update of a piece, and the model.

    Pages take memory when they are used for the first time.
    """

    def __init__(self, run: DeviceRun) -> None:
        layout = run.layout
        self.slots = max(1, min(STACK, _SHARED_BYTES // layout.nbytes))
        self._slot_bytes = layout.gradient_and_update.nbytes
        self._slots_bytes = self.slots * self._slot_bytes
        largest = layout.gradient_room + 2 * layout.nbytes
        self._view = memoryview(mmap.mmap(-1, self._slots_bytes + largest))

    def received(self, size: int) -> memoryview:
        """What devices have received."""
        return self._view[self._slots_bytes : self._slots_bytes + size]

    def slot(self, number: int, size: int) -> memoryview:
        """The update of a device of the piece."""
        start = number * self._slot_bytes
        return self._view[start : start + size]


class _Worker:
    """One process, as its parent sees it."""

    def __init__(self, trainer: PieceTrainer, memory: _SharedMemory) -> None:
        context = multiprocessing.get_context("fork")
        self.memory = memory
        self.connection, other = context.Pipe()
        arguments = trainer, memory, other, self.connection, os.getpid()
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        other.close()

    def ask(
        self,
        kind: str,
        work: link_pb2.TrainLocal,
        batch: Sequence[DeviceTraining],
        *,
        is_stacked: bool,
    ) -> None:
        """Have it train a piece, whose devices have all received the same."""
        first = batch[0]
        self.memory.received(len(first.memory))[:] = first.memory
        participants = [training.run.participant for training in batch]
        encoded = work.SerializeToString()
        piece = _Piece(encoded, participants, len(first.memory), first.room, is_stacked)
        self.connection.send((kind, piece))

    async def answer(self) -> Any:
        """What it returns for a piece.

        Raises:
            EOFError: it has ended.
        """
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.connection.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.connection.fileno())
        return self.connection.recv()

    def take(
        self, batch: Sequence[DeviceTraining], results: Sequence[_DeviceResult]
    ) -> list[TrainedOrFailed]:
        """Copy the updates of a piece to the memory of its devices."""
        taken: list[TrainedOrFailed] = []
        for number, (training, result) in enumerate(zip(batch, results, strict=True)):
            if result.error:
                taken.append(TaskError(result.error))
                continue
            own = training.vectors[0]
            training.result = own if len(own) == result.size else bytearray(result.size)
            memoryview(training.result)[:] = self.memory.slot(number, result.size)
            taken.append(link_pb2.Trained.FromString(result.trained))
        return taken


class TrainingWorkers:
    """Processes that train the devices of one run."""

    def __init__(self, shared: DeviceRun, stacked: StackedTraining | None, count: int) -> None:
        """Fork `count` processes; they end with `close`, or with this process."""
        trainer = PieceTrainer(shared, stacked)
        self._layout = shared.layout
        self._workers = [_Worker(trainer, _SharedMemory(shared)) for _ in range(count)]
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
        """Train all devices of a batch from the same model; simulated time stands still meanwhile.

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

        async def use(worker: _Worker) -> None:
            nonlocal taken
            for chosen in pieces:
                devices = [batch[k] for k in chosen]
                worker.ask("train", work, devices, is_stacked=is_stacked)
                answer = await worker.answer()
                if isinstance(answer, str):
                    raise TaskError(answer)
                for k, result in zip(chosen, worker.take(devices, answer), strict=True):
                    results[k] = result
                while taken < len(batch) and (first := results[taken]) is not None:
                    take(taken, first)
                    taken += 1

        held = getattr(asyncio.get_running_loop(), "held", contextlib.nullcontext)
        async with self._free:
            with held():
                ended = await asyncio.gather(*map(use, self._workers), return_exceptions=True)
        for error in ended:
            if isinstance(error, EOFError | OSError):
                raise TaskError(_LOST) from None
            if error is not None:
                raise error

    def measure(self, work: link_pb2.TrainLocal, batch: Sequence[DeviceTraining]) -> Measured:
        """Time both ways of training in one process.

        Raises:
            TaskError: the process has ended, or the task's code raised.
        """
        worker = self._workers[0]
        with _lost():
            worker.ask("measure", work, batch[: worker.memory.slots], is_stacked=False)
            measured = worker.connection.recv()
        if isinstance(measured, str):
            raise TaskError(measured)
        assert isinstance(measured, Measured)
        return measured

    def forget_schedules(self) -> None:
        """See `PieceTrainer.forget_schedules`."""
        with _lost():
            for worker in self._workers:
                worker.connection.send(("forget", None))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(_STOP_SECONDS)
            worker.process.kill()
            worker.process.join()

    def _pieces(self, batch: Sequence[DeviceTraining], *, is_stacked: bool) -> list[list[int]]:
        """Numbers of the devices that are trained by one process at a time.

        A process gets several: the updates of one are added up while the next one trains. Stacked
        devices have about as many steps, so that few steps are padding.
        """
        order = list(range(len(batch)))
        most = self._workers[0].memory.slots
        if is_stacked:
            order.sort(key=lambda k: batch[k].run.data.order.length)
            most = min(most, stack_size(self._layout))
        size = -(-len(order) // (len(self._workers) * (2 if is_stacked else 4)))
        size = -(-len(order) // -(-len(order) // min(size, most)))  # all about as long
        return [order[start : start + size] for start in range(0, len(order), size)]


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Turn the end of a process into an error."""
    try:
        yield
    except (EOFError, OSError):
        raise TaskError(_LOST) from None


def _train_alone(work: link_pb2.TrainLocal, training: DeviceTraining) -> TrainedOrFailed:
    """Train one device as a real one; its result replaces the payload."""
    try:
        trained, training.result = train_in(
            training.run, work, training.memory, lambda progress: None, lambda: False
        )
        return trained
    except TaskError as error:
        return error


def _serve(
    trainer: PieceTrainer,
    memory: _SharedMemory,
    connection: Connection,
    other: Connection,
    parent: int,
) -> None:
    """The loop of a worker process."""
    die_with_parent(parent)
    keep_freed_memory()
    other.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            kind, piece = connection.recv()
            if kind == "forget":
                trainer.forget_schedules()
                continue
            work = link_pb2.TrainLocal.FromString(piece.work)
            try:
                batch = trainer.batch_of(piece, memory.received(piece.received))
                answer: object
                if kind == "measure":
                    answer = trainer.measure(work, batch)
                else:
                    answer = _results(trainer, memory, work, batch, is_stacked=piece.is_stacked)
            except TaskError as error:
                answer = str(error)
            connection.send(answer)


def _results(
    trainer: PieceTrainer,
    memory: _SharedMemory,
    work: link_pb2.TrainLocal,
    batch: Sequence[DeviceTraining],
    *,
    is_stacked: bool,
) -> list[_DeviceResult]:
    """Train a piece, and write the updates to the slots of the shared memory."""
    results = []
    trained = trainer.train(work, batch, is_stacked=is_stacked)
    for number, (figures, training) in enumerate(zip(trained, batch, strict=True)):
        if isinstance(figures, TaskError):
            results.append(_DeviceResult(b"", 0, str(figures)))
            continue
        size = len(training.result)
        memory.slot(number, size)[:] = training.result
        results.append(_DeviceResult(figures.SerializeToString(), size))
    return results
