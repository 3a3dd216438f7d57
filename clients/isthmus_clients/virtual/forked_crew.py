"""Processes of this machine that train simulated devices: forks, with the run's task and model."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
from collections.abc import Sequence

import torch

from isthmus.errors import TaskError
from isthmus.system.process import die_with_parent, keep_freed_memory
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_clients.virtual.channel import Channel
from isthmus_clients.virtual.messages import PieceRequest
from isthmus_clients.virtual.piece_trainer import PieceTrainer
from isthmus_clients.virtual.stacks.training import StackedTraining
from isthmus_clients.virtual.workers import PieceWorker, most_devices

_STOP_SECONDS = 5.0


class ForkedCrew:
    """Forks processes for each run (an `isthmus_clients.virtual.workers.Crew`)."""

    device = "cpu"

    def __init__(self, count: int) -> None:
        """`count` processes; they end when they are told to, or with this process."""
        self._count = count
        self._forks: list[_Fork] = []

    def open(
        self, work: link_pb2.OpenRun, shared: DeviceRun, stacked: StackedTraining | None
    ) -> Sequence[PieceWorker]:
        """See `Crew.open`."""
        trainer = PieceTrainer(shared, stacked)
        self._forks = [_Fork(trainer, shared.layout) for _ in range(self._count)]
        return self._forks

    def leave(self) -> None:
        """See `Crew.leave`."""
        for fork in self._forks:
            fork.channel.close()
        for fork in self._forks:
            fork.end()
        self._forks = []


class _SharedMemory:
    """Memory of this process and of one fork: a slot for each update of a piece, and the model.

    Pages take memory when they are used for the first time.
    """

    def __init__(self, layout: TensorLayout) -> None:
        self._slot_bytes = layout.gradient_and_update.nbytes
        self._slots_bytes = most_devices(layout) * self._slot_bytes
        self._view = memoryview(mmap.mmap(-1, self._slots_bytes + 2 * layout.nbytes))

    def received(self, size: int) -> memoryview:
        """What devices have received: a model, and with some jobs a gradient."""
        return self._view[self._slots_bytes : self._slots_bytes + size]

    def slot(self, number: int, size: int) -> memoryview:
        """The update of a device of the piece."""
        start = number * self._slot_bytes
        return self._view[start : start + size]


class _Fork(PieceWorker):
    """One process."""

    def __init__(self, trainer: PieceTrainer, layout: TensorLayout) -> None:
        own, other = socket.socketpair()
        super().__init__(Channel(own), layout)
        self._memory = _SharedMemory(layout)
        context = multiprocessing.get_context("fork")
        arguments = trainer, self._memory, Channel(other), self.channel, os.getpid()
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def send_model(self, received: Buffer) -> None:
        """See `PieceWorker`."""
        self._memory.received(len(received))[:] = received

    def take_update(self, number: int, place: Buffer) -> None:
        """See `PieceWorker`."""
        memoryview(place)[:] = self._memory.slot(number, len(place))

    def lost(self) -> TaskError:
        """See `PieceWorker`."""
        return TaskError(
            "a process that trains simulated devices has ended; was there enough memory?"
        )

    def end(self) -> None:
        """Wait for its end, after the channels of all forks were closed."""
        self._process.join(_STOP_SECONDS)
        self._process.kill()
        self._process.join()


def _serve(
    trainer: PieceTrainer, memory: _SharedMemory, channel: Channel, other: Channel, parent: int
) -> None:
    """The loop of a process."""
    die_with_parent(parent)
    keep_freed_memory()
    other.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = PieceRequest.decode(channel.receive())
            answer, updates = trainer.answer(request, memory.received(request.received))
            for number, update in enumerate(updates):
                memory.slot(number, len(update))[:] = update
            channel.send(answer.encode())
