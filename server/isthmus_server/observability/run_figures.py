"""The figures of one run that its metrics show, kept up to date by its events."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from isthmus.job import Job
from isthmus_server.observability.sinks import EventSink
from isthmus_server.storage.events import (
    Event,
    JobEnded,
    ModelsCompared,
    ParticipantDeclined,
    ParticipantJoined,
    ParticipantLeft,
    ParticipantReady,
    Paused,
    RoundAttemptFailed,
    RoundCommitted,
    RoundPlanned,
    RunFailed,
    RunFinished,
    WaitingForParticipants,
)
from isthmus_server.storage.records import (
    AttemptRecord,
    ComparisonRecord,
    EndedAttempt,
    RoundRecord,
)

ROUND_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper ends of the buckets of `isthmus_round_seconds`."""

OUTCOMES = ("accepted", "rejected", "dropped", "late")
"""Outcomes of receipts; `late` are those that were dropped while they were at work."""


class RunFigures(EventSink):
    """Figures of one run. It is an event sink; its figures are read by another thread.

    Guarantees:
      * an attempt is counted once, whether it was read from the log or came as an event;
      * names of participants are only used to count them.
    """

    name = "prometheus"

    def __init__(
        self,
        label: str,
        job: Job,
        earlier: Callable[[], Iterable[EndedAttempt]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin without figures.

        Args:
            label: value of the label `job`.
            job: the job, for its limits.
            earlier: reads the attempts that ended before; called in the sink's thread.
            clock: returns Unix seconds.
        """
        self.label = label
        self.job = job
        self.lock = threading.Lock()
        """Held while figures change."""
        self.rounds: Counter[str] = Counter()
        """Committed rounds by regime."""
        self.failed_attempts = 0
        self.last_round = 0
        self.seconds = [0] * (len(ROUND_SECONDS) + 1)
        """Committed rounds by the bucket of their duration; the last one has no end."""
        self.seconds_sum = 0.0
        self.receipts: Counter[str] = Counter()
        self.bytes_up = 0
        self.bytes_down = 0
        self.spent = 0.0
        self.epsilon: float | None = None
        self.profile: dict[str, float] = {}
        """The datacenters' figures in the last round that they took part in."""
        self.committed_at: float | None = None
        """When the newest checkpoint was committed, in Unix seconds."""
        self.invited = 0
        """Participants of the attempt under way; 0 between attempts."""
        self.waiting = False
        """The run waits for participants, or because of its policy or a limit."""
        self.ended = False
        self._ready: set[str] = set()
        self._declined: set[str] = set()
        self._earlier: Callable[[], Iterable[EndedAttempt]] | None = earlier
        self._compared: set[tuple[int, int]] = set()
        """Comparisons of which the round is not committed yet, by number and attempt."""
        self._newest = (0, 0)
        """Round and attempt of the newest attempt that was counted."""
        self._clock = clock

    @property
    def participants(self) -> dict[str, int]:
        """Participants by state."""
        return {
            "ready": len(self._ready),
            "declined": len(self._declined),
            "invited": self.invited,
        }

    def __call__(self, event: Event) -> None:
        """Count an event."""
        if self._earlier is not None:
            earlier = self._earlier
            self._earlier = None
            for record in earlier():
                with self.lock:
                    self._count(record)
        with self.lock:
            self._note(event)

    def close(self) -> None:
        """The run is not executed any more."""
        with self.lock:
            self.ended = True
            self.waiting = False
            self.invited = 0
            self._ready.clear()

    def _note(self, event: Event) -> None:
        match event:
            case ParticipantJoined():
                self._declined.discard(event.participant)
            case ParticipantReady():
                self._ready.add(event.participant)
            case ParticipantDeclined():
                self._ready.discard(event.participant)
                self._declined.add(event.participant)
            case ParticipantLeft():
                self._ready.discard(event.participant)
            case WaitingForParticipants() | Paused():
                self.waiting = True
            case RoundPlanned():
                self.invited = event.invited
                self.waiting = False
            case ModelsCompared():
                self._count_comparison(event.record)
            case RoundCommitted() | RoundAttemptFailed():
                self.invited = 0
                self._count(event.record)
            case RunFinished() | RunFailed() | JobEnded():
                self.invited = 0
                self.waiting = False

    def _count_comparison(self, record: ComparisonRecord) -> None:
        number = (record.number, record.attempt)
        if number in self._compared or record.round <= self.last_round:
            return
        self._compared.add(number)
        self.bytes_up += record.bytes_up
        self.bytes_down += record.bytes_down

    def _count(self, record: EndedAttempt) -> None:
        if (number := (record.round, record.attempt)) <= self._newest:
            return
        self._newest = number
        self._count_attempt(record)
        if not isinstance(record, RoundRecord):
            self.failed_attempts += 1
            return
        self.rounds[record.regime] += 1
        self.last_round = record.round
        self.seconds[bisect_left(ROUND_SECONDS, record.seconds)] += 1
        self.seconds_sum += record.seconds
        self.committed_at = min(record.started_at + record.seconds, self._clock())
        if record.profile:
            self.profile = merged(record.profile.values())

    def _count_attempt(self, record: AttemptRecord) -> None:
        self.receipts.update(receipt.outcome for receipt in record.receipts)
        self.bytes_up += record.cost.bytes_up
        self.bytes_down += record.cost.bytes_down
        # Comparisons for the round may have been counted already: a run can stop after one.
        for each in getattr(record, "comparisons", ()):
            if (each.number, each.attempt) in self._compared:
                self._compared.remove((each.number, each.attempt))
                self.bytes_up -= each.bytes_up
                self.bytes_down -= each.bytes_down
        self.spent += record.cost.price
        if record.epsilon is not None:
            self.epsilon = max(self.epsilon or 0.0, record.epsilon)


def merged(profiles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The figures of several datacenters as one: rates added, the worst of the others.

    >>> merged([{"units_per_second": 10.0, "mfu": 0.5}, {"units_per_second": 5.0, "mfu": 0.4}])
    {'units_per_second': 15.0, 'mfu': 0.4}
    """
    together: dict[str, float] = {}
    for profile in profiles:
        for name, how in _MERGED.items():
            if name in profile:
                figure = profile[name]
                together[name] = how(together[name], figure) if name in together else figure
    return together


_MERGED: dict[str, Callable[[float, float], float]] = {
    "units_per_second": lambda one, other: one + other,
    "mfu": min,
    "peak_memory_gib": max,
    "restarts": lambda one, other: one + other,
}
