"""The clock of a run: the machine's, or a simulated one."""

from __future__ import annotations

import asyncio
import time

_LONGEST_SLEEP = 60.0
"""Seconds between two reads of the clocks."""


class Clock:
    """A monotonic clock for durations and the wall clock for hours of the day.

    A run can last for months, in which the wall clock may be set or the machine suspended.
    """

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since 1970-01-01 00:00 UTC by the wall clock at the start; never jumps."""
        return self._start + time.monotonic()

    def utc(self) -> float:
        """Seconds since 1970-01-01 00:00 UTC, by the wall clock now."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Return when that many seconds have passed on either clock."""
        monotonic_end = self.now() + seconds
        wall_end = self.utc() + seconds
        await asyncio.sleep(min(seconds, _LONGEST_SLEEP))
        while (left := min(monotonic_end - self.now(), wall_end - self.utc())) > 0:  # noqa: ASYNC110 - clocks send no events
            await asyncio.sleep(min(left, _LONGEST_SLEEP))
