"""A link on loopback, participants that dial it, and connections that can break."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from tests.server.scripted_participant import ScriptedParticipant
from tests.server.waiting import wait_until

from isthmus.transport.uplink import METHOD, Uplink
from isthmus.wire import link_pb2
from isthmus_server.transport.link import Link


class BreakableProxy:
    """Forwards TCP connections to the link, and can stall or cut them.

    `limits` are bytes that the open connection still lets through, `up` to the server and `down`
    from it; `next_limits` are those of the next connection.
    """

    def __init__(self, port):
        self.target = port
        self.limits = self.next_limits = {}
        self.carried = []
        """Bytes that each connection forwarded, by direction."""
        self.received = bytearray()
        """All bytes that the server received through this proxy."""
        self.stalled = asyncio.Event()
        """A limit was reached."""
        self.refusing = False
        self.rate = None
        """Bytes per second in each direction; None for as many as there are."""
        self.writers = set()
        self.pipes = set()

    async def start(self):
        """Listen; returns the port."""
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def accept(self, reader, writer):
        if self.refusing:
            writer.transport.abort()
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers |= {writer, inner_writer}
        self.limits, self.next_limits = self.next_limits, {}
        carried = {"up": 0, "down": 0}
        self.carried.append(carried)
        for direction, source, sink in (
            ("up", reader, inner_writer),
            ("down", inner_reader, writer),
        ):
            pipe = asyncio.create_task(self.carry(direction, source, sink, carried, self.limits))
            self.pipes.add(pipe)

    async def carry(self, direction, source, sink, carried, limits):
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                limit = limits.get(direction)
                room = len(data) if limit is None else max(limit - carried[direction], 0)
                if self.rate is not None:
                    await asyncio.sleep(len(data) / self.rate)
                sink.write(data[:room])
                if direction == "up":
                    self.received += data[:room]
                carried[direction] += min(room, len(data))
                if room < len(data):
                    self.stalled.set()
                    return  # the rest is never forwarded
                await sink.drain()
            sink.close()

    def cut(self, *, for_good=False):
        """Abort open connections, and with `for_good` refuse new ones."""
        self.refusing = for_good
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def stop(self):
        self.cut(for_good=True)
        self.server.close()
        for pipe in self.pipes:
            pipe.cancel()
        await asyncio.gather(*self.pipes, return_exceptions=True)


class LoopbackNetwork:
    """A link on a loopback port, the participants that dial it, and proxies between them."""

    def __init__(self):
        self.connections = []
        """Tasks of the uplinks."""
        self.proxies = []
        self.links = []

    async def listen(self, lease_seconds=100.0, **options):
        """Start a link."""
        self.link = Link(lease_seconds, **options)
        self.links.append(self.link)
        self.port = await self.link.start()
        return self.link

    async def start_proxy(self):
        """A proxy to the link, and its port."""
        proxy = BreakableProxy(self.port)
        self.proxies.append(proxy)
        return proxy, await proxy.start()

    def dial(self, worker, name, port=None, role=link_pb2.CLIENT, **options):
        """Start an uplink for a worker; returns its task."""
        if hasattr(worker, "identity"):
            options |= {"identity": worker.identity, "on_welcome": worker.welcomed}
        if hasattr(worker, "wanted"):
            options["wanted"] = worker.wanted
        if hasattr(worker, "held"):
            options["held"] = worker.held
        address = f"127.0.0.1:{port or self.port}"
        uplink = Uplink(address, name, role, worker, longest_pause=0.05, **options)
        task = asyncio.create_task(uplink.run())
        self.connections.append(task)
        return task

    async def join(self, name, respond, port=None, role=link_pb2.CLIENT, **options):
        """Connect a scripted participant; returns it once the link knows it."""
        participant = ScriptedParticipant(respond)
        participant.connection = self.dial(participant, name, port, role, **options)
        await wait_until(lambda: name in self.link.peers)
        return participant

    @contextlib.asynccontextmanager
    async def raw_stream(self, options=(), **hello):
        """A stream on which only the test sends: `(call, send, receive)`."""
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
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
        for proxy in self.proxies:
            await proxy.stop()
        for link in self.links:
            await link.stop()


async def refusal(call):
    """How the server ended a call: the status code and its sentence."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details()
