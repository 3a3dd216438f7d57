"""Cohorts: who of those who are here may be asked, and who is."""

from __future__ import annotations

import math
from collections.abc import Collection

from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.roster import Roster
from isthmus_server.storage.records import AttemptRecord, RoundRecord
from isthmus_server.storage.store import Store
from isthmus_server.strategy.attendance import Attendance
from isthmus_server.strategy.device_selection import select_devices


class Cohorts:
    """Invites devices within their hours and their most rounds, as the job selects them.

    What became of attempts at a round counts from the next round on, so that every attempt at a
    round invites the same of those who are here.
    """

    def __init__(self, job: Job, roster: Roster, clock: Clock, store: Store) -> None:
        """Remember what the log has of the run so far."""
        self.job = job
        self.roster = roster
        self.clock = clock
        self.attendance = Attendance(job.federated)
        self._pending: list[AttemptRecord] = []
        self._again: tuple[int, Collection[str]] = 0, ()
        roster.rests = lambda name: self._rests_for(name) > 0
        for record in store.attempts():
            if isinstance(record, RoundRecord):
                self.committed(record)
            else:
                self.failed(record)

    def failed(self, record: AttemptRecord) -> None:
        """An attempt came to nothing."""
        self._pending.append(record)

    def committed(self, record: RoundRecord) -> None:
        """A round is done."""
        for attempt in (*self._pending, record):
            self.attendance.record_attempt(
                attempt.round,
                started_at=attempt.started_at,
                seconds=attempt.seconds,
                receipts=[r for r in attempt.receipts if r.regime == "federated"],
            )
        self._pending.clear()

    async def go_on(self, round_: int, invited: Collection[str]) -> None:
        """Wait for the devices of an attempt at a round that a crash cut short.

        If all come they are invited again, for as long as all of them may be asked. They may have
        opened the attempt's secure sum: then they refuse one of nearly the same devices.
        """
        settings = self.job.federated
        summed = settings.secure_aggregation and settings.mode != "buffered"
        if summed and invited and await self.roster.wait_for(devices=invited):
            self._again = round_, invited

    def invite(
        self, round_: int, settings: FederatedSection, at_work: Collection[str] = ()
    ) -> dict[str, int]:
        """The devices of a round, with the examples they declared.

        With mode = "buffered" as many as may be asked while its buffer is filled, of those who are
        not `at_work` for it already.
        """
        buffered = settings.mode == "buffered"
        able = self.roster.able()
        again, invited = self._again
        if again == round_ and set(invited) <= set(able):
            return {name: self.roster.clients[name].examples for name in sorted(invited)}
        names = select_devices(
            set(able) - set(at_work),
            count=settings.concurrency + settings.cohort if buffered else settings.invited,
            seed=self.job.seed,
            round_=round_,
            records=self.attendance.records,
            guided=settings.utility if settings.selection == "utility" else None,
        )
        return {name: self.roster.clients[name].examples for name in names}

    def enough_in(self) -> float | None:
        """Seconds until the quorum of those who are here may be asked; None if that is never."""
        waits = sorted(self._rests_for(name) for name in self.roster.clients)
        needed = self.job.federated.needed
        if len(waits) < needed or waits[needed - 1] == math.inf:
            return None
        return waits[needed - 1]

    def _rests_for(self, name: str) -> float:
        hours = self.roster.clients[name].hours
        return self.attendance.seconds_until_eligible(name, self.clock.utc(), hours)
