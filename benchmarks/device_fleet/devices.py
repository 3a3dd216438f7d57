"""Many devices in a few processes: real ends of the link that compute nothing.

Each device is an `Uplink` with a membership of its own: its own connection, mutual TLS, hello,
heartbeats, and the pauses between its tries that every device makes. What it works on is
`Device`: it receives the model and sends back an update of full size, all of one value, which is
the device's own, so that a mean says whose updates are in it, and how often.

The processes are told what to do, and asked how far they are, over pipes: `Drivers`.
"""

from __future__ import annotations

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

from harness.processes import Tree

from isthmus.identity.membership import Membership
from isthmus.transport.blobs import Buffer, describe
from isthmus.transport.stream import Stream
from isthmus.transport.uplink import Uplink
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2

DIALLING = 50
"""Devices of one process that dial at the same time, until all have been welcomed once."""


@dataclasses.dataclass
class Round:
    """How far the devices of one process, or of all, are in one attempt at a round.

    Times are of the machine's monotonic clock, which is the same in all processes.
    """

    begun: float = float("inf")
    """The first was asked."""
    received: int = 0
    """Models that are here whole."""
    replied: int = 0
    replied_at: float = 0.0
    """The last reply was handed to the transport."""
    settled: int = 0
    """Updates that the server has taken, and said so."""
    settled_at: float = 0.0

    def with_(self, other: Round) -> Round:
        """The two together."""
        return Round(
            min(self.begun, other.begun),
            self.received + other.received,
            self.replied + other.replied,
            max(self.replied_at, other.replied_at),
            self.settled + other.settled,
            max(self.settled_at, other.settled_at),
        )


@dataclasses.dataclass
class News:
    """What a process says of its devices."""

    welcomed: dict[str, int]
    """Devices that are, or were, welcome at each server process."""
    welcomes: int
    """All together: more than devices and server processes say that somebody was cut off."""
    welcomed_at: float
    """The last one."""
    rounds: dict[tuple[int, int], Round]
    """By round and attempt."""
    opened: int
    closed: int
    broken: str
    """Why a device has given up, if one has."""


class Crowd:
    """What the devices of one process share: one buffer, and what is noted of them."""

    def __init__(self) -> None:
        self.released = 0
        """Up to this round, updates that are held may go."""
        self.news_of_release = asyncio.Condition()
        self.welcomed: dict[str, set[str]] = {}
        self.news = News({}, 0, 0.0, {}, 0, 0, "")
        self._header = b""
        self._received_into = bytearray()
        self._updates: dict[tuple[float, int], tuple[bytearray, link_pb2.Blob]] = {}

    def welcome(self, name: str, instance: str) -> None:
        """A device was welcomed."""
        self.welcomed.setdefault(instance, set()).add(name)
        self.news.welcomes += 1
        self.news.welcomed_at = time.monotonic()

    def round(self, request: link_pb2.Request) -> Round:
        """The notes on a request's round."""
        train = request.train_local
        return self.news.rounds.setdefault((train.round, train.attempt), Round())

    def open(self, header: bytes) -> None:
        """A run begins: updates are of its layout."""
        if header != self._header:
            self._header = header
            self._updates.clear()

    def buffer(self, size: int) -> Buffer:
        """Memory for the model: they all receive the same bytes."""
        if len(self._received_into) != size:
            self._received_into = bytearray(size)
        return self._received_into

    def update(self, value: float, size: int) -> tuple[bytearray, link_pb2.Blob]:
        """The update of one value, encoded: one memory for all who have that value."""
        found = self._updates.get((value, size))
        if found is None:
            payload = bytearray(size)
            payload[: len(self._header)] = self._header
            count = (size - len(self._header)) // 4
            memoryview(payload)[len(self._header) :] = memoryview(
                array.array("f", [value]) * count
            ).cast("B")
            found = self._updates[value, size] = payload, describe(payload)
        return found

    def tell(self) -> News:
        """What there is to say."""
        self.news.welcomed = {instance: len(names) for instance, names in self.welcomed.items()}
        return self.news


class Device:
    """A client that computes nothing: `isthmus.transport.worker.Worker`."""

    def __init__(self, crowd: Crowd, value: float) -> None:
        self.crowd = crowd
        self.value = value
        """Every element of its update."""
        self.round = 0
        """It was asked to train in last."""

    def buffer(self, request: link_pb2.Request, size: int) -> Buffer:
        notes = self.crowd.round(request)
        notes.begun = min(notes.begun, time.monotonic())
        self.round = request.train_local.round
        return self.crowd.buffer(size)

    async def work(
        self, request: link_pb2.Request, model: Buffer | None, progress: ReportProgress
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        crowd, kind = self.crowd, request.WhichOneof("work")
        if kind == "open":
            crowd.open(request.open.layout)
            crowd.news.opened += 1
            return link_pb2.Reply(opened=link_pb2.Opened(examples=1)), None
        if kind == "train_local":
            size = request.train_local.model.size
            crowd.round(request).received += model is not None
            payload, name = crowd.update(self.value, size)
            return link_pb2.Reply(trained=link_pb2.Trained(result=name, examples=1)), payload
        if kind == "close":
            crowd.news.closed += 1
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        return link_pb2.Reply(failure=link_pb2.Failure(reason=f"no {kind} here")), None

    def acknowledged(self, request: link_pb2.Request, accepted: bool, reason: str) -> None:
        if accepted and request.WhichOneof("work") == "train_local":
            notes = self.crowd.round(request)
            notes.settled += 1
            notes.settled_at = time.monotonic()

    def cancel(self, request: link_pb2.Request, reason: str) -> None:
        pass


class Watched(Uplink):
    """An uplink whose replies are noted, and whose updates may have to wait."""

    worker: Device
    held = False

    async def _answer(self, job: Any, reply: link_pb2.Reply, payload: Buffer | None) -> None:
        await super()._answer(job, reply, payload)
        if job.request.WhichOneof("work") == "train_local":
            notes = self.worker.crowd.round(job.request)
            notes.replied += 1
            notes.replied_at = time.monotonic()

    async def _pump(self, stream: Stream, pull: link_pb2.Pull) -> None:
        crowd, round_ = self.worker.crowd, self.worker.round
        if self.held:
            async with crowd.news_of_release:
                await crowd.news_of_release.wait_for(lambda: crowd.released >= round_)
        await super()._pump(stream, pull)


class Drivers:
    """Devices in processes of their own, and the pipes to them."""

    def __init__(self, address: str, members: Sequence[Path], count: int, held: int = 0) -> None:
        """Start `count` processes and let their devices dial.

        Args:
            address: of the server.
            members: a membership directory for each device; device i sends `value(i)`.
            count: processes.
            held: of the first so many devices, updates wait until their round's `release`.
        """
        self.size = len(members)
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        for number in range(count):
            ours, theirs = context.Pipe()
            mine = [(i, member) for i, member in enumerate(members) if i % count == number]
            process = context.Process(target=_drive, args=(address, mine, held, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        pids = [process.pid for process in self._processes]
        self.tree = Tree(*(pid for pid in pids if pid is not None))

    def news(self) -> News:
        """How far all of them are.

        Raises:
            RuntimeError: a device has given up.
        """
        for pipe in self._pipes:
            pipe.send(None)
        parts: list[News] = [pipe.recv() for pipe in self._pipes]
        for part in parts:
            if part.broken:
                raise RuntimeError(part.broken)
        instances = {instance for part in parts for instance in part.welcomed}
        rounds: dict[tuple[int, int], Round] = {}
        for part in parts:
            for key, notes in part.rounds.items():
                rounds[key] = notes.with_(rounds.get(key, Round()))
        return News(
            {name: sum(part.welcomed.get(name, 0) for part in parts) for name in instances},
            sum(part.welcomes for part in parts),
            max(part.welcomed_at for part in parts),
            rounds,
            sum(part.opened for part in parts),
            sum(part.closed for part in parts),
            "",
        )

    def release(self, round_: int) -> None:
        """Let the updates go that are held, up to a round's."""
        for pipe in self._pipes:
            pipe.send(round_)

    def until(
        self, what: str, done: Callable[[News], bool], seconds: float, pause: float = 0.02
    ) -> News:
        """Wait until the news are such; they are asked for after every `pause`.

        Raises:
            RuntimeError: they are not, in time.
        """
        end = time.monotonic() + seconds
        while not done(news := self.news()):
            if time.monotonic() > end:
                raise RuntimeError(f"in {seconds:g} s it did not come to this: {what}; {news}")
            time.sleep(pause)  # drivers answer when asked, and each question costs them time
        return news

    def __enter__(self) -> Drivers:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # at which they end
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def value(index: int) -> float:
    """What every element of device `index`'s update is: at most 4000, exact in float32."""
    return float(index % 4000 + 1)


def _drive(
    address: str,
    members: Sequence[tuple[int, Path]],
    held: int,
    pipe: multiprocessing.connection.Connection,
) -> None:
    """One process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # As in the server. No device would have its collector walk through hundreds of others.
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    asyncio.run(_devices(address, members, held, pipe))


async def _devices(
    address: str,
    members: Sequence[tuple[int, Path]],
    held: int,
    pipe: multiprocessing.connection.Connection,
) -> None:
    crowd, over = Crowd(), asyncio.Event()
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(DIALLING)

    async def device(index: int, directory: Path) -> None:
        await room.acquire()
        first = True
        member = Membership(directory)

        def welcomed(welcome: link_pb2.Welcome) -> None:
            nonlocal first
            crowd.welcome(member.name, welcome.instance)
            if first:
                room.release()
            first = False

        worker = Device(crowd, value(index))
        uplink = Watched(
            address,
            member.name,
            link_pb2.CLIENT,
            worker,
            on_welcome=welcomed,
            membership=member,
        )
        uplink.held = index < held
        try:
            await uplink.run()
        except Exception as error:  # noqa: BLE001 - told to the benchmark's process
            crowd.news.broken = f"{member.name} has given up: {error!r}"

    async def release(round_: int) -> None:
        crowd.released = round_
        async with crowd.news_of_release:
            crowd.news_of_release.notify_all()

    def asked() -> None:
        try:
            round_ = pipe.recv()
        except EOFError:
            loop.remove_reader(pipe.fileno())
            over.set()
            return
        if round_ is None:
            pipe.send(crowd.tell())
        else:
            tasks.append(asyncio.create_task(release(round_)))

    tasks = [asyncio.create_task(device(index, member)) for index, member in members]
    loop.add_reader(pipe.fileno(), asked)
    await over.wait()
    os._exit(0)  # as devices that are switched off; to close thousands in order takes long
