"""One open gRPC stream, as both ends of the link use it.

Whole messages go out one at a time, and come in or end; what has to be done for as long as the
stream lives is spawned on it and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from isthmus.contents import Piece, piece_of
from isthmus.errors import UpdateError
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

    def __init__(self, call: Call) -> None:
        self._call = call
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.TimerHandle | None = None

    async def send(self, message: link_pb2.Envelope | bytes) -> None:
        """Send one message; returns when the transport has room for the next."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        async with self._sending:
            # gRPC does not bear a second write beside one that was given up.
            await to_the_end(self._call.write(data))

    async def send_quietly(self, message: link_pb2.Envelope | bytes) -> None:
        """Send, unless the stream is gone: what is pending is sent again on the next one."""
        await _unless_gone(self.send(message))

    async def receive(self, timeout: float) -> link_pb2.Envelope | Piece | None:  # noqa: ASYNC109 - the lease
        """The next message, or None at the end; a chunk may come as a `Piece`.

        Raises:
            TimeoutError: nothing came for `timeout` seconds.
            UpdateError: what came is no message.
        """
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

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine for as long as the stream lives; that it is gone ends it quietly."""
        task = asyncio.create_task(_unless_gone(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began
        return task

    def beat(self, every: float) -> None:
        """Send a ping every so many seconds, for as long as the stream lives.

        In between there is a timer and no task: a server does this for everybody who is idle.
        """
        loop = asyncio.get_running_loop()

        def tick() -> None:
            self._beating = loop.call_later(every, tick)
            if not self._sending.locked():  # whoever is sending is heard without a ping
                self.spawn(self.send(_PING))

        self._beating = loop.call_later(every, tick)

    def close(self) -> None:
        """Stop everything that was spawned. End the call first, or a write of theirs may hang."""
        if self._beating is not None:
            self._beating.cancel()
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
