"""The ranks of a simulation as its coordinator sees them: a crew that trains devices."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.errors import CannotContinue, JobError, TaskError, UserError
from isthmus.job import Job
from isthmus.system.channel import Channel
from isthmus.system.forked_process import ForkedProcess
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_server.storage.run_description import RunDescription
from isthmus_simulation.devices.messages import PieceRequest
from isthmus_simulation.devices.stacks.training import DeviceTraining, StackedTraining
from isthmus_simulation.devices.workers import PieceWorker
from isthmus_simulation.rank_description import RankDescription
from isthmus_simulation.rank_greeting import greeted
from isthmus_simulation.rank_place import START_SECONDS, RankPlace, channel_of
from isthmus_simulation.rank_trainer import fork_trainer, train_for

_STOP_SECONDS = 5.0
_END_SECONDS = 60.0
"""For a rank to end that was told to."""


def crew_or_train(
    place: RankPlace, loaded: Job | None, file: Path | None, run_dir: Path | None
) -> RankCrew:
    """The crew of all ranks in rank 0; another rank trains, and its process ends with the crew.

    Args:
        place: of this rank.
        loaded: the job of a new run; None to resume one.
        file: its file.
        run_dir: the directory of the run to resume.

    Raises:
        UserError: the job cannot be simulated with ranks, the code of its task cannot be read, the
            ranks differ, or those of several machines have no key.
    """
    place.check_key()
    if loaded is None or file is None:
        assert run_dir is not None
        description = RunDescription.read(run_dir)
        job = description.job
        base = description.base
    else:
        job = loaded
        base = file.resolve().parent
    check_for_ranks(job)
    about = RankDescription.of(job, base)
    if place.rank:
        train_for(place, about, base)
    return RankCrew(place, fork_trainer(place, about, base))


def check_for_ranks(job: Job) -> None:
    """Refuse a job that ranks cannot simulate.

    Raises:
        JobError: it has personal parameters.
    """
    if job.exchange.has_personal:
        raise JobError(
            "the ranks of a simulation keep no personal parameters of devices "
            "(exchange.personal, exchange.buffers = 'local'); start it on one machine, without "
            "torchrun"
        )


class RankCrew:
    """The ranks that train (an `isthmus_simulation.devices.workers.Crew`).

    Guarantees:
      * all have loaded the same job and the same code of the task, in the same version;
      * each has one connection with this process, whose end tells either that the other has ended;
        nothing else does, and nobody waits for a rank that has ended.
    """

    def __init__(self, place: RankPlace, trainer: ForkedProcess) -> None:
        """Wait for all ranks; `trainer` is the process that trains for rank 0.

        Raises:
            UserError: a rank differs from rank 0, or did not start.
        """
        self._trainer = trainer
        self.failure: CannotContinue | None = None
        """Why the simulation ends, once a rank has ended."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called once a rank has ended."""
        self._channels: dict[int, Channel] = {}
        self._described: dict[int, RankDescription] = {}
        try:
            self._meet(place)
            for rank, described in sorted(self._described.items()):
                described.check(rank, self._described[0])
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> str:
        """What the ranks train on, `cpu` or `cuda`."""
        return self._described[0].device

    @property
    def in_words(self) -> str:
        """How many ranks there are, and what they train on."""
        ranks = len(self._described)
        machines = len({each.host for each in self._described.values()})
        on = "core" if self.device == "cpu" else "GPU"
        return f"devices train in ranks: {ranks}, each on a {on}; machines: {machines}"

    def open(
        self, work: link_pb2.OpenRun, shared: DeviceRun, stacked: StackedTraining | None
    ) -> Sequence[PieceWorker]:
        """See `Crew.open`."""
        workers = [
            _RankWorker(
                self, f"rank {rank} on {self._described[rank].host}", channel, shared.layout
            )
            for rank, channel in sorted(self._channels.items())
        ]
        request = PieceRequest(
            "open",
            work.SerializeToString(),
            (shared.participant,),
            is_stacked=stacked is not None,
        )
        worker = workers[0]
        try:
            for worker in workers:
                worker.send(request)
            for worker in workers:
                if error := worker.wait().error:
                    raise self.failed(f"{worker.name}: {error}")
        except (EOFError, OSError):
            raise worker.lost() from None
        return workers

    def memory(self, size: int) -> Buffer:
        """See `Crew.memory`."""
        return bytearray(size)

    def leave(self) -> None:
        """See `Crew.leave`: the ranks stay until `close`."""

    def failed(self, reason: str) -> TaskError:
        """Have the simulation end; returns the error for the devices of a rank."""
        if self.failure is None:
            self.failure = CannotContinue(reason)
            self.on_failure()
        return TaskError(reason)

    def end(self) -> None:
        """Tell all ranks that the simulation has reached its end, and wait until they have ended.

        Those that do not hear it end with `close`, as after a failure.
        """
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send(PieceRequest("end").encode())
        until = time.monotonic() + _END_SECONDS
        for channel in self._channels.values():
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLRDHUP)
            poll.poll(max(0.0, until - time.monotonic()) * 1000)

    def close(self) -> None:
        """End the processes of all ranks."""
        for channel in self._channels.values():
            channel.close()
        self._trainer.end(_STOP_SECONDS)

    def _meet(self, place: RankPlace) -> None:
        """Wait until each rank has connected and described itself."""
        listener, _store = place.listen()
        until = time.monotonic() + START_SECONDS
        with contextlib.ExitStack() as accepted, selectors.DefaultSelector() as selector:
            accepted.enter_context(listener)
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._trainer, selectors.EVENT_READ)
            while missing := set(range(place.ranks)) - set(self._described):
                ready = [key.fileobj for key, _ in selector.select(until - time.monotonic())]
                if not ready:
                    raise UserError(f"rank {min(missing)} did not start in {START_SECONDS:g} s")
                if self._trainer in ready:
                    raise UserError("the process that trains for rank 0 has ended")
                for found in ready:
                    if found is listener:
                        connected = accepted.enter_context(listener.accept()[0])
                        selector.register(connected, selectors.EVENT_READ)
                    elif isinstance(found, socket.socket):
                        selector.unregister(found)
                        hello = greeted(found, place.key)
                        if hello is not None and hello[0] in missing - set(self._described):
                            rank, about = hello
                            self._channels[rank] = channel_of(found.dup())
                            self._described[rank] = RankDescription.read(about)


class _RankWorker(PieceWorker):
    """One rank."""

    def __init__(self, crew: RankCrew, name: str, channel: Channel, layout: TensorLayout) -> None:
        super().__init__(channel, layout)
        self._crew = crew
        self.name = name

    def blocks(self, batch: Sequence[DeviceTraining]) -> Sequence[int]:
        """See `PieceWorker`."""
        return ()

    def send_model(self, received: Buffer) -> None:
        """See `PieceWorker`."""
        self.send(PieceRequest("model", received=len(received)))
        self.channel.send_vector(received)

    def take_update(self, place: Buffer) -> None:
        """See `PieceWorker`."""
        self.channel.receive_into(place)

    def lost(self) -> TaskError:
        """See `PieceWorker`."""
        return self._crew.failed(
            f"{self.name} of the simulation has ended (was there enough memory?)"
        )
