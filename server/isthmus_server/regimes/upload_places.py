"""Places for the results that are received at the same time: each takes a file.

    places = UploadPlaces(context.link, least_rate=job.time.least_rate)
    async with places.place(name):
        ...  # fetch the result of this device
    places.waiting  # those that have replied, and for whom there is no place

A device that has replied and waits for a place is not slow: the server is not ready for it. So
nothing that waits here counts as late, and nobody keeps a place without use: a transfer that does
not move ends by itself (`Peer.fetch`), and one below the least rate when another device waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from isthmus.errors import TransferStalled
from isthmus.transport.transfer_time import TransferTime

if TYPE_CHECKING:
    from isthmus_server.transport.link import Link

UPLOADS_AT_ONCE = 8
"""Results received at the same time; each takes a file, not memory."""

NO_PLACE = "the server had no place to receive its result in time"
"""Reason for leaving out a device that has waited for a place."""

_LOOK_SECONDS = 5.0
"""Interval in which one that waits looks for a place that is not used."""


@dataclasses.dataclass(eq=False)
class _Held:
    """A place that a device has."""

    limit: asyncio.Timeout
    since: float
    """In monotonic seconds."""
    moved: int
    """Bytes that had moved to and from the device before."""


class UploadPlaces:
    """The places of one attempt.

    Guarantees:
      * at most `UPLOADS_AT_ONCE` devices have one;
      * while others wait, none is kept longer than a pause and the time of what has moved at the
        least rate.
    """

    def __init__(self, link: Link, *, least_rate: float) -> None:
        """All places are free; `least_rate` is in bytes per second."""
        self._link = link
        self._least_rate = least_rate
        self._free = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self._held: dict[str, _Held] = {}
        self.waiting: set[str] = set()
        """Devices that wait for a place."""
        self.waited: dict[str, float] = {}
        """Seconds that each device has waited for its place."""

    @contextlib.asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        """Wait for a place, and have it for the block.

        Raises:
            TransferStalled: others wait, and the result comes below the least rate.
        """
        begun = time.monotonic()
        self.waiting.add(name)
        try:
            await self._acquired()
        finally:
            self.waiting.discard(name)
            self.waited[name] = time.monotonic() - begun
        try:
            async with asyncio.timeout(None) as limit:
                self._held[name] = _Held(limit, time.monotonic(), self._moved(name))
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
            self._free.release()

    async def _acquired(self) -> None:
        """Take a place; one that is not used is freed for it."""
        if not self._free.locked():
            await self._free.acquire()
            return
        taking = asyncio.ensure_future(self._free.acquire())
        try:
            while not (await asyncio.wait([taking], timeout=_LOOK_SECONDS))[0]:
                self._free_unused()
        except asyncio.CancelledError:
            if not taking.cancel() and not taking.cancelled():
                self._free.release()
            raise

    def _free_unused(self) -> None:
        now = time.monotonic()
        for name, held in list(self._held.items()):
            peer = self._link.peers.get(name)
            if peer is None:
                continue
            if peer.place is not None and not peer.place.is_sending:
                # It waits for its aggregator's other devices, and its time begins when it is asked.
                held.since = now
                held.moved = self._moved(name)
                continue
            # Without a transfer the server is at work itself.
            if peer.place is None and not peer.fetches:
                continue
            moved = self._moved(name) - held.moved
            if now - held.since > TransferTime.LONGEST_PAUSE + moved / self._least_rate:
                del self._held[name]  # once: its transfer takes a while to end
                held.limit.reschedule(asyncio.get_running_loop().time())

    def _moved(self, name: str) -> int:
        peer = self._link.peers.get(name)
        return 0 if peer is None else peer.transfer_time.advanced
