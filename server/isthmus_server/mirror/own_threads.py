"""Threads for calls of stores, which may hang: none keeps the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T]) -> T:
    """Run something in a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: Sequence[T], error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result[0])
        else:
            done.set_exception(error)

    def run() -> None:
        result: list[T] = []
        error: BaseException | None = None
        try:
            result.append(work())
        except BaseException as raised:  # noqa: BLE001 - it is raised where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return await done
