"""One participant, as the server's end of the link knows it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque

from isthmus.errors import ParticipantLost, UpdateError
from isthmus.identity.tls import Subject
from isthmus.transport.blobs import Assembly, Piece
from isthmus.transport.stream import Stream, to_the_end
from isthmus.wire import link_pb2

MAX_OUTBOX = 64
"""Last words on requests that are kept for one participant: as many as it may have open."""
IN_A_THREAD = 512 << 10
"""Bytes of a chunk from which on it is worth a thread's while to hash and write it."""


@dataclasses.dataclass
class Fetch:
    """A content on its way in from one participant."""

    assembly: Assembly
    done: asyncio.Future[None]
    taking: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """ConstrainedAnswer while a chunk is being written."""

    async def take(self, chunk: link_pb2.Chunk | Piece) -> None:
        """Write the next chunk; returns when its memory is not needed any more."""
        await to_the_end(self._take(chunk))

    async def _take(self, chunk: link_pb2.Chunk | Piece) -> None:
        async with self.taking:
            if self.done.done():
                return
            try:
                if len(chunk.data) < IN_A_THREAD:
                    self.assembly.add(chunk)
                else:
                    await asyncio.to_thread(self.assembly.add, chunk)
                if self.assembly.complete and not self.done.done():
                    self.done.set_result(None)
            except (UpdateError, OSError) as error:
                if not self.done.done():  # it may have been lost meanwhile
                    self.done.set_exception(error)

    async def idle(self) -> None:
        """Return when no chunk is being written."""
        async with self.taking:
            pass


class Peer:
    """One participant, as long as its process lives, across its streams."""

    def __init__(self, hello: link_pb2.Hello, subject: Subject | None = None) -> None:
        self.subject = subject
        """Who its certificate says it is; None without TLS."""
        self.name = hello.name
        self.role = hello.role
        self.instance = hello.instance
        self.stream: Stream | None = None
        self.asked: dict[str, tuple[link_pb2.Request, asyncio.Future[link_pb2.Reply]]] = {}
        self.unacknowledged: set[str] = set()
        """Requests whose reply is in use."""
        self.fetches: dict[bytes, Fetch] = {}
        self.outbox: deque[bytes] = deque(maxlen=MAX_OUTBOX)
        """Last words on its requests (receipts, cancellations), oldest first."""
        self.given = b""
        """Name of the content that was sent to it last, and to the end."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.lease: asyncio.TimerHandle | None = None
        self.fresh = True
        self.serving: asyncio.Task[None] | None = None
        self.refused: str | None = None
        """Why its stream is being cut."""
        self.pumps: dict[bytes, asyncio.Task[None]] = {}
        """Contents on their way to it, on its present stream."""

    def tell(self, message: link_pb2.Envelope) -> None:
        """Say the last word on a request: now, and again on every stream that is opened anew.

        What was sent into a stream that was breaking, or while there was none, is not lost so; a
        participant that has heard it passes over what it hears again.
        """
        data = message.SerializeToString()
        self.outbox.append(data)
        if self.stream is not None:
            self.stream.spawn(self.stream.send_quietly(data))

    def lose(self, reason: str) -> None:
        """Everything that was pending with this participant fails."""
        error = ParticipantLost(reason)
        waiting: list[asyncio.Future[link_pb2.Reply] | asyncio.Future[None]] = [
            future for _, future in self.asked.values()
        ]
        waiting += [fetch.done for fetch in self.fetches.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
