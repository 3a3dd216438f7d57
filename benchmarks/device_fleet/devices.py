"""Simulate many devices in a few processes: real protocol clients that compute nothing.

Each device is an `Uplink` with its own membership, connection, mutual TLS, hello, heartbeats and
reconnection backoff. Its worker, `IdleDevice`, receives the model and sends an update of full size
whose elements all have the same value. The value differs between devices, so the mean shows which
updates it contains, and how often.

`DeviceProcesses` controls the processes and reads their status over pipes.
"""

from __future__ import annotations

import abc
import array
import asyncio
import dataclasses
import gc
import multiprocessing
import multiprocessing.connection
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.processes import ProcessTree

from isthmus.identity.membership import Membership
from isthmus.transport.blobs import Buffer, Piece, describe
from isthmus.transport.mirrors import MirrorSources
from isthmus.transport.requests import send_result
from isthmus.transport.stream import Stream
from isthmus.transport.uplink import Uplink
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2

MAX_CONNECTING = 50
"""Devices of one process that connect at the same time before their first welcome."""
VALUES = 4000
"""Different updates of all devices; float32 has the sums exactly."""


@dataclasses.dataclass
class RoundProgress:
    """Progress of the devices of one process, or of all, in one attempt at a round.

    Times are from the machine's monotonic clock, which all processes share.
    """

    started_at: float = float("inf")
    """The first request arrived."""
    received: int = 0
    """Models received completely."""
    replied: int = 0
    replied_at: float = 0.0
    """The last reply was passed to the transport."""
    accepted: int = 0
    """Updates whose acceptance the server acknowledged."""
    accepted_at: float = 0.0

    def merged(self, other: RoundProgress) -> RoundProgress:
        """The combined progress of two processes."""
        return RoundProgress(
            min(self.started_at, other.started_at),
            self.received + other.received,
            self.replied + other.replied,
            max(self.replied_at, other.replied_at),
            self.accepted + other.accepted,
            max(self.accepted_at, other.accepted_at),
        )


@dataclasses.dataclass
class Status:
    """Status of the devices of one process, or of all."""

    welcomed: dict[str, int]
    """Devices that each server process has welcomed."""
    welcomes: int
    """Total number; more than one per device and server process means lost connections."""
    welcomed_at: float
    """Time of the last welcome."""
    rounds: dict[tuple[int, int], RoundProgress]
    """By round and attempt."""
    opened: int
    closed: int
    failure: str
    """Why a device has given up; empty if none has."""


class DeviceGroup:
    """State that the devices of one process share: buffers, and their status."""

    def __init__(self) -> None:
        self.released_round = 0
        """Held updates may be sent up to this round."""
        self.release_changed = asyncio.Condition()
        self.welcomed: dict[str, set[str]] = {}
        self.status = Status({}, 0, 0.0, {}, 0, 0, "")
        self._header = b""
        self._model_buffer = bytearray()
        self._updates: dict[tuple[float, int], tuple[bytearray, link_pb2.Blob]] = {}

    def welcome(self, name: str, instance: str) -> None:
        """Record that a server process welcomed a device."""
        self.welcomed.setdefault(instance, set()).add(name)
        self.status.welcomes += 1
        self.status.welcomed_at = time.monotonic()

    def round(self, request: link_pb2.Request) -> RoundProgress:
        """The progress of a request's round."""
        train = request.train_local
        return self.status.rounds.setdefault((train.round, train.attempt), RoundProgress())

    def open(self, header: bytes) -> None:
        """Begin a run, whose updates have this layout header."""
        if header != self._header:
            self._header = header
            self._updates.clear()

    def buffer(self, size: int) -> Buffer:
        """A shared buffer for the model, of which all devices receive the same bytes."""
        if len(self._model_buffer) != size:
            self._model_buffer = bytearray(size)
        return self._model_buffer

    def update(self, value: float, size: int) -> tuple[bytearray, link_pb2.Blob]:
        """The encoded update of one value, shared by all devices with that value."""
        update = self._updates.get((value, size))
        if update is None:
            payload = bytearray(size)
            payload[: len(self._header)] = self._header
            count = (size - len(self._header)) // 4
            memoryview(payload)[len(self._header) :] = memoryview(
                array.array("f", [value]) * count
            ).cast("B")
            update = self._updates[value, size] = payload, describe(payload)
        return update

    def snapshot(self) -> Status:
        """The current status."""
        self.status.welcomed = {instance: len(names) for instance, names in self.welcomed.items()}
        return self.status


class IdleDevice:
    """A worker that computes nothing; implements `isthmus.transport.worker.Worker`."""

    def __init__(self, group: DeviceGroup, value: float) -> None:
        self.group = group
        self.value = value
        """Every element of its update."""
        self.round = 0
        """The round of the last training request."""

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer:
        progress = self.group.round(request)
        progress.started_at = min(progress.started_at, time.monotonic())
        self.round = request.train_local.round
        return self.group.buffer(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        group, kind = self.group, request.WhichOneof("work")
        if kind == "open":
            group.open(request.open.layout)
            group.status.opened += 1
            return link_pb2.Reply(opened=link_pb2.Opened(examples=1)), None
        if kind == "train_local":
            size = request.train_local.model.size
            group.round(request).received += model is not None
            payload, name = group.update(self.value, size)
            return link_pb2.Reply(trained=link_pb2.Trained(result=name, examples=1)), payload
        if kind == "close":
            group.status.closed += 1
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        return link_pb2.Reply(failure=link_pb2.Failure(reason=f"no {kind} here")), None

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        if accepted and request.WhichOneof("work") == "train_local":
            progress = self.group.round(request)
            progress.accepted += 1
            progress.accepted_at = time.monotonic()

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        pass


class UpdateSendingUplink(Uplink, abc.ABC):
    """An uplink whose subclasses say how an update is sent when the server asks for it."""

    async def _take(self, stream: Stream, message: link_pb2.Envelope | Piece) -> None:
        if isinstance(message, link_pb2.Envelope) and message.HasField("pull"):
            stream.spawn(self._send_update(stream, message.pull))
        else:
            await super()._take(stream, message)

    @abc.abstractmethod
    async def _send_update(self, stream: Stream, pull: link_pb2.Pull) -> None:
        """Send the update that the server asks for."""


class InstrumentedUplink(UpdateSendingUplink):
    """An uplink that records its replies and can hold back its updates."""

    worker: IdleDevice
    holds_updates = False

    async def _answer(self, job: Any, reply: link_pb2.Reply, payload: Buffer | None) -> None:
        await super()._answer(job, reply, payload)
        if job.request.WhichOneof("work") == "train_local":
            progress = self.worker.group.round(job.request)
            progress.replied += 1
            progress.replied_at = time.monotonic()

    async def _send_update(self, stream: Stream, pull: link_pb2.Pull) -> None:
        group, round_ = self.worker.group, self.worker.round
        if self.holds_updates:
            async with group.release_changed:
                await group.release_changed.wait_for(lambda: group.released_round >= round_)
        await send_result(stream, self._jobs, pull, self._machine, self.sent)


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
    """What all devices have in common."""

    held_back: int = 0
    """Number of devices, the first ones, whose updates wait for `DeviceProcesses.release`."""
    values: int = VALUES
    """Different updates; each takes memory once in each process."""
    mirror: str = ""
    """The addresses where the owners of all devices allow the server's mirror; empty for none."""
    authority: Path | None = None
    """Certificate of the authority that devices trust at a mirror; None for those of this
    machine."""


class DeviceProcesses:
    """Runs devices in separate processes and controls them over pipes."""

    def __init__(
        self,
        addresses: Sequence[str],
        members: Sequence[Path],
        count: int,
        options: DeviceOptions = DeviceOptions(),
    ) -> None:
        """Start `count` processes, whose devices connect at once.

        Args:
            addresses: of the server, or of aggregators, which the devices are divided among.
            members: a membership directory for each device; device i sends `value(i)`.
            count: number of processes.
            options: of all devices.
        """
        self.size = len(members)
        context = multiprocessing.get_context("forkserver")
        self._processes = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        for number in range(count):
            pipe, child_pipe = context.Pipe()
            # Each process has devices at all addresses.
            assigned = [
                _Assigned(i, member, addresses[i // count % len(addresses)])
                for i, member in enumerate(members)
                if i % count == number
            ]
            process = context.Process(target=_run_process, args=(assigned, options, child_pipe))
            process.start()
            child_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        pids = [process.pid for process in self._processes]
        self.tree = ProcessTree(*(pid for pid in pids if pid is not None))

    def status(self) -> Status:
        """The combined status of all processes.

        Raises:
            RuntimeError: a device has given up.
        """
        for pipe in self._pipes:
            pipe.send(None)
        parts: list[Status] = [pipe.recv() for pipe in self._pipes]
        for part in parts:
            if part.failure:
                raise RuntimeError(part.failure)
        instances = {instance for part in parts for instance in part.welcomed}
        rounds: dict[tuple[int, int], RoundProgress] = {}
        for part in parts:
            for key, progress in part.rounds.items():
                rounds[key] = progress.merged(rounds.get(key, RoundProgress()))
        return Status(
            {name: sum(part.welcomed.get(name, 0) for part in parts) for name in instances},
            sum(part.welcomes for part in parts),
            max(part.welcomed_at for part in parts),
            rounds,
            sum(part.opened for part in parts),
            sum(part.closed for part in parts),
            "",
        )

    def release(self, round_: int) -> None:
        """Send the held updates of all rounds up to this one."""
        for pipe in self._pipes:
            pipe.send(round_)

    def wait_until(
        self, what: str, done: Callable[[Status], bool], seconds: float, pause: float = 0.02
    ) -> Status:
        """Poll the status every `pause` seconds until `done` accepts it.

        Raises:
            RuntimeError: it does not within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not done(status := self.status()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not reached within {seconds:g} s: {what}; {status}")
            time.sleep(pause)  # polling costs the processes CPU time, so not more often
        return status

    def __enter__(self) -> DeviceProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # ends the process
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def value(index: int, values: int = VALUES) -> float:
    """The elements of the update of device `index`: one of so many different values."""
    return float(index % values + 1)


@dataclasses.dataclass(frozen=True)
class _Assigned:
    """A device of a process."""

    index: int
    member: Path
    address: str
    """Where it connects."""


def _run_process(
    assigned: Sequence[_Assigned],
    options: DeviceOptions,
    pipe: multiprocessing.connection.Connection,
) -> None:
    """Run the devices of one process."""
    if options.authority is not None:
        os.environ["SSL_CERT_FILE"] = str(options.authority)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # As in the server. A real device has no garbage of hundreds of others to collect.
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    asyncio.run(_devices(assigned, options, pipe))


async def _devices(
    assigned: Sequence[_Assigned],
    options: DeviceOptions,
    pipe: multiprocessing.connection.Connection,
) -> None:
    group, stopped = DeviceGroup(), asyncio.Event()
    loop = asyncio.get_running_loop()
    connecting = asyncio.Semaphore(MAX_CONNECTING)

    async def device(each: _Assigned) -> None:
        await connecting.acquire()
        first = True
        member = Membership(each.member)

        def welcomed(welcome: link_pb2.Welcome) -> None:
            nonlocal first
            group.welcome(member.name, welcome.instance)
            if first:
                connecting.release()
            first = False

        # Each has its own, with its own authorities, as devices on machines of their own have.
        mirrors = MirrorSources((options.mirror,), "server_sources") if options.mirror else None
        uplink = InstrumentedUplink(
            each.address,
            member.name,
            link_pb2.CLIENT,
            IdleDevice(group, value(each.index, options.values)),
            on_welcome=welcomed,
            membership=member,
            mirrors=mirrors,
        )
        uplink.holds_updates = each.index < options.held_back
        try:
            await uplink.run()
        except Exception as error:  # noqa: BLE001 - reported to the benchmark
            group.status.failure = f"{member.name} has given up: {error!r}"

    async def release(round_: int) -> None:
        group.released_round = round_
        async with group.release_changed:
            group.release_changed.notify_all()

    def read_command() -> None:
        try:
            round_ = pipe.recv()
        except EOFError:
            loop.remove_reader(pipe.fileno())
            stopped.set()
            return
        if round_ is None:
            pipe.send(group.snapshot())
        else:
            tasks.append(asyncio.create_task(release(round_)))

    tasks = [asyncio.create_task(device(each)) for each in assigned]
    loop.add_reader(pipe.fileno(), read_command)
    await stopped.wait()
    os._exit(0)  # like a power cut; closing thousands of connections takes long
