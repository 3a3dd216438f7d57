"""Devices that leave the server while others still work at a step of a secure sum."""

from __future__ import annotations

import asyncio
from typing import Any

from isthmus_server.transport.peer import ListenerGroup, ParticipantListener, Peer


class Departures(ParticipantListener):
    """Those who leave, from now until `end`."""

    def __init__(self, listeners: ListenerGroup) -> None:
        self.names: set[str] = set()
        self._listeners = listeners
        self._changed = asyncio.Event()
        listeners.attach(self)

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
        self._changed.clear()
        waiting = asyncio.create_task(self._changed.wait())
        every: set[asyncio.Task[Any]] = {*tasks, waiting}
        try:
            await asyncio.wait(every, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        return {task for task in tasks if not task.done()}
