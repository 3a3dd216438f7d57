"""Devices that leave the server while others still work at a step of a secure sum."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from isthmus_server.transport.peer import ListenerGroup, ParticipantListener, Peer


class Departures(ParticipantListener):
    """Names of the devices that leave, from now until `end`."""

    def __init__(self, listeners: ListenerGroup, tasks: Collection[asyncio.Task[None]]) -> None:
        """`tasks` are those of the step."""
        self.names: set[str] = set()
        self._listeners = listeners
        self._changed = asyncio.Event()
        # Once for each task: a wait for all that are left, whenever one has ended, would take time
        # by the square of their number.
        for task in tasks:
            task.add_done_callback(self._ended)
        listeners.attach(self)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._changed.set()

    def end(self) -> None:
        """Notice nothing more."""
        self._listeners.detach(self)

    def left(self, peer: Peer, reason: str) -> None:
        """See `ParticipantListener.left`."""
        self.names.add(peer.name)
        self._changed.set()

    async def or_finished(
        self, tasks: set[asyncio.Task[None]], seconds: float
    ) -> set[asyncio.Task[None]]:
        """Wait until a task has ended or somebody has left; returns the tasks that have not ended.

        It also ends after so many seconds.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()
        return {task for task in tasks if not task.done()}
