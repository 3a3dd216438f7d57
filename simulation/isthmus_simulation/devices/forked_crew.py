"""Processes of this machine that train simulated devices: forks, with the run's task and model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Sequence

import torch

from isthmus.errors import TaskError, UserError
from isthmus.system.process import die_with_parent, keep_freed_memory
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_simulation.devices.channel import Channel
from isthmus_simulation.devices.messages import PieceAnswer, PieceRequest
from isthmus_simulation.devices.piece_trainer import PieceTrainer, reason_of
from isthmus_simulation.devices.shared_blocks import SharedBlocks
from isthmus_simulation.devices.stacks.training import DeviceTraining, StackedTraining
from isthmus_simulation.devices.workers import PieceWorker

_STOP_SECONDS = 5.0


class ForkedCrew:
    """Forks processes for each run (an `isthmus_simulation.devices.workers.Crew`)."""

    def __init__(self, count: int, gpus: Sequence[str] = ()) -> None:
        """Set up; the processes end when they are told to, or with this process.

        Args:
            count: number of processes.
            gpus: what they train on, in turn; the CPU without any. This process uses none of them,
                as a fork of one that does could not.
        """
        self._count = count
        self._gpus = gpus
        self._forks: list[_Fork] = []
        self._blocks: SharedBlocks | None = None

    @property
    def device(self) -> str:
        """See `Crew.device`."""
        return "cuda" if self._gpus else "cpu"

    @property
    def in_words(self) -> str:
        """See `Crew.in_words`."""
        gpus = len({*self._gpus[: self._count]})
        return f"devices train on GPUs: {gpus}, processes: {self._count}" if gpus else ""

    def open(
        self, work: link_pb2.OpenRun, shared: DeviceRun, stacked: StackedTraining | None
    ) -> Sequence[PieceWorker]:
        """See `Crew.open`."""
        layout = shared.layout
        # Two vectors are received with some jobs, and the result may be two others.
        self._blocks = SharedBlocks(layout.gradient_room + 2 * layout.nbytes)

        def trainer_on(gpu: str) -> PieceTrainer:
            run = DeviceRun(work, shared.participant, None, device=gpu)
            return PieceTrainer(run, stacked and StackedTraining(run))

        makers: list[Callable[[], PieceTrainer]]
        makers = [functools.partial(trainer_on, gpu) for gpu in self._gpus]
        if not makers:
            here = PieceTrainer(shared, stacked)
            makers = [lambda: here]
        chosen = itertools.islice(itertools.cycle(makers), self._count)
        self._forks = [_Fork(maker, self._blocks, layout) for maker in chosen]
        try:
            for fork in self._forks:
                if error := fork.wait().error:
                    raise UserError(error)
        except UserError:
            self.leave()
            raise
        except (EOFError, OSError):
            self.leave()
            raise _ended() from None
        return self._forks

    def memory(self, size: int) -> Buffer:
        """See `Crew.memory`."""
        assert self._blocks is not None
        is_small = size <= self._blocks.block_bytes  # models to score may be many
        return self._blocks.new(size) if is_small else bytearray(size)

    def leave(self) -> None:
        """See `Crew.leave`."""
        for fork in self._forks:
            fork.channel.close()
        for fork in self._forks:
            fork.end()
        self._forks = []
        self._blocks = None


def _ended() -> TaskError:
    return TaskError("a process that trains simulated devices has ended; was there enough memory?")


class _Fork(PieceWorker):
    """One process; devices have their memory in blocks that it shares."""

    def __init__(
        self, make: Callable[[], PieceTrainer], blocks: SharedBlocks, layout: TensorLayout
    ) -> None:
        own, other = socket.socketpair()
        super().__init__(Channel(own), layout)
        context = multiprocessing.get_context("fork")
        arguments = make, blocks, Channel(other), self.channel, os.getpid()
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def blocks(self, batch: Sequence[DeviceTraining]) -> Sequence[int]:
        """See `PieceWorker`."""
        return [SharedBlocks.number(training.memory) for training in batch]

    def send_model(self, received: Buffer) -> None:
        """See `PieceWorker`."""

    def take_update(self, place: Buffer) -> None:
        """See `PieceWorker`."""

    def lost(self) -> TaskError:
        """See `PieceWorker`."""
        return _ended()

    def end(self) -> None:
        """Wait for its end, after the channels of all forks were closed."""
        self._process.join(_STOP_SECONDS)
        self._process.kill()
        self._process.join()


def _serve(
    make: Callable[[], PieceTrainer],
    blocks: SharedBlocks,
    channel: Channel,
    other: Channel,
    parent: int,
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
        try:
            trainer = make()
        except Exception as error:  # noqa: BLE001 - of the task, or of a GPU
            channel.send(PieceAnswer(reason_of(error)).encode())
            return
        channel.send(PieceAnswer().encode())
        while True:
            request = PieceRequest.decode(channel.receive())
            size = request.room + request.received
            memories = [blocks.find(number, size) for number in request.blocks]
            channel.send(trainer.answer(request, memories).encode())
