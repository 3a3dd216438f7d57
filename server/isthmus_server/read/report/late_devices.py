"""Devices that were ready after the quorum: who was left out, and what the waits have cost."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable

from isthmus.printable import in_a_line
from isthmus_server.rounds.cohort_wait import AWAY_SECONDS, LASTING_ROUNDS, left_out
from isthmus_server.storage.events import CohortAwaited, Event, ParticipantLate

_SHARE = 0.1
"""Share of the rounds without a device up to which nothing is said."""
_NAMED = 8
_TOLD_SECONDS = 1.0
"""Seconds of all waits from which on they are told."""


class LateDevices:
    """Counts the late devices of one run, from its events."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        """Count those of these events."""
        self._missed: dict[str, list[ParticipantLate]] = defaultdict(list)
        """The absences of each device in which rounds began without it."""
        self._awaited: dict[str, list[float]] = defaultdict(list)
        """Seconds of the waits that each device has ended, by being ready."""
        self._in_vain: Counter[str] = Counter()
        self._waits = 0
        self._seconds = 0.0
        for event in events:
            self.note(event)

    def note(self, event: Event) -> None:
        """Count an event; others than those of late devices change nothing."""
        if isinstance(event, CohortAwaited):
            self._waits += 1
            self._seconds += event.seconds
            self._in_vain.update(event.given_up)
        elif isinstance(event, ParticipantLate) and event.rounds_missed:
            if event.seconds <= AWAY_SECONDS:
                self._missed[event.participant].append(event)
        elif isinstance(event, ParticipantLate):
            self._awaited[event.participant].append(event.seconds)

    def sentences(self, rounds: int) -> list[str]:
        """What to tell an operator after so many rounds with devices."""
        lines = []
        missed = {
            name: sum(each.rounds_missed for each in absences)
            for name, absences in self._missed.items()
        }
        for name, count in sorted(missed.items(), key=lambda item: (-item[1], item[0]))[:_NAMED]:
            if 0 < min(LASTING_ROUNDS, rounds) <= count and count > _SHARE * rounds:
                lines.append(self._left_out(name, count, rounds))
        if self._seconds >= _TOLD_SECONDS:
            lines.append(self._cost())
        return lines

    def _left_out(self, name: str, count: int, rounds: int) -> str:
        absences = self._missed[name]
        rounds_without = f"{min(count, rounds)} of {rounds} rounds"
        if not absences[-1].was_ready:
            return (
                f"{in_a_line(name)} was left out of {rounds_without} because it was still opening "
                f"the run after {absences[-1].seconds:.3g} s"
            )
        late = statistics.median(each.seconds for each in absences)
        full = 2 * sum(each.rounds_full for each in absences) > count
        return left_out(name, late, rounds_without, full=full)

    def _cost(self) -> str:
        """How long rounds have waited for devices, and for whom."""
        waits = f"{self._waits} wait{'s' * (self._waits > 1)}"
        line = f"{waits} for devices that were not ready took {self._seconds:.3g} s in all"
        by_time = sorted(self._awaited.items(), key=lambda item: (-sum(item[1]), item[0]))
        parts = [
            f"{in_a_line(name)} was in {len(times)} more round{'s' * (len(times) > 1)}, "
            f"{statistics.median(times):.3g} s late"
            for name, times in by_time[:_NAMED]
        ]
        if self._in_vain:
            names = ", ".join(map(in_a_line, sorted(self._in_vain)[:_NAMED]))
            more = len(self._in_vain) - _NAMED
            parts.append(f"in vain for {names}" + (f" and {more} more" if more > 0 else ""))
        return f"{line}: {'; '.join(parts)}" if parts else line
