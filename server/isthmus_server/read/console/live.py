"""Live updates: one poller per run, shared by all browsers, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from isthmus.errors import UserError

POLL_SECONDS = 0.5
"""Interval in which a log is asked for its version."""

HEARTBEAT_SECONDS = 15.0
"""A comment is sent this often, so that broken connections are noticed."""

CONNECTION_SECONDS = 600.0
"""After that a browser connects anew, and is checked anew."""

MAX_STREAMS = 64
"""Open streams of all browsers together."""

RETRY_MILLISECONDS = 1000

log = logging.getLogger(__name__)

ReadVersion = Callable[[str], Awaitable[str]]
"""Returns the version of a run, or without a name of the queue."""


class _Poller:
    """Follows the version of one run while somebody listens."""

    def __init__(self) -> None:
        self.listeners = 0
        self.version = ""
        self.news = asyncio.Event()
        """Set, and replaced by another one, when the version has changed."""
        self.task: asyncio.Task[None] | None = None


class LiveUpdates:
    """Tells browsers that something was committed.

    Guarantees:
      * a run is polled by at most one task, and only while a browser shows it;
      * the number of streams is bounded.
    """

    def __init__(self, read_version: ReadVersion) -> None:
        """`read_version` reads the version of a run."""
        self._read = read_version
        self._pollers: dict[str, _Poller] = {}
        self.streams = 0
        self.reads = 0
        """Versions that were read so far."""
        self._ended = False

    @property
    def full(self) -> bool:
        """Whether no more streams are admitted."""
        return self.streams >= MAX_STREAMS

    def end(self) -> None:
        """End all streams, and begin none."""
        self._ended = True
        for poller in self._pollers.values():
            poller.news.set()

    async def stream(self, name: str) -> AsyncIterator[str]:
        """Server-sent events: the version of a run now, and after each change.

        The id of an event is the version. A page that shows another one loads itself anew, so
        nothing is missed between two connections, or while the console was not running.
        """
        self.streams += 1
        try:
            poller = self._pollers.setdefault(name, _Poller())
            poller.listeners += 1
            try:
                if poller.task is None:
                    poller.task = asyncio.create_task(self._poll(name, poller))
                async for text in self._events(poller):
                    yield text
            finally:
                poller.listeners -= 1
                if not poller.listeners:
                    if poller.task is not None:
                        poller.task.cancel()
                    if self._pollers.get(name) is poller:
                        del self._pollers[name]
        finally:
            self.streams -= 1

    async def _poll(self, name: str, poller: _Poller) -> None:
        while True:
            try:
                version = await self._read(name)
                self.reads += 1
            except (KeyError, UserError, OSError, sqlite3.Error):
                log.debug("the version of %r cannot be read", name, exc_info=True)
                version = poller.version
            if version != poller.version:
                poller.version = version
                poller.news.set()
                poller.news = asyncio.Event()
            await asyncio.sleep(POLL_SECONDS)

    async def _events(self, poller: _Poller) -> AsyncIterator[str]:
        yield f"retry: {RETRY_MILLISECONDS}\n\n"
        sent = ""
        until = time.monotonic() + CONNECTION_SECONDS
        while time.monotonic() < until and not self._ended:
            news = poller.news
            if poller.version != sent:
                sent = poller.version
                yield f"id: {sent}\nevent: version\ndata: {sent}\n\n"
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await news.wait()
            except TimeoutError:
                yield ": still here\n\n"
