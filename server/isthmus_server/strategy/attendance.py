"""What is known of each device from the rounds it was asked in, and whether it may be asked again.

>>> from isthmus.job.federated import FederatedSection, Participation
>>> twice = FederatedSection(participation=Participation(rounds=1, hours=2))
>>> attendance = Attendance(twice)
>>> attendance.take(1, asked_at=0.0, seconds=9.0, receipts=[{"participant": "a", "started": True,
...     "status": "accepted", "seconds": 3.0, "examples": 20, "loss": 1.5}])
>>> attendance.rests_for("a", now=3600.0), attendance.rests_for("b", now=3600.0)
(3600.0, 0.0)
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from isthmus.job.federated import FederatedSection
from isthmus.job.section import Hours
from isthmus_server.strategy.windows import WEEK, forecast_hours


@dataclasses.dataclass
class Record:
    """One device that was asked at least once."""

    asked: deque[tuple[int, float]]
    """The last rounds, each with when it was asked (seconds since 1970): as many as count."""
    seconds: float = 0.0
    """Its time for the work when it was asked last; at least what the whole attempt took, where it
    did not come to its end."""
    examples: int = 0
    """Of its last update that was used."""
    loss: float | None = None
    """Mean over its examples while it made that update; None where the server cannot see it."""


class Attendance:
    """Records of all devices.

    A round counts once, however many attempts it took: a run that goes on after a crash within a
    round chooses as one that was never interrupted.
    """

    def __init__(self, settings: FederatedSection) -> None:
        self.settings = settings
        self.records: dict[str, Record] = {}

    def take(
        self,
        round_: int,
        *,
        asked_at: float,
        seconds: float,
        receipts: Iterable[Mapping[str, Any]],
    ) -> None:
        """Note an attempt at a round: when it began, how long it took, its devices' receipts."""
        for receipt in receipts:
            if not receipt["started"]:
                continue
            name, cap = receipt["participant"], self.settings.participation
            if name not in self.records:
                self.records[name] = Record(deque(maxlen=1 if cap is None else cap.rounds))
            record = self.records[name]
            if not record.asked or record.asked[-1][0] != round_:
                record.asked.append((round_, asked_at))
            if receipt["status"] != "accepted":
                record.seconds = max(record.seconds, seconds)
                continue
            record.seconds = receipt["seconds"]
            record.examples = receipt["examples"]
            loss = receipt.get("loss")
            record.loss = loss if loss is not None and math.isfinite(loss) else None

    def rests_for(self, name: str, now: float, own: Sequence[Hours] = ()) -> float:
        """Seconds until a device may be asked: 0 now, infinity never (again).

        `own` are the hours that the device wants to be asked in, besides those of the job.
        """
        settings = self.settings
        if settings.participation is None and not settings.hours and not own:
            return 0.0  # as in most jobs, with thousands of devices
        rest = self._until_below_cap(name, now)
        given = [hours for hours in (hours_of(settings, name), own) if hours]
        # Two lists of hours are in turn waited for, until both are open or a week has gone by.
        end = rest + WEEK
        while rest <= end:
            at = [forecast_hours(hours, now + rest, None) for hours in given]
            closed = [one.changes_in for one in at if not one.ready]
            if not closed:
                return rest
            rest += max(wait or math.inf for wait in closed)
        return math.inf

    def _until_below_cap(self, name: str, now: float) -> float:
        cap, record = self.settings.participation, self.records.get(name)
        if cap is None or record is None or len(record.asked) < cap.rounds:
            return 0.0
        if cap.hours is None:
            return math.inf
        _, counted_since = record.asked[-cap.rounds]
        return max(0.0, counted_since + cap.hours * 3600.0 - now)


def hours_of(settings: FederatedSection, name: str) -> Sequence[Hours]:
    """The hours that the job gives a device; none: always."""
    return [entry for entry in settings.hours if fnmatchcase(name, entry.devices)]
