"""One commit for entries that several tasks store at the same time.

The sums of a round's groups reach the same steps together, and each waits until its entry is on
disk. A commit flushes two files to the disk, so that twelve groups would wait for twelve of them.
Databases do the same for concurrent transactions, under this name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class GroupCommit(Generic[Entry]):
    """Stores entries together that are added in the same turn of the event loop."""

    def __init__(self, store: Callable[..., None]) -> None:
        """`store` takes entries as its arguments, and stores all of them or none."""
        self._store = store
        self._entries: list[Entry] = []
        self._commit: asyncio.Task[None] | None = None

    async def add(self, entry: Entry) -> None:
        """Store an entry; it is on disk when this returns.

        A caller that is cancelled meanwhile may have stored its entry.

        Raises:
            Exception: what `store` raises, to each caller whose entry was in that commit.
        """
        self._entries.append(entry)
        if self._commit is None:
            self._commit = asyncio.create_task(self._store_all())
        # The commit is also that of others, which this one's cancellation must not end.
        await asyncio.shield(self._commit)

    async def _store_all(self) -> None:
        await asyncio.sleep(0)  # the tasks that are ready in this turn add theirs
        entries = self._entries
        self._entries = []
        self._commit = None
        self._store(*entries)
