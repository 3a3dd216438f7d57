"""An event loop and a clock whose time passes only while nothing can be done.

Whatever is ready runs first, and takes no time. When everything waits for a timer, the clock jumps
to the earliest. So deadlines, over-selection and buffers behave as with real devices, in the order
of simulated durations, and a simulated hour costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from isthmus_server.rounds.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")

START = 1_704_067_200.0
"""Simulated time at the start of a run: Monday, 2024-01-01 00:00 UTC."""

_RESOLUTION = 1e-6
"""Seconds by which timers may be early: above the rounding of times of years."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time; `asyncio.to_thread` works in the calling thread."""

    def __init__(self) -> None:
        """Start at time 0."""
        self._selector_with_time = _JumpingSelector()
        super().__init__(self._selector_with_time)
        self._clock_resolution = _RESOLUTION

    def run_in_executor(  # type: ignore[override]  # an unused executor, and any arguments
        self, executor: object, work: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        """Run the work at once in the calling thread, which has nothing else to do."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001 - raised by the future
            future.set_exception(error)
        return future

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._selector_with_time.now

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Time stands still within it, while other processes compute what happens now."""
        self._selector_with_time.holds += 1
        try:
            yield
        finally:
            self._selector_with_time.holds -= 1


class _JumpingSelector(selectors.DefaultSelector):
    """Jumps ahead where a selector would wait; signals are still seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.holds = 0
        """Reasons not to jump."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (self.holds and timeout > 0):
            return super().select(None)  # for a signal, or for another process
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now += timeout
        return ready


class VirtualClock(Clock):
    """The clock of a run on a `VirtualTimeLoop`."""

    def __init__(self, elapsed: float = 0.0) -> None:
        """`elapsed` is the simulated time of the run so far, in seconds."""
        self._start = START + elapsed - asyncio.get_running_loop().time()

    def now(self) -> float:
        """Seconds since 1970, UTC."""
        return self._start + asyncio.get_running_loop().time()

    def utc(self) -> float:
        """Seconds since 1970, UTC."""
        return self.now()

    async def sleep(self, seconds: float) -> None:
        """Return when that many simulated seconds have passed."""
        await asyncio.sleep(seconds)
