"""Select the cohort of a round among the devices that are ready and available."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus_privacy.secagg.lottery import MILLION
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.ticket_selection import TicketLottery
from isthmus_server.storage.records import PlannedAttempt
from isthmus_server.strategy.device_selection import select_devices
from isthmus_server.transport.enrolment import Enrolments


@dataclasses.dataclass(frozen=True)
class SelectedCohort:
    """The devices of a round, with the number of examples each declared, and their lottery."""

    examples: Mapping[str, int]
    draw: int = 0
    """Draw in which they were selected by their tickets; 0 without tickets."""
    selected_ppm: int = MILLION
    shortage: str = ""
    """Why these are fewer than the round needs, if tickets are the reason."""


class CohortSelector:
    """Selects the devices of a round by the job's settings."""

    def __init__(
        self,
        job: Job,
        roster: ParticipantRoster,
        availability: DeviceAvailability,
        enrolments: Enrolments,
        clock: Clock,
    ) -> None:
        self._job = job
        self._roster = roster
        self._availability = availability
        self.lottery = TicketLottery(enrolments) if enrolments.requires_tickets else None
        """Selects for secure sums; None if devices do not require tickets."""
        self._clock = clock
        self._repeated: PlannedAttempt | None = None

    async def repeat(self, interrupted: PlannedAttempt) -> None:
        """Wait for the devices of an attempt that a crash interrupted, to invite the same again.

        They may have unmasked the attempt's secure sum: then they refuse a sum of nearly the same
        devices. If not all of them return in time, the round selects as usual.
        """
        settings = self._job.federated
        summed = settings.secure_aggregation and settings.mode != "buffered"
        invited = interrupted.invited
        if summed and invited and await self._roster.wait_for(devices=invited):
            self._repeated = interrupted

    def select(
        self, round_: int, settings: FederatedSection, busy: Collection[str] = ()
    ) -> SelectedCohort:
        """The devices of a round.

        In buffered mode these are the devices that may be asked while the buffer fills, without
        the `busy` ones that are already training.
        """
        buffered = settings.mode == "buffered"
        available = self._roster.available()
        lottery = self.lottery if settings.secure_aggregation and not buffered else None
        repeated = self._repeated
        if (
            repeated is not None
            and repeated.round == round_
            and set(repeated.invited) <= set(available)
        ):
            if lottery is None:
                return SelectedCohort(self._with_examples(sorted(repeated.invited)))
            again = lottery.restate(repeated.invited, repeated.draw, settings.needed)
            if again is not None:
                lottery.keep(round_, again.draw)
                return SelectedCohort(
                    self._with_examples(again.names), again.draw, again.selected_ppm
                )
        if lottery is not None:
            drawn = lottery.select(
                round_,
                set(available) - set(busy),
                count=settings.invited,
                needed=settings.needed,
                now=self._clock.utc(),
            )
            examples = self._with_examples(drawn.names)
            return SelectedCohort(examples, drawn.draw, drawn.selected_ppm, drawn.shortage)
        names = select_devices(
            set(available) - set(busy),
            count=settings.concurrency + settings.cohort if buffered else settings.invited,
            seed=self._job.seed,
            round_=round_,
            records=self._availability.attendance.records,
            guided=settings.utility if settings.selection == "utility" else None,
        )
        return SelectedCohort(self._with_examples(names))

    def seconds_until_quorum(self) -> float | None:
        """Seconds until a quorum of the ready devices is available; None if it never is."""
        waits = sorted(self._roster.seconds_until_available(name) for name in self._roster.clients)
        needed = self._job.federated.needed
        if len(waits) < needed or waits[needed - 1] == math.inf:
            return None
        return waits[needed - 1]

    def _with_examples(self, names: Collection[str]) -> dict[str, int]:
        return {name: self._roster.clients[name].examples for name in names}
