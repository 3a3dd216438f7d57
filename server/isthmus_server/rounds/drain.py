"""End a run between its attempts, as the first SIGTERM does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

_Held = TypeVar("_Held")


class Drain:
    """Ends a run without interrupting its running attempt, as the first SIGTERM does.

    The run's task is cancelled at once if it only waits, and else after the attempt: nothing new
    begins.
    """

    def __init__(self) -> None:
        self._requested = False
        self._held = False
        self._task: asyncio.Task[object] | None = None

    def begin(self) -> None:
        """From now on `request` is for the current task."""
        self.check()
        self._task = asyncio.current_task()

    def request(self) -> None:
        """End the run now, or after the attempt that is running."""
        self._requested = True
        if self._task is not None and not self._held:
            self._task.cancel()

    def check(self) -> None:
        """End the run here if that was requested.

        Raises:
            CancelledError: it was.
        """
        if self._requested:
            raise asyncio.CancelledError

    def hold(self) -> None:
        """From now on the run is not interrupted."""
        self._held = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Do not interrupt the run inside the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextlib.asynccontextmanager
    async def during(
        self, turn: contextlib.AbstractAsyncContextManager[_Held]
    ) -> AsyncIterator[_Held]:
        """Interrupt the run while it waits for a turn, and not inside the block."""
        async with contextlib.AsyncExitStack() as entered:
            self.check()
            self._held = False
            held = await entered.enter_async_context(turn)
            self._held = True
            yield held
