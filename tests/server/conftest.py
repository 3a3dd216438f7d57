"""Participants on a real link, over real connections, that do what a test tells them to."""

import asyncio
import contextlib
import hashlib

import grpc
import grpc.aio
import pytest
import torch

from isthmus.errors import TaskError
from isthmus.task import Participant
from isthmus.transport.blobs import describe
from isthmus.transport.uplink import METHOD, Uplink
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link
from isthmus_server.views.report import read_report


async def until(condition):
    """Wait for what others make true: only a hang is as long as the limit."""
    async with asyncio.timeout(100.0):
        while not condition():  # noqa: ASYNC110 - they know nothing of us
            await asyncio.sleep(0.002)


class Clock:
    """Has waits be over when a test says so: it need neither wait nor be as fast as they are.

    A wait is an `asyncio.timeout`, or a call that comes later, and is known by its seconds.
    """

    def __init__(self, monkeypatch):
        self._loop = asyncio.get_running_loop()
        self._waits = []
        self._timeout, self._call_later = asyncio.timeout, self._loop.call_later
        monkeypatch.setattr(asyncio, "timeout", self._noted_timeout)
        monkeypatch.setattr(self._loop, "call_later", self._noted_call)

    def _noted_timeout(self, delay):
        limit = self._timeout(delay)
        self._waits.append((delay, lambda: self._end(limit)))
        return limit

    def _noted_call(self, delay, callback, *arguments, **more):
        handle = self._call_later(delay, callback, *arguments, **more)
        self._waits.append((delay, lambda: self._call(handle, callback, *arguments)))
        return handle

    def _end(self, limit):
        try:
            limit.reschedule(self._loop.time())
        except RuntimeError:  # it has ended, or not begun
            return False
        return True

    def _call(self, handle, callback, *arguments):
        if handle.cancelled():
            return False
        handle.cancel()
        callback(*arguments)
        return True

    async def over(self, seconds):
        """Let those that last so many seconds pass; waits until there is one."""

        def ended():
            passed = [wait for wait in self._waits if wait[0] == seconds and wait[1]()]
            self._waits = [wait for wait in self._waits if wait not in passed]
            return passed

        await until(ended)


class Guest:
    """A participant (an `isthmus.transport.worker.Worker`) around one coroutine.

    That is `work(guest, request, model)`. The guest keeps what it was asked, and what it was told
    about its answers.
    """

    def __init__(self, work):
        self.answer = work
        self.asked = []
        self.receipts = []
        self.cancelled = []
        self.buffers = []
        self.link = None

    def buffer(self, request, size):
        self.buffers.append(bytearray(size))
        return self.buffers[-1]

    async def work(self, request, model, progress):
        self.asked.append(request)
        self.progress = progress
        return await self.answer(self, request, model)

    def acknowledged(self, request, accepted, reason):
        self.receipts.append((accepted, reason))

    def cancel(self, request, reason):
        self.cancelled.append(request.id)

    async def leave(self):
        self.link.cancel()
        await asyncio.gather(self.link, return_exceptions=True)


class Wire:
    """TCP connections to the link, one at a time, that can be held up in the middle and cut.

    `limits` are bytes that the open connection still lets through, `up` to the server and `down`
    from it; `next` are those of the next one.
    """

    def __init__(self, port):
        self.target = port
        self.limits = self.next = {}
        self.carried = []
        self.stalled = asyncio.Event()
        self.refusing = False
        self.open = set()
        self.pipes = set()

    async def start(self):
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def accept(self, reader, writer):
        if self.refusing:
            writer.transport.abort()
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self.open |= {writer, inner_writer}
        self.limits, self.next = self.next, {}
        count = {"up": 0, "down": 0}
        self.carried.append(count)
        for way, source, sink in (("up", reader, inner_writer), ("down", inner_reader, writer)):
            pipe = asyncio.create_task(self.carry(way, source, sink, count, self.limits))
            self.pipes.add(pipe)

    async def carry(self, way, source, sink, count, limits):
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                limit = limits.get(way)
                room = len(data) if limit is None else max(limit - count[way], 0)
                sink.write(data[:room])
                count[way] += min(room, len(data))
                if room < len(data):
                    self.stalled.set()
                    return  # the rest waits for ever
                await sink.drain()
            sink.close()

    def cut(self, *, for_good=False):
        """Break what is open."""
        self.refusing = for_good
        for writer in self.open:
            writer.transport.abort()
        self.open.clear()

    async def stop(self):
        self.cut(for_good=True)
        self.server.close()
        for pipe in self.pipes:
            pipe.cancel()
        await asyncio.gather(*self.pipes, return_exceptions=True)


def _enrols(worker):
    return hasattr(worker, "identity")


class Net:
    """One link and everybody who dials it."""

    def __init__(self):
        self.guests = []
        self.wires = []
        self.links = []

    async def listen(self, lease_seconds=100.0):
        self.link = Link(lease_seconds)
        self.links.append(self.link)
        self.port = await self.link.start()
        return self.link

    async def wire(self):
        wire = Wire(self.port)
        self.wires.append(wire)
        return wire, await wire.start()

    def call(self, worker, name, port=None, role=link_pb2.CLIENT):
        """Start to dial; returns the task."""
        known = (
            {"identity": worker.identity, "on_welcome": worker.welcomed} if _enrols(worker) else {}
        )
        address = f"127.0.0.1:{port or self.port}"
        uplink = Uplink(address, name, role, worker, longest_pause=0.05, **known)
        task = asyncio.create_task(uplink.run())
        self.guests.append(task)
        return task

    async def join(self, name, work, port=None, role=link_pb2.CLIENT):
        """Dial, and be there."""
        guest = Guest(work)
        guest.link = self.call(guest, name, port, role)
        await until(lambda: name in self.link.peers)
        return guest

    @contextlib.asynccontextmanager
    async def raw(self, options=(), **hello):
        """A stream on which only the test speaks: `(call, send, receive)`."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options) as channel:
            call = channel.stream_stream(METHOD)()

            async def send(**body):
                await call.write(link_pb2.Envelope(**body).SerializeToString())

            async def receive(kind):
                while True:
                    message = link_pb2.Envelope.FromString(await call.read())
                    if message.WhichOneof("body") == kind:
                        return getattr(message, kind)

            fields = {"version_min": 2, "version_max": 2, "name": "raw", "role": link_pb2.CLIENT}
            await send(hello=link_pb2.Hello(**{**fields, "instance": "one", **hello}))
            yield call, send, receive
            call.cancel()

    async def close(self):
        for guest in self.guests:
            guest.cancel()
        await asyncio.gather(*self.guests, return_exceptions=True)
        for wire in self.wires:
            await wire.stop()
        for link in self.links:
            await link.stop()


async def refusal(call):
    """How the server ended a call: the status code and its sentence."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details()


@pytest.fixture
async def net():
    """An empty net; `await net.listen()` first."""
    net = Net()
    net.until = until
    net.refusal = refusal
    yield net
    await net.close()


@pytest.fixture
async def clock(monkeypatch):
    """`await clock.over(77)`: what lasts 77 seconds has lasted them."""
    return Clock(monkeypatch)


@pytest.fixture
def update():
    """The reply that carries an update (or a model), and its content."""

    def make(layout, vector, examples=10, **more):
        payload = layout.encode(torch.as_tensor(vector, dtype=torch.float32))
        trained = link_pb2.Trained(
            result=describe(payload), examples=examples, steps=1, seconds=0.5, **more
        )
        return link_pb2.Reply(trained=trained), payload

    return make


# -- whole runs -----------------------------------------------------------------------------------

NAMES = ("a", "b", "c")


def round_of(event):
    """The number of the round that an event is about; None for other events."""
    return getattr(getattr(event, "record", event), "round", None)


class Killed(BaseException):
    """Ends a coordinator as a signal would: nothing catches it."""


class Device:
    """An edge client in this process: the agent itself, made to fail in some attempts.

    All in one process share PyTorch's random state, so they take turns at working. Before its turn
    to train each waits for `hold()`.
    """

    def __init__(self, name, turn, faults, hold):
        self.agent = Agent(Participant(name=name, regime="federated"), None)
        self.turn = turn
        self.faults = faults
        self.hold = hold
        self.buffer, self.acknowledged, self.cancel = (
            self.agent.buffer,
            self.agent.acknowledged,
            self.agent.cancel,
        )
        self.identity, self.welcomed = self.agent.identity, self.agent.welcomed

    async def work(self, request, model, progress):
        work = request.train_local
        if reason := self.faults.get((work.round, work.attempt)):
            raise TaskError(reason)
        if request.WhichOneof("work") == "train_local":
            await self.hold()
        async with self.turn:
            return await self.agent.work(request, model, progress)


class Ranks:
    """A datacenter without ranks: every step takes `rate` off every parameter."""

    def __init__(self, layout):
        self.layout = layout
        self.vector = None
        self.step = 0
        self.rate = 0.001
        self.gradient = torch.zeros(layout.size)
        self.asked = []
        self.fail_exports = 0

    async def work(self, guest, request, model):
        kind = request.WhichOneof("work")
        self.asked.append(request)
        if kind == "open":
            return link_pb2.Reply(opened=link_pb2.Opened(examples=100)), None
        if kind == "close":
            return link_pb2.Reply(closed=link_pb2.Closed()), None
        if kind == "export":
            if self.fail_exports:
                self.fail_exports -= 1
                raise TaskError("the disk is full")
            assert request.export.step == self.step
            return self.answer(self.vector, exported=True)
        if kind == "mean_gradient":
            return self.answer(self.gradient)
        work = request.train_steps
        if model is not None:
            self.vector = self.layout.decode(model).clone()
        assert model is not None or work.from_step == self.step
        self.step = work.until_step
        self.vector -= self.rate * (work.until_step - work.from_step)
        return self.answer(self.vector if work.hand_back else None, evaluate=work.evaluate)

    def answer(self, vector, exported=False, evaluate=False):
        payload = self.layout.encode(vector) if vector is not None else None
        blob = link_pb2.Blob()
        if payload is not None:
            blob.sha256, blob.size = hashlib.sha256(payload).digest(), len(payload)
        if exported:
            return link_pb2.Reply(exported=link_pb2.Exported(model=blob)), payload
        trained = link_pb2.Trained(result=blob, examples=1, steps=50, training={"loss": 1.0})
        if evaluate:
            trained.evaluation.update({"loss": 0.75, "accuracy": 0.5})
        return link_pb2.Reply(trained=trained), payload


@pytest.fixture
def place(net, make_job, write_task, tmp_path):
    """Where runs happen: devices and ranks on a link, run directories, one task."""
    stores = []

    class Place:
        Killed = Killed
        names = NAMES

        def __init__(self):
            self.faults = {name: {} for name in NAMES}
            self.turn = asyncio.Lock()

        async def hold(self):
            """Nobody waits, unless a test says so."""

        async def listen(self, methods="pass", names=NAMES):
            write_task(methods)
            self.link = await net.listen()
            for name in names:
                net.call(self.device(name), name)
            await net.until(lambda: set(names) <= self.link.peers.keys())

        def device(self, name):
            return Device(name, self.turn, self.faults.setdefault(name, {}), lambda: self.hold())

        def create(self, name, *overrides):
            job = make_job(
                "strategy.policy=federated",
                f"federated.clients={len(self.link.peers)}",
                "federated.cohort=3",
                "federated.quorum=3",
                "federated.secure_aggregation=true",
                "rounds=3",
                *overrides,
            )
            stores.append(Store.create(tmp_path / name, job, tmp_path))
            return stores[-1]

        def reopen(self, store):
            stores.append(Store.open(store.directory))
            return stores[-1]

        async def run(self, name, *overrides, **more):
            store = self.create(name, *overrides)
            final = await Coordinator(store, self.link, **more).run()
            return read_report(store).to_json(), final

        async def killed(self, coordinator, kind, round_):
            """Run until an event of that kind and round, which kills it; the store, opened anew."""

            def kill(event):
                if isinstance(event, kind) and round_of(event) == round_:
                    raise Killed

            coordinator.events.subscribe(kill)
            with pytest.raises(Killed):
                await coordinator.run()
            return self.reopen(coordinator.store)

    yield Place()
    for store in stores:
        store.close()


@pytest.fixture
def with_ranks(place, net):
    """Devices, and a datacenter beside them."""

    async def start(*overrides):
        await place.listen()
        settings = ("federated.clients=3", "datacenter.ranks=1", *overrides)
        store = place.create("run", *settings)
        coordinator = Coordinator(store, place.link)
        ranks = Ranks(coordinator.model.layout)
        await net.join("dc", ranks.work, role=link_pb2.DATACENTER)
        return store, coordinator, ranks

    return start
