"""One open gRPC stream, as both ends of the link use it.

Whole messages go out one at a time, and come in or end; what has to be done for as long as the
stream lives is spawned on it and ends with it.
"""

from __future__ import annotations

import asyncio
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
    asyncio.InvalidStateError,
)
"""What gRPC raises when the other end, or the stream, is not there any more."""


class Call(Protocol):
    """What a participant's call and a server's context have in common."""

    async def read(self) -> Any:
        """The next message's bytes, or `grpc.aio.EOF`."""
        ...

    async def write(self, data: bytes, /) -> None:
        """Send one message's bytes."""
        ...


class Stream:
    """Messages in and out of one call."""

    def __init__(self, call: Call, *, answers: bool = False) -> None:
        """`answers`: a ping is answered with another."""
        self._call = call
        self._answers = answers
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent_at = time.monotonic()
        """When something was sent last, by the monotonic clock."""
        self.silent_since = math.inf
        """When somebody began to wait for the message that has not come yet."""

    async def send(self, message: link_pb2.Envelope | bytes) -> None:
        """Send one message; returns when the transport has room for the next.

        Whoever is cancelled goes at once, also where the other end reads nothing. What it was
        sending still goes out before anything else does.
        """
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self._sending.acquire()
        # gRPC does not bear a second write beside one that was given up.
        writing = asyncio.ensure_future(self._call.write(data))
        writing.add_done_callback(self._written)
        await asyncio.shield(writing)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._sending.release()
        if not writing.cancelled() and writing.exception() is None:
            self.sent_at = time.monotonic()

    async def send_quietly(self, message: link_pb2.Envelope | bytes) -> None:
        """Send, unless the stream is gone: what is pending is sent again on the next one."""
        await _unless_gone(self.send(message))

    async def receive(self, timeout: float | None = None) -> link_pb2.Envelope | Piece | None:  # noqa: ASYNC109 - for one message
        """The next message, or None at the end; a chunk may come as a `Piece`.

        Pings are passed over, but where a stranger has `timeout` seconds for one message.

        Raises:
            TimeoutError: nothing came in that time.
            UpdateError: what came is no message.
        """
        if timeout is None:
            data = await self._after_pings()
        else:
            async with asyncio.timeout(timeout):
                data = await self._call.read()
        if data is grpc.aio.EOF:
            return None
        piece = piece_of(data)
        if piece is not None:
            return piece
        try:
            return link_pb2.Envelope.FromString(data)
        except DecodeError:
            raise UpdateError("what came is not a message of this link") from None

    async def _after_pings(self) -> Any:
        self.silent_since = time.monotonic()
        while (data := await self._call.read()) == _PING:
            self.silent_since = time.monotonic()
            if self._answers:
                self.ping()
        self.silent_since = math.inf
        return data

    def ping(self) -> None:
        """Say that this end is there; whoever is sending is heard without that."""
        if not self._sending.locked():
            self.sent_at = time.monotonic()
            self.spawn(self._ping())

    async def _ping(self) -> None:
        async with self._sending:
            await self._call.write(_PING)  # given up only when the stream is

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine for as long as the stream lives; that it is gone ends it quietly."""
        task = asyncio.create_task(_unless_gone(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began
        return task

    def close(self) -> None:
        """Stop everything that was spawned. End the call first, or a write of theirs may hang."""
        for task in self._tasks:
            task.cancel()


async def to_the_end(work: Awaitable[None]) -> None:
    """Finish what must not be left half done, and only then pass a cancellation on."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _unless_gone(work: Awaitable[None]) -> None:
    try:
        await work
    except GONE:
        log.debug("the stream is gone; a message waits for the next one")
