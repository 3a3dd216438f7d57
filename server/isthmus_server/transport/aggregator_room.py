"""Room for the requests of all jobs to one aggregator, which ends its stream if it has too many."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

VECTORS_AT_ONCE = 24
"""Vectors that one aggregator gets at the same time; each takes a file there. It takes 64 requests
that are not acknowledged, see `isthmus.transport.requests`."""
STEPS_AT_ONCE = 8
"""Sums that are opened, handed over or forgotten at the same time at one aggregator."""


class AggregatorRoom:
    """Places for requests to one aggregator.

    Guarantees:
      * vectors that do not come keep no sum from being opened or handed over;
      * no job has more places for vectors than it leaves free, so that there is one for another.
    """

    def __init__(self) -> None:
        """All places are free."""
        self.steps = asyncio.Semaphore(STEPS_AT_ONCE)
        """Taken to open a sum, have it handed over or forgotten."""
        self._held: Counter[object] = Counter()
        self._waiting: list[tuple[object, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def vector(self, job: object) -> AsyncIterator[None]:
        """Wait for a place for a vector of a job, and have it for the block."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, admitted))
        self._admit()
        try:
            await admitted
            yield
        finally:
            if not admitted.cancelled():
                self._held[job] -= 1
                if not self._held[job]:
                    del self._held[job]
            self._admit()

    def _admit(self) -> None:
        """Give places to those that wait, the first ones first."""
        waiting = self._waiting
        self._waiting = []
        for job, admitted in waiting:
            if admitted.done():  # it does not wait any more
                continue
            if self._held[job] < VECTORS_AT_ONCE - self._held.total():
                self._held[job] += 1
                admitted.set_result(None)
            else:
                self._waiting.append((job, admitted))
