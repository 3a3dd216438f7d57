"""Threads for calls of sources and stores, which may hang: none keeps the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class OwnThread(Generic[T]):
    """A thread that runs one thing, and that the event loop may leave behind."""

    def __init__(self, work: Callable[[], T], named: str) -> None:
        """Start it; `work` is what it runs, and `named` its name."""
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[T] = loop.create_future()
        """What the work returns, or raises. It may be cancelled, which the work does not notice."""

        def finish(result: Sequence[T], error: BaseException | None) -> None:
            if self.done.done():
                return
            if error is None:
                self.done.set_result(result[0])
            else:
                self.done.set_exception(error)

        def run() -> None:
            result: list[T] = []
            error: BaseException | None = None
            try:
                result.append(work())
            except BaseException as raised:  # noqa: BLE001 - it is raised where it is awaited
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(finish, result, error)

        self.thread = threading.Thread(target=run, name=named, daemon=True)
        self.thread.start()


async def in_own_thread(work: Callable[[], T], named: str = "store") -> T:
    """What something returns that runs in a thread of its own; see `OwnThread`."""
    return await OwnThread(work, named).done
