"""The time a run goes by: the machine's, or one that a simulation moves."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Wall time. A subclass may count another one, as long as it never goes back."""

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since 1970-01-01 00:00 UTC."""
        return self._start + time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return when so many seconds have gone by."""
        await asyncio.sleep(seconds)
