"""How long a round waits for each device that is not ready, from what the devices took before.

A device is *absent* from the first quorum without it until it is ready, and that time is how late
it is. What it took the last times says how long the next wait for it is:

>>> from isthmus.job.tables import TimeSection
>>> wait = CohortWait(TimeSection(), warn=print)
>>> wait.seconds("hospital-3", connected=False), wait.seconds("hospital-3", connected=True)
(10.0, 60.0)
>>> wait.quorum({"hospital-3"}, now=100.0)
>>> late = wait.ready("hospital-3", now=107.0)
>>> late.seconds, late.rounds_missed
(7.0, 0)
>>> wait.seconds("hospital-3", connected=False)
10.0

A device that was away for longer than any round may wait, as at night, is not awaited until it has
come in time more often than not.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable

from isthmus.job.tables import TimeSection
from isthmus.printable import in_a_line
from isthmus_server.storage.events import Event, ParticipantLate

LONGEST_SECONDS = 60.0
"""Longest wait for one device, in a job that does not say."""
SHORTEST_SECONDS = 10.0
"""Wait for a device that is not connected and of which nothing is known: it may never come. No less
for one that comes: how long it takes varies, and it costs the round no more than it takes."""
_KEPT = 10
"""Latest absences of a device that count."""
_QUANTILE = 0.9
_MARGIN = 1.25
_SLACK_SECONDS = 1.0
_WAITS_IN_VAIN = 2
"""Rounds that wait for a device that is never ready."""
LASTING_ROUNDS = 3
"""Rounds without a device from which on its exclusion is a warning."""
AWAY_SECONDS = 3600.0
"""After which a device was away, as at night, and not late for a round: that is no warning."""


def longest_wait(cohort_seconds: float | None) -> float:
    """The longest wait for one device, in seconds, for `time.cohort_seconds` of a job."""
    return LONGEST_SECONDS if cohort_seconds is None else cohort_seconds


def seconds_for(late: Iterable[float]) -> float:
    """The wait in which a device that was late by these seconds is most likely ready.

    >>> seconds_for([7.0, 7.0, 12.0])
    16.0
    """
    ordered = sorted(late)
    mostly = ordered[math.ceil(_QUANTILE * len(ordered)) - 1]
    return max(SHORTEST_SECONDS, mostly * _MARGIN + _SLACK_SECONDS)


def left_out(name: str, late: float, rounds: str, *, full: bool = False) -> str:
    """Why a device was left out of some rounds, and what to set so that it is not."""
    why = f"{in_a_line(name)} was left out of {rounds} because it is ready {late:.3g} s late"
    if full:
        return f"{why} and enough others are ready before; a larger federated.cohort has it, too"
    return f"{why}; set time.cohort_seconds={math.ceil(seconds_for([late]))} to wait for it"


@dataclasses.dataclass(frozen=True)
class Late:
    """How a device was late."""

    seconds: float
    """From the first quorum without it until it was ready."""
    rounds_missed: int
    """Rounds that began meanwhile."""
    rounds_full: int
    """Rounds among them in which all places were taken."""


@dataclasses.dataclass
class _Absence:
    since: float
    begun: int
    """Rounds that had begun before."""
    full: int
    waits_left: int = 1
    """Waits for it until it is given up."""
    has_returned: bool = False
    """Whether it has connected since."""


class CohortWait:
    """Who is absent, for how long each was absent the last times, and how long to wait for it.

    Guarantees:
      * for a device that does not come, or that connects and never is ready, at most two rounds
        wait until it was ready once;
      * the same times give the same waits: `restore` reads them from the events of a run.
    """

    def __init__(self, time: TimeSection, warn: Callable[[str], None]) -> None:
        """Nobody is absent; `warn` is told once of each device whose exclusion lasts."""
        self.longest = longest_wait(time.cohort_seconds)
        """Longest wait for one device, in seconds."""
        self._unknown = min(self.longest, SHORTEST_SECONDS)
        if time.cohort_seconds is not None:
            self._unknown = time.cohort_seconds
        self._warn = warn
        self._warned: set[str] = set()
        self._absent: dict[str, _Absence] = {}
        self._late: dict[str, collections.deque[float]] = {}
        """Seconds of the last absences of each device, oldest first."""
        self._missed: collections.Counter[str] = collections.Counter()
        self._in_vain: collections.Counter[str] = collections.Counter()
        """Waits for each device since it was ready last, that it did not come or declined."""
        self._round = 0
        self._begun = 0
        self._full = 0

    def restore(self, events: Iterable[Event]) -> None:
        """Know what the devices took in an earlier process of this run."""
        for event in events:
            if isinstance(event, ParticipantLate) and event.was_ready:
                self._note(event.participant, event.seconds, event.rounds_missed)

    # -- rounds ------------------------------------------------------------------------------------

    def quorum(self, missing: Collection[str], now: float) -> None:
        """A quorum is ready at `now` (seconds of any clock), and these are not."""
        for name in missing:
            if name not in self._absent:
                waits = int(self._in_vain[name] < _WAITS_IN_VAIN)
                self._absent[name] = _Absence(now, self._begun, self._full, waits)

    @property
    def has_absent(self) -> bool:
        """Whether a quorum was without a device that is not ready yet."""
        return bool(self._absent)

    def is_awaited(self, name: str) -> bool:
        """Whether a round waits for a device that is not ready."""
        absence = self._absent.get(name)
        return absence is None or absence.waits_left > 0

    def seconds(self, name: str, *, connected: bool) -> float:
        """Seconds after the quorum until a device is not awaited any more; 0 for no wait.

        A device that is connected is opening the run, so that it is there and most likely comes.
        """
        past = self._late.get(name)
        if past is None:
            return self.longest if connected else self._unknown
        in_time = [seconds for seconds in past if seconds <= self.longest]
        if 2 * len(in_time) < len(past):
            return 0.0
        return min(self.longest, seconds_for(in_time))

    def give_up(self, name: str) -> None:
        """A wait for a device has ended without it."""
        if (absence := self._absent.get(name)) is not None:
            absence.waits_left -= 1
            self._in_vain[name] += 1

    def postpone(self, names: Iterable[str], now: float) -> None:
        """What kept these devices until `now` was not their own time."""
        for name in names:
            if name in self._absent:
                self._absent[name].since = now

    def begin(self, round_: int, *, full: bool) -> None:
        """A round begins with those who are ready; `full`: they are as many as it invites."""
        if round_ == self._round:
            return  # another attempt
        self._round = round_
        self._begun += 1
        self._full += full

    # -- devices -----------------------------------------------------------------------------------

    def joined(self, name: str) -> None:
        """A device has connected, and opens the run: it is worth one more wait."""
        absence = self._absent.get(name)
        if absence is not None and not absence.has_returned:
            absence.has_returned = True
            absence.waits_left = int(self._in_vain[name] < _WAITS_IN_VAIN)

    def ready(self, name: str, now: float) -> Late | None:
        """A device is ready at `now`; returns how late, or None if no quorum was without it."""
        del self._in_vain[name]
        late = self.absence(name, now)
        if late is None:
            return None
        del self._absent[name]
        self._note(name, late.seconds, late.rounds_missed)
        was_late = late.rounds_missed > 0 and late.seconds <= AWAY_SECONDS
        lasts = was_late and self._missed[name] >= LASTING_ROUNDS
        if lasts and name not in self._warned:
            self._warned.add(name)
            full = 2 * late.rounds_full > late.rounds_missed
            self._warn(left_out(name, late.seconds, f"{self._missed[name]} rounds", full=full))
        return late

    def declined(self, name: str) -> None:
        """A device will not take part, so that no round is without it.

        One that returns to decline again would otherwise have each round wait for it.
        """
        absence = self._absent.pop(name, None)
        if absence is not None and absence.waits_left > 0:
            self._in_vain[name] += 1

    def absence(self, name: str, now: float) -> Late | None:
        """How late a device is so far; None if no quorum was without it."""
        absence = self._absent.get(name)
        if absence is None:
            return None
        return Late(now - absence.since, self._begun - absence.begun, self._full - absence.full)

    def warn_of_lasting(self, name: str, now: float) -> None:
        """Warn of a device that is connected and not ready for some rounds already."""
        late = self.absence(name, now)
        if late is not None and late.rounds_missed >= LASTING_ROUNDS and name not in self._warned:
            self._warned.add(name)
            self._warn(
                f"{in_a_line(name)} is connected and has been opening the run for "
                f"{late.seconds:.3g} s, in which {late.rounds_missed} rounds have begun without it"
            )

    def _note(self, name: str, seconds: float, rounds_missed: int) -> None:
        past = self._late.setdefault(name, collections.deque(maxlen=_KEPT))
        past.append(seconds)
        self._missed[name] += rounds_missed
