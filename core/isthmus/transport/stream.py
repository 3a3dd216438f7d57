"""An open gRPC stream with the send and receive logic that both ends of the link share.

Messages are sent one at a time. Background tasks of a stream are spawned on it and end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Piece, piece_of
from isthmus.wire import link_pb2

_PING = link_pb2.Envelope(ping=link_pb2.Ping()).SerializeToString()

log = logging.getLogger(__name__)

GONE = (
    grpc.RpcError,
    grpc.aio.AioRpcError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,
    grpc.aio.AbortError,
    asyncio.InvalidStateError,
)
"""Exceptions of gRPC for a stream that is closed or aborted, or whose peer is gone."""


class Call(Protocol):
    """The common interface of a participant's call and a server's context."""

    async def read(self) -> Any:
        """The next message's bytes, or `grpc.aio.EOF`."""
        ...

    async def write(self, data: bytes, /) -> None:
        """Send one message's bytes."""
        ...


class Stream:
    """Sends and receives the messages of one call."""

    def __init__(self, call: Call, *, answers: bool = False, greeted: bool = True) -> None:
        """Use a call.

        Args:
            call: sends and receives the messages.
            answers: reply to pings, as participants do.
            greeted: heartbeats begin at once; otherwise with `greet`.
        """
        self._call = call
        self._answers = answers
        self.is_greeted = greeted
        """Whether the other end has its first message, before which it takes no ping."""
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent_at = time.monotonic()
        """Monotonic time of the last sent message."""
        self.silent_since = math.inf
        """Monotonic time at which the pending receive began; infinity if there is none."""
        self.received_size = 0
        """Bytes of the last message that was received, pings excepted."""

    async def send(self, message: link_pb2.Envelope | bytes) -> None:
        """Send one message; returns when the transport has room for the next.

        A cancelled sender returns at once, even if the other end reads nothing. Its message is
        still sent before any other.
        """
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self._sending.acquire()
        # gRPC does not support a second write while a cancelled one is pending.
        writing = asyncio.ensure_future(self._call.write(data))
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._sending.release()
        if not writing.cancelled() and writing.exception() is None:
            self.sent_at = time.monotonic()

    async def send_quietly(self, message: link_pb2.Envelope | bytes) -> None:
        """Send unless the stream is closed; pending messages are sent again on the next stream."""
        await _unless_gone(self.send(message))

    async def receive(self, timeout: float | None = None) -> link_pb2.Envelope | Piece | None:  # noqa: ASYNC109 - for one message
        """The next message, or None at the end of the stream; a chunk may be returned as a `Piece`.

        Pings are skipped, except with `timeout`, which limits the wait for a peer's first message.

        Raises:
            TimeoutError: nothing was received in `timeout` seconds.
            UpdateError: the received bytes are not a message.
        """
        if timeout is None:
            data = await self._after_pings()
        else:
            async with asyncio.timeout(timeout):
                data = await self._call.read()
        if data is grpc.aio.EOF:
            return None
        self.received_size = len(data)
        piece = piece_of(data)
        if piece is not None:
            return piece
        try:
            return link_pb2.Envelope.FromString(data)
        except DecodeError:
            raise UpdateError("the received data is not a message of this link") from None

    async def _after_pings(self) -> Any:
        self.silent_since = time.monotonic()
        while (data := await self._call.read()) == _PING:
            self.silent_since = time.monotonic()
            if self._answers:
                self.ping()
        self.silent_since = math.inf
        return data

    def greet(self) -> None:
        """Have heartbeats begin, and what was waited for before count as none; once only."""
        if self.is_greeted:
            return
        self.is_greeted = True
        if self.silent_since < math.inf:
            self.silent_since = time.monotonic()

    def ping(self) -> None:
        """Send a ping, unless another message is being sent."""
        if not self._sending.locked():
            self.sent_at = time.monotonic()
            self.spawn(self._ping())

    async def _ping(self) -> None:
        async with self._sending:
            await self._call.write(_PING)  # cancelled only with the stream

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine until the stream closes; an error of a closed stream is ignored."""
        task = asyncio.create_task(_unless_gone(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # for a task cancelled before its first step
        return task

    def close(self) -> None:
        """Cancel all spawned tasks. End the call first, because their writes may block."""
        for task in self._tasks:
            task.cancel()


async def to_the_end(work: Awaitable[None]) -> None:
    """Await work that must not be interrupted; cancellations are raised after it ends."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # one more
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # nobody else looks at it
        raise


async def _unless_gone(work: Awaitable[None]) -> None:
    try:
        await work
    except GONE:
        log.debug("the stream is closed; a message is sent again on the next one")
