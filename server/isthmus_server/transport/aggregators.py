"""The server's end of aggregators: processes that hold streams of devices and add their vectors.

An aggregator is one more caller of the link. What its devices say to the server, and the server to
them, passes through its stream as it is, each in an envelope with the number of a channel; so a
device behind an aggregator is a participant like any other, with a lease and requests of its own.
Only blobs do not pass: the aggregator keeps what devices pull, and adds the vectors that they send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from isthmus.errors import AdmissionRefused, UpdateError
from isthmus.identity import tls
from isthmus.printable import counted, in_a_line
from isthmus.transport.requests import blobs_of
from isthmus.transport.stream import GONE, Stream
from isthmus.wire import link_pb2
from isthmus_server.transport.aggregator_room import AggregatorRoom
from isthmus_server.transport.limits import SHA256_BYTES
from isthmus_server.transport.peer import CAME, Peer

LEFT = "left-aggregator"
"""Code of a failure because a device, or the sum of its vector, is not at the aggregator, or the
aggregator has no room for it: no fault of the device."""
MAX_CHANNELS = 20_000
"""Most devices at one aggregator."""
WAITING_MESSAGES = 64
"""Messages of one device that wait for the server; one more is taken only of what the server
fetches from it."""
WAITING_BYTES = 8 << 20
"""Bytes of such messages, likewise."""
HELD_UP_SECONDS = 5.0
"""Longest time in which nothing more of an aggregator is read because of one of its devices, which
then loses its stream and comes back."""
MAX_WRAPPING = 4096
"""Most bytes besides chunks that count, and as many again as the chunks have: a small chunk may be
half of its message."""
MAX_REASON = 1000
"""Characters of why a stream has ended."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
"""gRPC's status codes by their numbers."""

log = logging.getLogger(__name__)


class DeviceChannel:
    """The stream of one device at an aggregator: what the server has in place of a gRPC call.

    It is both ends that `Link` needs, the call (`read`, `write`) and its context.
    """

    def __init__(self, aggregator: ConnectedAggregator, number: int, certificate: bytes) -> None:
        """`number` counts the aggregator's channels; `certificate` is the device's (PEM)."""
        self.aggregator = aggregator
        self.number = number
        self.participant: Peer | None = None
        """The participant whose stream it is, as soon as it is admitted."""
        self.certificate = certificate
        """The device's certificate (PEM)."""
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._bytes = 0
        """Bytes of what waits in the queue."""
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def put(self, message: Any) -> None:
        """Take a message of the device, or `grpc.aio.EOF`.

        If too many others wait, its aggregator and the devices there wait for this one only while
        the server fetches something from it, and not for long. Else its stream ends.
        """
        if message is grpc.aio.EOF:
            self._messages.put_nowait(message)
            return
        if not self._has_room.is_set() and not await self._gets_room():
            when = " before it is admitted" if self.participant is None else ""
            reason = f"it sends more{when} than the server takes"
            await self.end(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
            self._messages.put_nowait(grpc.aio.EOF)
            return
        self._messages.put_nowait(message)
        self._count(len(message))

    async def _gets_room(self) -> bool:
        """Wait for a place for one more message, if the server is to wait; whether there is one."""
        if self.participant is None or not self.participant.fetches:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELD_UP_SECONDS):
                await self._has_room.wait()
        return self._has_room.is_set()

    def _count(self, change: int) -> None:
        """Add to the bytes that wait, after the queue has changed."""
        self._bytes += change
        if self._bytes < WAITING_BYTES and self._messages.qsize() < WAITING_MESSAGES:
            self._has_room.set()
        else:
            self._has_room.clear()

    def drain(self) -> None:
        """Forget what waits, so that nothing waits for a place behind it."""
        while not self._messages.empty():
            self._messages.get_nowait()
        self._count(-self._bytes)

    async def read(self) -> Any:
        """The next message's bytes, or `grpc.aio.EOF`."""
        message = await self._messages.get()
        if message is not grpc.aio.EOF:
            self._count(-len(message))
        return message

    async def write(self, data: bytes, /) -> None:
        """Send one message's bytes."""
        through = link_pb2.Through(channel=self.number, message=data)
        await self.aggregator.send(link_pb2.Envelope(through=through))

    async def send_initial_metadata(self, metadata: object) -> None:
        """Nothing: the aggregator has sent its own."""

    def auth_context(self) -> dict[str, list[bytes]]:
        """The device's certificate, in the form of gRPC."""
        return {"x509_pem_cert": [self.certificate]}

    def peer(self) -> str:
        """A name for the caller, which no other has."""
        return f"aggregator:{self.aggregator.name}:{self.number}"

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the device's stream.

        Raises:
            grpc.aio.AbortError: always, as gRPC does.
        """
        await self.end(code, details)
        raise grpc.aio.AbortError(details)

    async def end(self, code: grpc.StatusCode, details: str = "") -> None:
        """Have the aggregator end the device's stream, if it still has it."""
        if self.aggregator.drop(self):
            number = int(code.value[0])
            hang_up = link_pb2.HangUp(channel=self.number, status=number, reason=details)
            with contextlib.suppress(*GONE):
                await self.aggregator.send(link_pb2.Envelope(hang_up=hang_up))


class ConnectedAggregator:
    """One aggregator that is connected, and the channels of its devices."""

    def __init__(self, peer: Peer, stream: Stream) -> None:
        """`peer` is the aggregator as a caller of the link, `stream` its present stream."""
        self.peer = peer
        self._stream = stream
        self._channels: dict[int, DeviceChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """Name of the aggregator in the registry."""
        return self.peer.name

    @property
    def devices(self) -> int:
        """Number of devices with a stream there."""
        return len(self._channels)

    async def send(self, message: link_pb2.Envelope) -> None:
        """Send a message on the stream of which the channels are."""
        await self._stream.send(message)

    def drop(self, channel: DeviceChannel) -> bool:
        """Forget a channel; returns whether it was open."""
        channel.drain()
        if self._channels.get(channel.number) is not channel:
            return False
        del self._channels[channel.number]
        return True

    def open(self, caller: link_pb2.Caller, authority: bytes | None) -> DeviceChannel:
        """A new channel for a device; `authority` is the certificate (PEM) that signs devices'.

        Raises:
            UpdateError: the channel is open already.
            AdmissionRefused: the authority did not sign the certificate.
        """
        if caller.channel in self._channels:
            raise UpdateError(f"the aggregator {self.name!r} opened channel {caller.channel} twice")
        certificate = tls.read_certificate(caller.certificate)
        # TLS has checked it at the aggregator, which might not have.
        if authority is None or not tls.issued_by(certificate, tls.read_certificate(authority)):
            raise AdmissionRefused("this server's authority did not sign the device's certificate")
        # Written anew: with other bytes around it, it would count as many, and these would be kept.
        channel = DeviceChannel(self, caller.channel, tls.pem(certificate))
        self._channels[caller.channel] = channel
        return channel

    @property
    def is_full(self) -> bool:
        """Whether no more devices may connect there."""
        return len(self._channels) >= MAX_CHANNELS

    async def refuse(self, number: int, code: grpc.StatusCode, reason: str) -> None:
        """Have the aggregator end the stream of a device for which no channel is opened."""
        hang_up = link_pb2.HangUp(channel=number, status=int(code.value[0]), reason=reason)
        await self._stream.send_quietly(link_pb2.Envelope(hang_up=hang_up))

    async def take(self, message: link_pb2.Envelope) -> None:
        """Take a message about a channel; one about a channel that has ended is dropped.

        Raises:
            UpdateError: it is not a message of this link.
        """
        kind = message.WhichOneof("body")
        body = getattr(message, kind or "")
        channel = self._channels.get(body.channel)
        if channel is None:
            return
        if kind == "through":
            await channel.put(body.message)
        elif kind == "hang_up":
            await channel.put(grpc.aio.EOF)  # after what the device has sent before
            if self._channels.get(channel.number) is channel:
                del self._channels[channel.number]
        elif kind == "passed" and channel.participant is not None:
            if len(body.sha256) != SHA256_BYTES:
                raise UpdateError("it counted bytes of something else than a SHA-256")
            _count(channel.participant, body, self._most(channel, body))

    def _most(self, channel: DeviceChannel, passed: link_pb2.Passed) -> int:
        """Size of a blob that is expected to pass at a channel now; 0 if none is."""
        if passed.from_caller:
            for request, _ in self.peer.pending.values():
                asked = request.add_vector
                if asked.channel == channel.number and asked.vector.sha256 == passed.sha256:
                    return int(asked.vector.size)
            return 0
        assert channel.participant is not None
        for request, _ in channel.participant.pending.values():
            for blob in blobs_of(request):
                if blob.sha256 == passed.sha256:
                    return int(blob.size)
        return 0

    async def close(self) -> None:
        """The aggregator's stream has ended, and those of its devices with it."""
        self._channels.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def serve(self, channel: DeviceChannel, work: Coroutine[Any, Any, None]) -> None:
        """Serve a device's channel in a task of its own; at its end the device's stream ends."""

        async def run() -> None:
            try:
                await work
            except (asyncio.CancelledError, *GONE):
                pass
            except Exception:  # one device's stream; the others' go on
                log.exception("the stream of a device at %s failed", self.name)
            finally:
                await channel.end(grpc.StatusCode.UNAVAILABLE, "the server ended the stream")

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _count(device: Peer, passed: link_pb2.Passed, most: int) -> None:
    """Count bytes that have moved between a device and its aggregator as the device's.

    An aggregator may say anything. What it says of a blob that the device does not need now, or
    beyond the `most` bytes of a blob, makes no round longer and takes no memory.
    """
    if passed.is_last and not passed.from_caller:
        device.last_blob = passed.sha256
    if not most:
        return
    passed.bytes = min(passed.bytes, most)
    passed.end = min(passed.end, most)
    passed.more = min(passed.more, passed.bytes + MAX_WRAPPING)
    now = time.monotonic()
    moved = device.transfer_time
    if not passed.bytes and passed.end and not passed.from_caller:
        # So much is at the aggregator itself, and the device waits for it. It is no cost.
        reached = device.reached.get(passed.sha256, 0)
        moved.add(max(0, passed.end - reached), now)
        device.reached[passed.sha256] = max(reached, passed.end)
        return
    if not passed.bytes:
        moved.begin(now)
        device.messages_sent.add(passed.sha256, passed.more)
        return
    if passed.from_caller:
        device.received.add(passed.sha256, passed.bytes)
        device.messages_received.add(passed.sha256, passed.more)
    else:
        device.sent.add(passed.sha256, passed.bytes)
        device.messages_sent.add(passed.sha256, passed.more)
    key = CAME + passed.sha256 if passed.from_caller else passed.sha256
    reached = device.reached.get(key, 0)
    # What moves once more does not make a round longer.
    again = min(passed.bytes, max(0, passed.bytes + reached - passed.end))
    moved.add(passed.bytes, now, again=again)
    device.reached[key] = max(reached, passed.end)


class Aggregators:
    """The aggregators of a server, and where each device is.

    Guarantees:
      * a device behind an aggregator is admitted by its own certificate, as at the server;
      * with the stream of an aggregator those of its devices end, and their leases begin;
      * no aggregator has more than one stream.
    """

    def __init__(self) -> None:
        self.connected: dict[str, ConnectedAggregator] = {}
        """Aggregators with a stream, by name."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._room: WeakKeyDictionary[Peer, AggregatorRoom] = WeakKeyDictionary()

    def room(self, aggregator: Peer) -> AggregatorRoom:
        """The places for requests to an aggregator."""
        return self._room.setdefault(aggregator, AggregatorRoom())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Tell aggregators something that nobody waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.asynccontextmanager
    async def serving(self, peer: Peer, stream: Stream) -> AsyncIterator[ConnectedAggregator]:
        """Have an aggregator's devices connected during the block."""
        aggregator = self.connected[peer.name] = ConnectedAggregator(peer, stream)
        log.info("the aggregator %s is connected", peer.name)
        try:
            yield aggregator
        finally:
            if self.connected.get(peer.name) is aggregator:
                del self.connected[peer.name]
            devices = counted(aggregator.devices, "device")
            log.info("the aggregator %s has left, with %s", peer.name, devices)
            await aggregator.close()


def status_of(hang_up: link_pb2.HangUp) -> tuple[grpc.StatusCode, str]:
    """The status with which a stream is to end, and why."""
    code = _CODES.get(hang_up.status, grpc.StatusCode.UNAVAILABLE)
    return code, in_a_line(hang_up.reason[:MAX_REASON])
