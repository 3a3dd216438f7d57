"""What `isthmus simulate` says besides the rounds: how devices train, and the time that is left."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from rich.console import Console

from isthmus.job import Job
from isthmus_server.read.report.durations import duration
from isthmus_server.rounds.clock import Clock
from isthmus_server.storage.events import Event, RoundCommitted
from isthmus_simulation.devices.fleet import VirtualFleet

_INTERVAL = 10.0
"""Seconds of real time between two estimates."""

_MOST_ERRORS = 1000
"""Different errors of devices of which it is known that they were logged."""


@contextlib.contextmanager
def errors_of_devices_once() -> Iterator[None]:
    """Log each error of devices once during the block: all of them may fail in the same way."""

    class New(logging.Filter):
        def __init__(self) -> None:
            super().__init__()
            self._texts: set[str] = set()

        def filter(self, record: logging.LogRecord) -> bool:
            if record.levelno < logging.ERROR or not record.name.startswith("isthmus_clients"):
                return True
            text = record.getMessage()
            is_new = text not in self._texts
            if len(self._texts) < _MOST_ERRORS:
                self._texts.add(text)
            return is_new

    added = [(handler, New()) for handler in logging.getLogger().handlers]
    for handler, errors in added:
        handler.addFilter(errors)
    try:
        yield
    finally:
        for handler, errors in added:
            handler.removeFilter(errors)


class SimulationProgress:
    """Prints how devices train, when that is decided, and now and then the time that is left."""

    def __init__(self, console: Console, job: Job, fleet: VirtualFleet, clock: Clock) -> None:
        """Set up; call it with each event."""
        self._console = console
        self._job = job
        self._fleet = fleet
        self._clock = clock
        self._began = self._said = time.monotonic()
        self._simulated_from = clock.now()
        self._rounds = 0
        self._training_said = ""

    def __call__(self, event: Event) -> None:
        """Count rounds; print what is new."""
        if not isinstance(event, RoundCommitted):
            return
        self._rounds += 1
        run = self._fleet.run
        if run is not None and run.decided and run.in_words != self._training_said:
            self._training_said = run.in_words
            self._console.print(f"devices train {run.in_words}", soft_wrap=True)
        now = time.monotonic()
        left = self._job.rounds - event.record.round
        if now - self._said >= _INTERVAL and left:
            self._said = now
            seconds = (now - self._began) / self._rounds
            self._console.print(
                f"{seconds:.3g} s per round; rounds left: {left}, about {duration(seconds * left)}",
                soft_wrap=True,
            )

    def end(self) -> None:
        """Print the totals."""
        if not self._rounds:
            self._console.print("no round was left to simulate")
            return
        simulated = self._clock.now() - self._simulated_from
        self._console.print(
            f"simulated {self._fleet.count:,} devices for {duration(simulated)} in "
            f"{duration(time.monotonic() - self._began)}",
            soft_wrap=True,
        )
