"""Ask an event loop from another thread, and measure how late it is."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

_T = TypeVar("_T")

INTERVAL = 0.5
"""Seconds between two measurements of the lag."""

WINDOW = 60.0
"""Seconds for which a measurement counts."""

ANSWER_SECONDS = 5.0
"""Time for the loop to answer a question."""


class LoopNotAnswering(Exception):
    """The event loop is busy or has ended."""


class LoopObserver:
    """Observes one event loop; `run` is a task in it, the other methods are for other threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Observe the running loop; `clock` returns seconds."""
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._due = clock() + INTERVAL
        self._delays: deque[tuple[float, float]] = deque()
        """When measured, and the delay, of the last `WINDOW` seconds."""

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._due = self._clock() + INTERVAL
            await asyncio.sleep(INTERVAL)
            now = self._clock()
            self._delays.append((now, max(0.0, now - self._due)))
            while self._delays[0][0] < now - WINDOW:
                self._delays.popleft()

    def lag(self) -> float:
        """The longest delay of the last minute, one that lasts included, in seconds."""
        now = self._clock()
        return max(0.0, now - self._due, *(delay for _, delay in self._delays.copy()))

    def ask(self, question: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine in the loop, and return what it returns.

        Raises:
            LoopNotAnswering: the loop did not run it in time.
        """
        if self._loop.is_closed():
            raise LoopNotAnswering("the event loop has ended")
        future = asyncio.run_coroutine_threadsafe(question(), self._loop)
        try:
            return future.result(ANSWER_SECONDS)
        except (TimeoutError, CancelledError):
            future.cancel()
            raise LoopNotAnswering(
                f"the event loop did not answer within {ANSWER_SECONDS:g} s"
            ) from None
