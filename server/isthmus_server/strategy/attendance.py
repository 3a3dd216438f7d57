"""Participation history of each device, and when a device may be invited again.

>>> from isthmus.job.federated import FederatedSection, Participation
>>> from isthmus_server.storage.records import Receipt
>>> once_in_two_hours = FederatedSection(participation=Participation(rounds=1, hours=2))
>>> attendance = Attendance(once_in_two_hours)
>>> receipt = Receipt(participant="a", regime="federated", status="accepted", seconds=3.0)
>>> attendance.record_attempt(1, started_at=0.0, seconds=9.0, receipts=[receipt])
>>> attendance.seconds_until_eligible("a", now=3600.0)
3600.0
>>> attendance.seconds_until_eligible("b", now=3600.0)
0.0
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from isthmus.job.federated import FederatedSection
from isthmus.job.section import Hours
from isthmus_server.strategy.windows import WEEK, forecast_hours

if TYPE_CHECKING:
    from isthmus_server.storage.records import Receipt


@dataclasses.dataclass
class ParticipationRecord:
    """One device that was invited at least once."""

    invited: deque[tuple[int, float]]
    """The last rounds it was invited to, each with the time (seconds since 1970); as many as the
    participation cap counts."""
    seconds: float = 0.0
    """Time its last update took; at least the length of the whole attempt if it did not finish."""
    examples: int = 0
    """Examples of its last accepted update."""
    loss: float | None = None
    """Mean loss over its examples while it computed that update; None if the server cannot see
    it."""


class Attendance:
    """Records of all devices.

    A round counts once, however many attempts it took: a run that is resumed within a round selects
    the same devices as one that was never interrupted.
    """

    def __init__(self, settings: FederatedSection) -> None:
        self.settings = settings
        self.records: dict[str, ParticipationRecord] = {}

    def record_attempt(
        self,
        round_: int,
        *,
        started_at: float,
        seconds: float,
        receipts: Iterable[Receipt],
    ) -> None:
        """Record an attempt at a round.

        Args:
            round_: the round, from 1.
            started_at: when the attempt began, in seconds since 1970.
            seconds: how long it took.
            receipts: the receipts of its devices.
        """
        for receipt in receipts:
            # A device that was not reached did not take part.
            if not receipt.started:
                continue
            name = receipt.participant
            cap = self.settings.participation
            if name not in self.records:
                self.records[name] = ParticipationRecord(
                    deque(maxlen=1 if cap is None else cap.rounds)
                )
            record = self.records[name]
            # One entry for a round, with the time of the first attempt: its later ones are the same
            # invitation.
            if not record.invited or record.invited[-1][0] != round_:
                record.invited.append((round_, started_at))
            if receipt.status != "accepted":
                # It took at least as long as it was waited for.
                record.seconds = max(record.seconds, seconds)
                continue
            record.seconds = receipt.seconds
            record.examples = receipt.examples
            loss = receipt.loss
            record.loss = loss if loss is not None and math.isfinite(loss) else None

    @property
    def has_limits(self) -> bool:
        """Whether the job limits participations or hours."""
        return self.settings.participation is not None or bool(self.settings.hours)

    def seconds_until_eligible(
        self, name: str, now: float, device_hours: Sequence[Hours] = ()
    ) -> float:
        """Return the seconds until a device may be invited: 0 if it may now, infinity if never.

        Args:
            name: the device.
            now: seconds since 1970, UTC.
            device_hours: the hours in which the device itself accepts work, in addition to the
                job's.
        """
        settings = self.settings
        if not self.has_limits and not device_hours:
            return 0.0
        delay = self._seconds_until_below_cap(name, now)
        schedules = [hours for hours in (job_hours_of(settings, name), device_hours) if hours]
        # Advance to the next opening of each schedule in turn, until all are open at the same time
        # or a week has passed.
        # Hours repeat every week: what is not open at once in one never is.
        end = delay + WEEK
        while delay <= end:
            forecasts = [forecast_hours(hours, now + delay, None) for hours in schedules]
            closed = [forecast.changes_in for forecast in forecasts if not forecast.ready]
            if not closed:
                return delay
            delay += max(wait or math.inf for wait in closed)
        return math.inf

    def _seconds_until_below_cap(self, name: str, now: float) -> float:
        cap = self.settings.participation
        record = self.records.get(name)
        if cap is None or record is None or len(record.invited) < cap.rounds:
            return 0.0
        if cap.hours is None:
            return math.inf
        _, counted_since = record.invited[-cap.rounds]
        return max(0.0, counted_since + cap.hours * 3600.0 - now)


def job_hours_of(settings: FederatedSection, name: str) -> Sequence[Hours]:
    """Return the hours in which the job allows a device to work; empty if it sets no limit."""
    return [entry for entry in settings.hours if fnmatchcase(name, entry.devices)]
