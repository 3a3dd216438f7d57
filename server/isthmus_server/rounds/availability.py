"""When each device may be invited, from its hours, the job's hours and its past participation."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable

from isthmus.job import Job
from isthmus.job.section import Hours
from isthmus_server.budgets.budget import PrivacyBudget
from isthmus_server.rounds.clock import Clock
from isthmus_server.storage.records import AttemptRecord, RoundRecord
from isthmus_server.strategy.attendance import Attendance


class DeviceAvailability:
    """Participation of the devices of one run.

    Attempts count from the next round on, so that all attempts at a round invite the same devices
    if the same are ready.
    """

    def __init__(
        self,
        job: Job,
        clock: Clock,
        attempts: Iterable[AttemptRecord] = (),
        privacy: PrivacyBudget | None = None,
    ) -> None:
        """`attempts` are those of the run so far, oldest first."""
        self._privacy = privacy
        self._asked = collections.Counter[str]()
        """Attempts that each device was asked to train in."""
        examples = job.federated.privacy
        self._most_asked: int | None = None
        """After which a device would refuse to train; None for no limit."""
        if examples is not None:
            self._most_asked = examples.most_participations(job.rounds)
        self.attendance = Attendance(job.federated)
        unlimited = privacy is None and self._most_asked is None
        self.is_unlimited = unlimited and not self.attendance.has_limits
        """Whether a device without hours of its own may always be invited."""
        self._clock = clock
        self._round: list[AttemptRecord] = []
        for record in attempts:
            self.add(record)

    def add(self, record: AttemptRecord) -> None:
        """Count an ended attempt; a committed one ends its round."""
        self._round.append(record)
        self._asked.update(
            each.participant
            for each in record.receipts
            if each.regime == "federated" and each.started
        )
        if not isinstance(record, RoundRecord):
            return
        for attempt in self._round:
            self.attendance.record_attempt(
                attempt.round,
                started_at=attempt.started_at,
                seconds=attempt.seconds,
                receipts=[r for r in attempt.receipts if r.regime == "federated"],
            )
        self._round.clear()

    def seconds_until(
        self, name: str, hours: tuple[Hours, ...], *, measured: bool = False
    ) -> float:
        """Seconds until a device with its own `hours` may be invited: 0 now, infinity never.

        `measured`: to an evaluation or a comparison, and not to train.
        """
        if measured and self.is_measured_out(name):
            return math.inf
        if not measured and self._privacy is not None and not self._privacy.allows(name):
            return math.inf
        if self._most_asked is not None and self._asked[name] >= self._most_asked:
            return math.inf
        return self.attendance.seconds_until_eligible(name, self._clock.utc(), hours)

    async def account(self, name: str) -> None:
        """Find what is asked of a device's privacy budget, before it can be chosen."""
        if self._privacy is not None:
            await self._privacy.account_for(name)

    def is_measured_out(self, name: str) -> bool:
        """Whether a device has no privacy budget left for evaluations and comparisons."""
        return self._privacy is not None and not self._privacy.allows_measurement(name)
