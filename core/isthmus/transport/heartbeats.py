"""Heartbeats: pings on idle streams, and a timeout for streams without received messages.

A server pings the streams to which it has sent nothing for some time, one group at a time, and the
participants answer. Pings of thousands of idle streams are thus sent in bursts, which cost the
transport far less than the same messages one by one. Every message counts as a heartbeat.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from isthmus.transport.stream import Stream

LOOKS = 8
"""Checks of a stream within a lease."""
QUIET = 2.98 / LOOKS
"""Share of a lease without sent messages after which a ping is sent; just under three checks."""


class Heartbeats:
    """The heartbeats of any number of streams, driven by one timer.

    Guarantees:
      * on a writable stream, something is sent at least twice in each lease;
      * a stream on which nothing is received for a lease times out within an eighth of a lease
        more; time in which no receive is pending, or in which this process did not run, is not
        counted.
    """

    def __init__(self, lease_seconds: float, groups: int = 1) -> None:
        """Streams are checked in `groups`, evenly spaced in time."""
        self.lease_seconds = lease_seconds
        self._groups: list[dict[Stream, asyncio.Timeout]] = [{} for _ in range(groups)]
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def of(self, stream: Stream) -> AsyncIterator[None]:
        """Keep a stream alive and supervise it inside the block, from its first message on.

        Raises:
            TimeoutError: nothing was received for a lease.
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
        if late > self.lease_seconds / LOOKS:  # messages could not be received in that time either
            for stream in itertools.chain(*self._groups):
                stream.silent_since += late
        group = self._groups[self._next]
        self._next = (self._next + 1) % len(self._groups)
        now = time.monotonic()
        for stream, limit in group.items():
            if not stream.is_greeted:
                continue
            if stream.silent_since < now - self.lease_seconds:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())
            elif stream.sent_at < now - self.lease_seconds * QUIET:
                stream.ping()
