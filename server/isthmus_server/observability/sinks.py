"""Pass the events of a run to sinks that can neither delay nor end it."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from isthmus.printable import in_a_line
from isthmus_server.storage.events import (
    Event,
    EventStream,
    ParticipantProgress,
    WaitingForParticipants,
)

CAPACITY = 1000
"""Events that wait for a sink at most."""

_SILENT_SECONDS = 2.0
"""Time for sinks to end before somebody is told what is waited for."""

_REPEATED = (ParticipantProgress, WaitingForParticipants)
"""Events that a later one replaces: the first to be dropped."""

log = logging.getLogger(__name__)


class EventSink(ABC):
    """Receives the events of one run, in order, in a thread of its own."""

    name: str
    """One word, for warnings and the label `sink` of metrics."""
    hang_seconds = 30.0
    """Seconds with one event after which the sink is given up."""
    close_seconds = 10.0
    """Time to handle the last events when the run ends."""

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """Handle an event."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Finish after the last event: called once, in the same thread."""


class SinkThread:
    """Runs a sink in a daemon thread; subscribe it to an `EventStream`.

    Guarantees:
      * to publish an event never waits for the sink;
      * at most `capacity` events are kept for it, and what it loses is counted in `dropped`;
      * a sink that raises, or is busy with one event for too long, is given up; there is one
        warning for a sink, whatever happens to it.
    """

    def __init__(
        self,
        sink: EventSink,
        *,
        capacity: int = CAPACITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread; `clock` returns seconds."""
        self.name = sink.name
        self.dropped = 0
        """Events that the sink did not receive."""
        self.given_up = ""
        """Why it receives no more events; empty while it does."""
        self._sink = sink
        self._capacity = capacity
        self._clock = clock
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._busy_since: float | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue an event; it is dropped if the sink is given up or too far behind."""
        with self._changed:
            since = self._busy_since
            longest = self._sink.hang_seconds
            if since is not None and self._clock() - since > longest:
                self._give_up(f"it was busy with one event for {longest:g} s")
            room = self._capacity // 2 if isinstance(event, _REPEATED) else self._capacity
            if self.given_up or len(self._waiting) >= room:
                self.dropped += 1
                return
            self._waiting.append(event)
            self._changed.notify()

    @property
    def close_seconds(self) -> float:
        """See `EventSink.close_seconds`."""
        return self._sink.close_seconds

    def close(self) -> None:
        """Let the sink handle what is queued and end, for at most its `close_seconds`."""
        seconds = self._sink.close_seconds
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self.given_up:
            self._thread.join(seconds)
        with self._changed:
            if self._thread.is_alive():
                self._give_up(f"it did not end within {seconds:g} s")
            elif self.dropped and not self.given_up:
                self.given_up = "it was too slow"
                log.warning(
                    "the sink %r was too slow: it missed %d events", self.name, self.dropped
                )

    def _run(self) -> None:
        try:
            while (event := self._next()) is not None:
                self._sink(event)
            self._sink.close()
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the run goes on
            with self._changed:
                self._give_up(f"it failed: {type(error).__name__}: {_printable(error)}")

    def _next(self) -> Event | None:
        """Wait for the next event; None after the last one."""
        with self._changed:
            self._busy_since = None
            while not self._waiting and not self._closing and not self.given_up:
                self._changed.wait()
            self._busy_since = self._clock()
            return self._waiting.popleft() if self._waiting else None

    def _give_up(self, reason: str) -> None:
        """Stop using the sink, with one warning; the condition is held."""
        if self.given_up:
            return
        self.given_up = reason
        self.dropped += len(self._waiting)
        self._waiting.clear()
        self._changed.notify()
        log.warning("the sink %r receives no more events of this run: %s", self.name, reason)


def _printable(error: BaseException) -> str:
    """The message of an error in one line, without the user and password of a URL.

    >>> _printable(OSError("no answer from http://me:secret@tracker.example/api"))
    'no answer from http://...@tracker.example/api'
    """
    return in_a_line(re.sub(r"//[^/@\s]+@", "//...@", str(error)))


@asynccontextmanager
async def sinks_of(
    events: EventStream,
    sinks: Sequence[EventSink],
    later: Callable[[Coroutine[Any, Any, None]], None] | None = None,
) -> AsyncIterator[tuple[SinkThread, ...]]:
    """Pass the events of a run to sinks during the block; waits for them at its end.

    `later` is given that wait, if the block is not to have it.
    """
    threads = tuple(SinkThread(sink) for sink in sinks)
    leave = [events.subscribe(thread) for thread in threads]
    try:
        yield threads
    finally:
        for unsubscribe in leave:
            unsubscribe()
        if later is None:
            await _end_of(threads)
        else:
            later(_end_of(threads))


async def _end_of(threads: Sequence[SinkThread]) -> None:
    """Wait until sinks have handled what is queued, each for at most its `close_seconds`."""
    # In threads, because the loop also serves other runs.
    closing = {asyncio.create_task(asyncio.to_thread(each.close)): each for each in threads}
    if not closing:
        return
    _, slow = await asyncio.wait(closing, timeout=_SILENT_SECONDS)
    for task in slow:
        log.warning(
            "a run has ended, and its sink %r has not: it gets up to %g s to handle what is left",
            closing[task].name,
            closing[task].close_seconds,
        )
    await asyncio.gather(*closing)
