"""Select the cohort of a round among the devices that are ready and available."""

from __future__ import annotations

import math
from collections.abc import Collection

from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.strategy.device_selection import select_devices


class CohortSelector:
    """Selects the devices of a round by the job's settings."""

    def __init__(
        self, job: Job, roster: ParticipantRoster, availability: DeviceAvailability
    ) -> None:
        self._job = job
        self._roster = roster
        self._availability = availability
        self._repeated: tuple[int, Collection[str]] = 0, ()

    async def repeat(self, round_: int, invited: Collection[str]) -> None:
        """Wait for the devices of an attempt that a crash interrupted, to invite the same again.

        They may have unmasked the attempt's secure sum: then they refuse a sum of nearly the same
        devices. If not all of them return in time, the round selects as usual.
        """
        settings = self._job.federated
        summed = settings.secure_aggregation and settings.mode != "buffered"
        if summed and invited and await self._roster.wait_for(devices=invited):
            self._repeated = round_, invited

    def select(
        self, round_: int, settings: FederatedSection, busy: Collection[str] = ()
    ) -> dict[str, int]:
        """The devices of a round, with the number of examples each declared.

        In buffered mode these are the devices that may be asked while the buffer fills, without
        the `busy` ones that are already training.
        """
        buffered = settings.mode == "buffered"
        available = self._roster.available()
        repeated_round, repeated = self._repeated
        if repeated_round == round_ and set(repeated) <= set(available):
            return self._with_examples(sorted(repeated))
        names = select_devices(
            set(available) - set(busy),
            count=settings.concurrency + settings.cohort if buffered else settings.invited,
            seed=self._job.seed,
            round_=round_,
            records=self._availability.attendance.records,
            guided=settings.utility if settings.selection == "utility" else None,
        )
        return self._with_examples(names)

    def seconds_until_quorum(self) -> float | None:
        """Seconds until a quorum of the ready devices is available; None if it never is."""
        waits = sorted(self._roster.seconds_until_available(name) for name in self._roster.clients)
        needed = self._job.federated.needed
        if len(waits) < needed or waits[needed - 1] == math.inf:
            return None
        return waits[needed - 1]

    def _with_examples(self, names: Collection[str]) -> dict[str, int]:
        return {name: self._roster.clients[name].examples for name in names}
