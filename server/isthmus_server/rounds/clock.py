"""The time a run goes by: the machine's, or one that a simulation moves."""

from __future__ import annotations

import asyncio
import time

_LONGEST_SLEEP = 60.0
"""Between two looks at what clocks show."""


class Clock:
    """Wall time, in two: what durations are counted by never jumps, and hours go by what does.

    A run lasts for months; meanwhile somebody sets the machine's clock, or the machine sleeps.
    """

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since 1970-01-01 00:00 UTC, if the clock was right at the start; goes evenly."""
        return self._start + time.monotonic()

    def utc(self) -> float:
        """Seconds since 1970-01-01 00:00 UTC, as the machine's clock shows them now."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Return when so many seconds have gone by, or clocks show that they have."""
        even, shown = self.now() + seconds, self.utc() + seconds
        await asyncio.sleep(min(seconds, _LONGEST_SLEEP))
        while (left := min(even - self.now(), shown - self.utc())) > 0:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(min(left, _LONGEST_SLEEP))
