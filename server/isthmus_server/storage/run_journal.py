"""The journal of a run: its events, and how it ended."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from isthmus.errors import IsthmusError, TakenOver
from isthmus_server.storage.events import (
    Event,
    EventStream,
    ReportedEvent,
    RunFailed,
    RunFinished,
)
from isthmus_server.storage.records import FinalModel
from isthmus_server.storage.store import Store


class RunJournal:
    """Publishes what happens in a run, and stores what its report shows of that."""

    def __init__(self, store: Store, events: EventStream) -> None:
        """`events` passes every event to the run's subscribers."""
        self._store = store
        self._events = events

    def publish(self, event: Event) -> None:
        """Pass an event to all subscribers; one that the report lists is stored first."""
        if isinstance(event, ReportedEvent):
            self._store.log_event(event)
        self._events.publish(event)

    def finish(self, reason: str, *, spent: float = 0.0, final: FinalModel | None = None) -> None:
        """Store and publish that the run has finished.

        Args:
            reason: why it ended.
            spent: its price.
            final: its model; None for a run that trains none.
        """
        self._store.finish("finished", reason, final)
        self.publish(RunFinished(reason=reason, spent=spent, final=final))

    @contextlib.contextmanager
    def failure_noted(self) -> Iterator[None]:
        """Store and publish a failure of the block as the end of the run.

        A cancellation is no failure: the run was stopped, and another process continues it. Nor is
        it one that another server has taken over, and does so already.

        Raises:
            UserError: the block failed; a disk or a database that cannot be used becomes one.
        """
        try:
            yield
        except (IsthmusError, OSError, sqlite3.Error) as error:
            failure = error if isinstance(error, IsthmusError) else self._store.unusable(error)
            if isinstance(failure, TakenOver):
                raise failure from error
            with contextlib.suppress(OSError, sqlite3.Error):  # a full disk cannot store it
                self._store.finish("failed", str(failure), None)
            self.publish(RunFailed(reason=str(failure)))
            raise failure from error
