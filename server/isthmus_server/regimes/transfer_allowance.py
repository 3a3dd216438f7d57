"""More time for participants whose blobs are on their way: a transfer that moves is not ended.

A limit in seconds is for the work of participants. The time in which a participant's model or
result moves is added to it, but no more than the bytes take at the job's `time.least_rate`: what
moves slower uses up the limit, and what does not move at all has none of it. Bytes that a
participant asks for or sends again add nothing, so that nobody holds a round open with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from isthmus.transport.transfer_time import TransferTime

if TYPE_CHECKING:
    from isthmus_server.transport.link import Link

_LOOK_SECONDS = 0.05
"""Before the end of a limit at which it is looked whether it is extended."""


_IN_FLIGHT_BYTES = 1 << 20
"""Most bytes that are sent and not received yet: gRPC's windows and the buffers of sockets."""

_SHORTEST_SECONDS = 1.0
"""Time of transfers below which no limit is extended, as on fast links."""


class TransferAllowance:
    """The time that transfers have taken since this was made, for each participant."""

    def __init__(self, link: Link, names: Collection[str], least_rate: float) -> None:
        """Begin to count, for these participants; `least_rate` is in bytes per second."""
        self._link = link
        self._least_rate = least_rate
        self._before: dict[str, tuple[TransferTime, float, int, int]] = {}
        for name in names:
            if (peer := link.peers.get(name)) is not None:
                moved = peer.transfer_time
                self._before[name] = (moved, moved.seconds, moved.count, moved.advanced)

    def seconds(self, name: str, now: float) -> float:
        """Time to add to the limit of a participant; `now` is in monotonic seconds."""
        peer = self._link.peers.get(name)
        if peer is None:
            return 0.0
        moved = peer.transfer_time
        of, seconds, count, advanced = self._before.get(name, (moved, 0.0, 0, 0))
        if of is not moved:  # another process of this name
            seconds = 0.0
            count = advanced = 0
        count = moved.count - count
        seconds = moved.seconds - seconds
        advanced = moved.advanced - advanced
        if not count:
            return 0.0
        # The next chunk may be on its way; and after the last one, what is in buffers between.
        pause = TransferTime.LONGEST_PAUSE
        if not peer.is_moving:
            pause = min(pause, _IN_FLIGHT_BYTES * seconds / count)
        if now - moved.moved_at < pause:
            seconds += pause
        added = min(seconds, advanced / self._least_rate)
        return added if added >= _SHORTEST_SECONDS else 0.0

    def end(self, base: float, names: Collection[str]) -> float:
        """When a limit that ends at `base` (loop time) ends for the last of these participants."""
        now = time.monotonic()
        return base + max((self.seconds(name, now) for name in names), default=0.0)

    @contextlib.contextmanager
    def extending(
        self,
        limit: asyncio.Timeout,
        names: Callable[[], Collection[str]],
        later: Callable[[], float] | None = None,
    ) -> Iterator[None]:
        """Put off the end of a running limit in the block, by moving transfers and by `later`.

        A limit that is set to an earlier time in the block stays there.

        Args:
            limit: that runs.
            names: the participants whose transfers count.
            later: by how many seconds the limit ends later without any transfer; None for none.
        """
        loop = asyncio.get_running_loop()
        base = limit.when()
        if base is None or (self._least_rate == math.inf and later is None):
            yield
            return
        expected = base
        handle: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal handle, expected
            if limit.expired() or limit.when() != expected:
                return
            begins_later = 0.0 if later is None else later()
            expected = max(expected, self.end(base + begins_later, names()))
            limit.reschedule(expected)
            if expected > loop.time() + _LOOK_SECONDS:
                handle = loop.call_at(expected - _LOOK_SECONDS, look)

        handle = loop.call_at(base - _LOOK_SECONDS, look)
        try:
            yield
        finally:
            assert handle is not None
            handle.cancel()
