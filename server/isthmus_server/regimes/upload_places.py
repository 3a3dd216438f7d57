"""Places for the results that are received at the same time: each takes a file.

    places = UploadPlaces(context.link, least_rate=job.time.least_rate)
    async with places.place(name):
        ...  # fetch the result of this device
    places.has_lacked(name)  # the round is over: was it for want of a place?

A device that has replied and waits for a place is not slow: the server is not ready for it, or its
aggregator is not. So it is not late when the round's time is over. And nobody keeps a place without
use: a transfer that does not move ends by itself (`Peer.fetch`), and one below the least rate when
another device waits for the place.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from isthmus.errors import TransferStalled
from isthmus.transport.transfer_time import TransferTime

if TYPE_CHECKING:
    from isthmus_server.transport.link import Link

UPLOADS_AT_ONCE = 8
"""Results received at the same time by the server itself; each takes a file, not memory."""

NO_PLACE = "there was no place to receive its result in time"
"""Reason for leaving out a device that has waited for a place."""

_LOOK_SECONDS = 5.0
"""Interval in which one that waits looks for a place that is not used."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    """A place that a device has."""

    room: object
    """Where it is."""
    is_coming: Callable[[], bool]
    """Whether some of the result is still to come, so that the device is at work."""
    limit: asyncio.Timeout
    since: float
    """In monotonic seconds."""
    moved: int
    """Bytes that had moved to and from the device before."""


class UploadPlaces:
    """The places of one attempt: at the server, and in the rooms of aggregators.

    Guarantees:
      * at most `UPLOADS_AT_ONCE` devices have one at the server;
      * while others of the attempt wait for one in the same room, none is kept longer than a pause
        and the time of what has moved at the least rate;
      * a device that waits for a place at the end, or has waited for it longer than it has had it,
        has lacked one.
    """

    def __init__(self, link: Link, *, least_rate: float) -> None:
        """All places are free; `least_rate` is in bytes per second."""
        self._link = link
        self._least_rate = least_rate
        self._free = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self._held: dict[str, _Held] = {}
        self._waiting: set[str] = set()
        self.waited: dict[str, float] = {}
        """Seconds that each device has waited for its place."""

    @contextlib.asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        """Wait for a place at the server, and have it for the block.

        Raises:
            TransferStalled: others wait, and the result comes below the least rate.
        """
        async with (
            contextlib.AsyncExitStack() as stack,
            self.held(
                name,
                stack.enter_async_context(self._free),
                room=self._free,
                is_coming=lambda: self._is_fetched(name),
            ),
        ):
            yield

    @contextlib.asynccontextmanager
    async def held(
        self,
        name: str,
        taking: Awaitable[object],
        *,
        room: object,
        is_coming: Callable[[], bool],
    ) -> AsyncIterator[None]:
        """Wait for a place in a room, and have it for the block; the caller leaves the room.

        Args:
            name: the device.
            taking: ends when it has a place.
            room: where others wait for the same places.
            is_coming: whether some of the result is still to come.

        Raises:
            TransferStalled: others wait, and the result comes below the least rate.
        """
        with self.waits(name), self._looking(room):
            await taking
        try:
            async with asyncio.timeout(None) as limit:
                moved = self._moved(name)
                self._held[name] = _Held(room, is_coming, limit, time.monotonic(), moved)
                yield
        except TimeoutError:
            if not limit.expired():
                raise  # of another origin, such as a network file system
            raise TransferStalled(
                f"its result came at less than {self._least_rate:g} bytes per second "
                "(time.least_rate) while others waited for its place"
            ) from None
        finally:
            self._held.pop(name, None)

    @contextlib.contextmanager
    def waits(self, name: str) -> Iterator[None]:
        """A device is ready in the block, and what is to receive its result is not."""
        begun = time.monotonic()
        self._waiting.add(name)
        try:
            yield
        finally:
            self._waiting.discard(name)
            self.waited[name] = self.waited.get(name, 0.0) + time.monotonic() - begun

    @contextlib.contextmanager
    def _looking(self, room: object) -> Iterator[None]:
        """Free what is not used in a room, now and then in the block."""
        loop = asyncio.get_running_loop()
        handle: asyncio.TimerHandle

        def look() -> None:
            nonlocal handle
            self._free_unused(room)
            handle = loop.call_later(_LOOK_SECONDS, look)

        handle = loop.call_later(_LOOK_SECONDS, look)
        try:
            yield
        finally:
            handle.cancel()

    def has_lacked(self, name: str) -> bool:
        """Whether a device whose result is not here was ready, and had no place in time."""
        if name in self._waiting:
            return True
        held = self._held.get(name)
        return held is not None and self.waited[name] > time.monotonic() - held.since

    def _free_unused(self, room: object) -> None:
        now = time.monotonic()
        for name, held in list(self._held.items()):
            # One whose result is here waits for the server or its aggregator to add it.
            if held.room is not room or not held.is_coming():
                continue
            moved = self._moved(name) - held.moved
            if now - held.since > TransferTime.LONGEST_PAUSE + moved / self._least_rate:
                del self._held[name]  # once: its transfer takes a while to end
                held.limit.reschedule(asyncio.get_running_loop().time())

    def _is_fetched(self, name: str) -> bool:
        peer = self._link.peers.get(name)
        return peer is not None and bool(peer.fetches)

    def _moved(self, name: str) -> int:
        peer = self._link.peers.get(name)
        return 0 if peer is None else peer.transfer_time.advanced
