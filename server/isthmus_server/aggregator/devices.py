"""The streams of devices at an aggregator, of which all but blobs passes to the server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from isthmus.errors import ParticipantLost, TransferStalled, UpdateError
from isthmus.grpc_errors import NOT_LINKED
from isthmus.system.clocks import CLOCK_METADATA
from isthmus.transport.blobs import Piece, Write, piece_of
from isthmus.transport.heartbeats import Heartbeats
from isthmus.transport.stream import GONE, Stream
from isthmus.transport.transfer_time import TransferTime
from isthmus.wire import link_pb2
from isthmus_server.aggregator.blobs import KeptBlobs
from isthmus_server.transport.aggregators import LEFT, MAX_CHANNELS, status_of
from isthmus_server.transport.limits import (
    MAX_TRANSFERS_PER_PARTICIPANT,
    SHA256_BYTES,
    Refusal,
    abort_stream,
    certificate_digest,
    certificate_of,
)
from isthmus_server.transport.link import PING_GROUPS
from isthmus_server.transport.peer import Peer

WAITING_MESSAGES = 256
"""Messages of the server that wait for one device; one that reads none of so many is cut off."""
STALLED_SECONDS = 20.0
"""Time in which nothing comes of the vectors of a device, after which they are given up: a chunk
that takes longer than a lease would end the stream."""
_TOLD_BYTES = 16 << 20
"""Bytes of a blob that have moved, after which the server is told. What moves quickly is told of at
its end: each message costs the server as much as a part of a request."""
TOLD_SECONDS = 3.0
"""Longest time until it is told of fewer: it takes a longer pause for the end of a transfer."""
FIRST_TOLD_SECONDS = 0.5
"""Longest time for the first bytes of a blob. A round that ends soon is longer for a device of
which it knows that something comes; most transfers have ended by then."""
_HELLO_SECONDS = 5.0
"""Time for the first message of a stream that is refused."""

log = logging.getLogger(__name__)


async def _refuse_unlinked(context: grpc.aio.ServicerContext) -> None:
    """Refuse a stream because there is no link to the server, after its first message.

    gRPC's clients lose the reason if they write to a stream that has just ended
    (https://github.com/grpc/grpc/issues/36066), and a device that does not know this one goes on to
    the server.

    Raises:
        grpc.aio.AbortError: always.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HELLO_SECONDS):
            await context.read()
    await context.abort(grpc.StatusCode.UNAVAILABLE, NOT_LINKED)


class ToServer(Protocol):
    """The aggregator's own stream."""

    @property
    def is_linked(self) -> bool:
        """Whether there is one."""
        ...

    async def tell(self, message: link_pb2.Envelope) -> None:
        """Send a message; nothing if there is none."""
        ...


class _Counted:
    """The call of one device's stream, with what was read last and what is written of blobs."""

    def __init__(
        self, context: grpc.aio.ServicerContext, wrote: Callable[[Piece, int], Awaitable[None]]
    ) -> None:
        self._context = context
        self._wrote = wrote
        self.last = b""
        """The bytes of the message that was read last."""

    async def read(self) -> Any:
        """See `isthmus.transport.stream.Call`."""
        data = await self._context.read()
        if data is not grpc.aio.EOF:
            self.last = data
        return data

    async def write(self, data: bytes, /) -> None:
        """See `isthmus.transport.stream.Call`."""
        if (piece := piece_of(data)) is not None:
            await self._wrote(piece, len(data))
        await self._context.write(data)


class _Device:
    """A device that is connected here."""

    def __init__(self, number: int, context: grpc.aio.ServicerContext, to: ToServer) -> None:
        self.number = number
        self.call = _Counted(context, self._sent)
        self.stream = Stream(self.call, greeted=False)
        self.peer = Peer(link_pb2.Hello(name=f"channel {number}"))
        self.peer.stream = self.stream
        self.refusal: Refusal | None = None
        """Why the server ends the stream."""
        self.serving: asyncio.Task[Any] | None = asyncio.current_task()
        self.waiting = 0
        """Messages of the server that are not sent yet."""
        self._to = to
        self._pulls: dict[bytes, asyncio.Task[None]] = {}
        """Transfers to it, by SHA-256: from the pull on, before the blob is here."""
        self._untold: dict[tuple[bytes, bool], link_pb2.Passed] = {}
        self._telling: asyncio.TimerHandle | None = None
        """Tells the server later."""

    async def tell(self, *, least: int = 0) -> None:
        """Tell the server what has moved, if that is at least so many bytes."""
        for key, passed in list(self._untold.items()):
            if passed.bytes >= least and self._untold.get(key) is passed:
                del self._untold[key]
                await self._to.tell(link_pb2.Envelope(passed=passed))

    async def tell_of_last(self, sha256: bytes) -> None:
        """Tell the server what has moved, and that the device has all of this blob."""
        passed = self._untold.get((sha256, False))
        if passed is not None:
            passed.is_last = True  # in the same message: each costs both ends as much
        await self.tell()
        if passed is None:
            await self.begin(sha256, is_last=True)

    async def begin(self, sha256: bytes, *, is_last: bool = False) -> None:
        """Tell the server that a blob is about to be sent, or that no byte of it is left."""
        passed = link_pb2.Passed(channel=self.number, sha256=sha256, is_last=is_last)
        await self._to.tell(link_pb2.Envelope(passed=passed))

    async def moved(
        self, sha256: bytes, count: int, size: int, end: int, *, from_caller: bool
    ) -> None:
        """Count a chunk; `size` is that of its message, `end` the offset after it."""
        key = sha256, from_caller
        passed = self._untold.get(key)
        if passed is None:
            passed = link_pb2.Passed(channel=self.number, sha256=sha256, from_caller=from_caller)
            self._untold[key] = passed
        passed.bytes += count
        passed.more += size - count
        passed.end = end
        if self._telling is None:
            seconds = TOLD_SECONDS if end > count else FIRST_TOLD_SECONDS
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(seconds, self._tell_later)
        if passed.bytes >= _TOLD_BYTES:
            await self.tell(least=_TOLD_BYTES)

    def _tell_later(self) -> None:
        self._telling = None
        self.stream.spawn(self.tell())

    def left(self) -> None:
        """The stream has ended."""
        if self._telling is not None:
            self._telling.cancel()
        self.peer.stream = None
        self.peer.fail_pending("it has left")
        self.stream.close()

    async def _sent(self, piece: Piece, size: int) -> None:
        end = piece.offset + len(piece.data)
        await self.moved(piece.sha256, len(piece.data), size, end, from_caller=False)

    def check_pull(self, sha256: bytes) -> None:
        """Have a transfer make room for a later one of the same blob, as at the server.

        Raises:
            UpdateError: too many others are in progress.
        """
        for tasks in (self._pulls, self.peer.transfers):
            if (earlier := tasks.pop(sha256, None)) is not None:
                earlier.cancel()
        if len(self._pulls) >= MAX_TRANSFERS_PER_PARTICIPANT:
            raise UpdateError(
                f"more than {MAX_TRANSFERS_PER_PARTICIPANT} transfers were requested at a time"
            )

    def is_pulling(self, sha256: bytes) -> bool:
        """Whether a transfer to the device is in progress, or waits for the blob."""
        return sha256 in self._pulls

    def pulling(self, sha256: bytes, task: asyncio.Task[None]) -> None:
        """A transfer to the device is in progress until the task ends."""
        self._pulls[sha256] = task

        def remove(ended: asyncio.Task[None]) -> None:
            if self._pulls.get(sha256) is ended:
                del self._pulls[sha256]

        task.add_done_callback(remove)

    def end(self, refusal: Refusal) -> None:
        """End the stream with a status."""
        self.refusal = refusal
        if self.serving is not None:
            self.serving.cancel()


class Devices:
    """All devices that are connected to an aggregator.

    Guarantees:
      * the server gets each message of a device as it is, in order, and with the certificate that
        the device has proved to hold; and the device those of the server;
      * a device that reads nothing holds up no other;
      * a device whose link is too slow for a chunk gets smaller ones on its next stream;
      * when the link to the server ends, so do the streams of all devices.
    """

    def __init__(self, to: ToServer, lease_seconds: float) -> None:
        """`lease_seconds`: time without a message after which a stream is ended."""
        self._to = to
        self._heartbeats = Heartbeats(lease_seconds, PING_GROUPS)
        self._devices: dict[int, _Device] = {}
        self._numbers = itertools.count(1)
        self._before: OrderedDict[bytes, tuple[bytes, TransferTime]] = OrderedDict()
        """SHA-256 of the blob that was sent last to devices whose streams have ended, and how long
        blobs have moved there; by the digests of their certificates."""
        self.blobs: KeptBlobs
        """What they pull."""

    def __len__(self) -> int:
        """How many are connected."""
        return len(self._devices)

    async def fetch(self, channel: int, vector: link_pb2.Blob, write: Write) -> None:
        """Get a vector from the device on a channel.

        Raises:
            UpdateError: the device has left, or sends nothing more, or does not have it, or it was
                damaged.
        """
        device = self._devices.get(channel)
        if device is None:
            raise _left()
        try:
            # That it begins the server knows: it has just asked for it.
            await device.peer.fetch(vector, write, None, "", pause=STALLED_SECONDS)
        except TransferStalled:
            raise _left(f"nothing of its vector came for {STALLED_SECONDS:g} s") from None
        except ParticipantLost:
            raise _left() from None
        finally:
            await device.tell()

    async def arrived(self, sha256: bytes, end: int) -> None:
        """Tell the server how much is here of a blob for which devices wait: they are not slow."""
        for device in list(self._devices.values()):
            if device.is_pulling(sha256):
                passed = link_pb2.Passed(channel=device.number, sha256=sha256, end=end)
                await self._to.tell(link_pb2.Envelope(passed=passed))

    # -- from the server ---------------------------------------------------------------------------

    def take(self, message: link_pb2.Envelope) -> None:
        """Take a message of the server about one channel."""
        if message.HasField("hang_up"):
            device = self._devices.get(message.hang_up.channel)
            if device is not None:
                code, reason = status_of(message.hang_up)
                device.end(Refusal(reason, code))
            return
        device = self._devices.get(message.through.channel)
        if device is None:
            return
        data = message.through.message
        inner = link_pb2.Envelope()
        with contextlib.suppress(DecodeError):
            inner.ParseFromString(data)
        if inner.HasField("request"):
            self.blobs.note(inner.request)
            device.peer.reached.clear()
        elif inner.HasField("pull"):
            device.peer.abandoned.pop(inner.pull.sha256, None)
        device.waiting += 1
        if device.waiting > WAITING_MESSAGES:
            device.end(Refusal("it does not read what it is sent", grpc.StatusCode.UNAVAILABLE))
            return
        device.stream.spawn(self._send(device, data))

    async def _send(self, device: _Device, data: bytes) -> None:
        try:
            await device.stream.send_quietly(data)
            device.stream.greet()  # the first message is the welcome
        finally:
            device.waiting -= 1

    def end_all(self) -> None:
        """The link to the server has ended."""
        for device in list(self._devices.values()):
            device.end(Refusal(NOT_LINKED, grpc.StatusCode.UNAVAILABLE))

    # -- from a device -----------------------------------------------------------------------------

    async def connect(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        """Serve one stream of a device, as `Link` does at the server."""
        if not self._to.is_linked:
            await _refuse_unlinked(context)
        if len(self._devices) >= MAX_CHANNELS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this aggregator is full")
        await context.send_initial_metadata(((CLOCK_METADATA, f"{time.time():.3f}"),))
        if not self._to.is_linked:  # any more: `end_all` has not ended what was not here yet
            await _refuse_unlinked(context)
        device = _Device(next(self._numbers), context, self._to)
        who = certificate_digest(context)
        self._go_on(who, device.peer)
        self._devices[device.number] = device
        caller = link_pb2.Caller(channel=device.number, certificate=certificate_of(context) or b"")
        try:
            await self._to.tell(link_pb2.Envelope(caller=caller))
            async with self._heartbeats.of(device.stream):
                while (message := await device.stream.receive()) is not None:
                    await self._pass_on(device, message)
                    del message  # a chunk is not kept until the next one is here
        except UpdateError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            log.info("channel %d: no message for the length of a lease", device.number)
        except asyncio.CancelledError:
            if device.refusal is None:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            await abort_stream(context, device.refusal)
        finally:
            del self._devices[device.number]
            self._keep(who, device.peer)
            device.left()
            # Also if the server has ended it, which then knows nothing of the channel any more.
            hang_up = link_pb2.HangUp(channel=device.number)
            with contextlib.suppress(*GONE):
                await self._to.tell(link_pb2.Envelope(hang_up=hang_up))

    def _keep(self, who: bytes, peer: Peer) -> None:
        """Remember what is known of a device's link until its next stream.

        A chunk that takes longer than a lease has ended its stream, and would do so again.
        """
        sha256, _ = peer.last_sent
        if who and sha256:
            self._before[who] = sha256, peer.transfer_time
            while len(self._before) > MAX_CHANNELS:
                self._before.popitem(last=False)

    def _go_on(self, who: bytes, peer: Peer) -> None:
        if (before := self._before.pop(who, None)) is not None:
            sha256, peer.transfer_time = before
            peer.last_sent = sha256, None

    async def _pass_on(self, device: _Device, message: link_pb2.Envelope | Piece) -> None:
        if isinstance(message, link_pb2.Envelope) and message.HasField("pull"):
            await self._pull(device, message.pull)
            return
        chunk: Piece | link_pb2.Chunk | None = None
        if isinstance(message, Piece):
            chunk = message
        elif message.HasField("chunk"):
            chunk = message.chunk
        if chunk is not None and chunk.sha256 in device.peer.abandoned:
            # The rest of a vector that was given up, which the server has not asked for.
            await device.peer.add_chunk(chunk, device.stream.received_size)
            return
        if chunk is not None and chunk.sha256 in device.peer.fetches:
            count = len(chunk.data)
            size = device.stream.received_size
            end = chunk.offset + count
            await device.moved(bytes(chunk.sha256), count, size, end, from_caller=True)
            await device.peer.add_chunk(chunk, size)
            return
        await device.tell()
        through = link_pb2.Through(channel=device.number, message=device.call.last)
        await self._to.tell(link_pb2.Envelope(through=through))

    async def _pull(self, device: _Device, pull: link_pb2.Pull) -> None:
        if len(pull.sha256) != SHA256_BYTES:
            raise UpdateError("it asked for a blob by something else than a SHA-256")
        # Nothing is left to send: this only says that the device has it.
        if self.blobs.has_all(pull):
            await device.begin(pull.sha256, is_last=True)
            return
        device.check_pull(pull.sha256)
        await device.begin(pull.sha256)
        pull.machine = ""
        task = device.stream.spawn(self._send_blob(device, pull))
        device.pulling(pull.sha256, task)

    async def _send_blob(self, device: _Device, pull: link_pb2.Pull) -> None:
        try:
            await self.blobs.send(device.peer, device.stream, pull)
        except OSError as error:
            # No fault of the device, which goes on at its next address.
            log.warning("a model cannot be kept here: %s", error)
            why = f"this aggregator cannot keep a model: {error.strerror or error}"
            device.end(Refusal(why, grpc.StatusCode.RESOURCE_EXHAUSTED))
            return
        if device.peer.last_blob == pull.sha256:
            await device.tell_of_last(pull.sha256)
        else:
            await device.tell()


def _left(reason: str = "it left the aggregator before its vector was complete") -> UpdateError:
    error = UpdateError(reason)
    error.code = LEFT
    return error
