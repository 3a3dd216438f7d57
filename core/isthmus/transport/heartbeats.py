"""Heartbeats: streams on which nothing happens say that they are there, and are missed if not.

A server pings whoever it has sent nothing to for a while, a whole group at a time, and who is
pinged answers: so what thousands of idle streams cost comes in bursts, which the transport bears
far better than the same messages one by one. Any message is as good as a ping.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from isthmus.transport.stream import Stream

LOOKS = 8
"""Times in a lease that a stream is looked after."""
QUIET = 2.98 / LOOKS
"""Of a lease that nothing was sent, after which a ping is; a bit less than three looks."""


class Heartbeats:
    """The heartbeats of any number of streams, with one timer for all.

    Guarantees:
      * on a stream that can be written to, something is sent at least twice in each lease;
      * one on which nothing comes for a lease is given up within an eighth of a lease more; time
        does not count in which nobody waits for a message, or this process came to nothing.
    """

    def __init__(self, lease_seconds: float, groups: int = 1) -> None:
        """Streams are looked after in so many `groups`, evenly in time."""
        self.lease_seconds = lease_seconds
        self._groups: list[dict[Stream, asyncio.Timeout]] = [{} for _ in range(groups)]
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def of(self, stream: Stream) -> AsyncIterator[None]:
        """Look after a stream while the block lasts.

        Raises:
            TimeoutError: nothing came for a lease.
        """
        group = min(self._groups, key=len)
        async with asyncio.timeout(None) as limit:
            group[stream] = limit
            if self._timer is None:
                self._wait()
            try:
                yield
            finally:
                del group[stream]

    def _wait(self) -> None:
        pause = self.lease_seconds / LOOKS / len(self._groups)
        self._timer = asyncio.get_running_loop().call_later(
            pause, self._tick, time.monotonic() + pause
        )

    def _tick(self, due: float) -> None:
        self._timer = None
        if not any(self._groups):
            return
        self._wait()
        late = time.monotonic() - due
        if late > self.lease_seconds / LOOKS:  # what came meanwhile could not be read either
            for stream in itertools.chain(*self._groups):
                stream.silent_since += late
        group = self._groups[self._next]
        self._next = (self._next + 1) % len(self._groups)
        now = time.monotonic()
        for stream, limit in group.items():
            if stream.silent_since < now - self.lease_seconds:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())
            elif stream.sent_at < now - self.lease_seconds * QUIET:
                stream.ping()
