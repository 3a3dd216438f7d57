"""Processes of this machine that train simulated devices: forks, with the run's task and model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import socket
from collections.abc import Callable, Sequence

import torch

from isthmus.errors import TaskError, UserError
from isthmus.system.channel import Channel
from isthmus.system.forked_process import fork
from isthmus.system.process import keep_freed_memory
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
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
            for worker in self._forks:
                if error := worker.wait().error:
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
        for worker in self._forks:
            worker.channel.close()
        for worker in self._forks:
            worker.end()
        self._forks = []
        self._blocks = None


def _ended() -> TaskError:
    return TaskError("a process that trains simulated devices has ended; was there enough memory?")


class _Fork(PieceWorker):
    """One process; devices have their memory in blocks that it shares."""

    def __init__(
        self, make: Callable[[], PieceTrainer], blocks: SharedBlocks, layout: TensorLayout
    ) -> None:
        channel, other = Channel.pair()
        super().__init__(channel, layout)
        self._blocks = blocks
        self._passed = 0
        """Mappings of the blocks that the process has."""

        def serve() -> None:
            channel.close()
            _serve(make, SharedBlocks(blocks.block_bytes), other)

        self._process = fork(serve)
        other.close()

    def blocks(self, batch: Sequence[DeviceTraining]) -> Sequence[int]:
        """See `PieceWorker`."""
        return [SharedBlocks.number(training.memory) for training in batch]

    def send(self, request: PieceRequest) -> None:
        """See `PieceWorker`; the memory of blocks that are new is passed with it."""
        handles = self._blocks.handles(self._passed)
        self.channel.send(request.encode(), handles)
        self._passed += len(handles)

    def send_model(self, received: Buffer) -> None:
        """See `PieceWorker`."""

    def take_update(self, place: Buffer) -> None:
        """See `PieceWorker`."""

    def lost(self) -> TaskError:
        """See `PieceWorker`."""
        return _ended()

    def end(self) -> None:
        """Wait for its end, after the channels of all forks were closed."""
        self._process.end(_STOP_SECONDS)


def _serve(
    make: Callable[[], PieceTrainer], blocks: SharedBlocks, connected: socket.socket
) -> None:
    """The loop of a process; `blocks` are those of the parent, of which it gets the memory."""
    keep_freed_memory()
    channel = Channel(connected)
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
            message, handles = channel.receive_with_handles()
            blocks.add(handles)
            request = PieceRequest.decode(message)
            size = request.room + request.received
            memories = [blocks.find(number, size) for number in request.blocks]
            channel.send(trainer.answer(request, memories).encode())
