"""Wait until a planned round may begin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from isthmus.errors import ParticipantsMissing
from isthmus.job import Job
from isthmus.wire import link_pb2
from isthmus_server.rounds.assignment import cohort_settings
from isthmus_server.rounds.cohort_selection import (
    SUM_REFUSED,
    CohortSelector,
    NoAllowedCohort,
    SelectedCohort,
)
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.strategy.policy import CURRENT, Plan, Stop


class PlanLimits(Protocol):
    """What limits the plans that are carried out."""

    async def wait_for(self, plan: Plan) -> Stop | None:
        """Wait until a plan may be carried out; the stop that ends the run if it never may."""
        ...

    def allow(self, plan: Plan) -> bool:
        """Whether a plan may be carried out now."""
        ...


class RoundReadiness:
    """Brings a plan to the point at which its round can begin."""

    def __init__(
        self, job: Job, roster: ParticipantRoster, cohorts: CohortSelector, limits: PlanLimits
    ) -> None:
        self._job = job
        self._roster = roster
        self._cohorts = cohorts
        self._limits = limits

    async def wait(
        self, round_: int, plan: Plan, model_hash: Callable[[Plan], bytes | None]
    ) -> Plan | Stop:
        """Wait for the limits, the participants and an allowed cohort.

        Args:
            round_: number of the round.
            plan: as it was decided.
            model_hash: the SHA-256 of the model that a plan starts from, if devices may know it.

        Returns the plan; a datacenter round where only that can change the model; or the stop that
        ends the run.

        Raises:
            ParticipantsMissing: too few are ready in time, or those that are may not be summed.
        """
        ready = await self._ready(round_, plan, model_hash)
        if isinstance(ready, Plan) and ready.regime != "datacenter":
            self._roster.begin(round_)
        return ready

    async def _ready(
        self, round_: int, plan: Plan, model_hash: Callable[[Plan], bytes | None]
    ) -> Plan | Stop:
        while True:
            # All of it anew after each wait: meanwhile a window can close, a device can leave, and
            # a privacy budget can be used up by another run.
            stop = await self._limits.wait_for(plan)
            if stop is not None:
                return stop
            try:
                await self._roster.require(plan.regime)
            except ParticipantsMissing as missing:
                if self._lacks_more_than_permission(missing) or self._cohorts.awaits_others():
                    raise
                continue  # the limits know when these devices may be invited again, if ever
            # Nobody's privacy depends on the survivors of a sum: there is none.
            if plan.regime == "datacenter":
                return plan
            settings = cohort_settings(self._job, plan)
            await self._roster.gather_cohort(round_, settings.invited)
            selected = self._select(round_, plan, model_hash)
            if isinstance(selected, NoAllowedCohort):
                why = str(selected)
            elif selected.refused:
                why = SUM_REFUSED
            else:
                return plan
            instead = self._datacenter_first(plan, why)
            # Rather than wait for devices that may never return, or repeat a sum that was refused:
            # after it the model is another one, about which no device has unmasked a sum.
            if instead is not None:
                return instead
            if isinstance(selected, SelectedCohort):
                return plan
            # Any cohort that is allowed ends the wait, not only the one whose return is awaited.
            if not await self._roster.until(
                lambda: isinstance(self._select(round_, plan, model_hash), SelectedCohort),
                clients=settings.needed,
                missing=selected.missing,
                reason=why,
            ):
                raise self._roster.missing(why, [link_pb2.CLIENT])

    def _lacks_more_than_permission(self, missing: ParticipantsMissing) -> bool:
        """Whether others have to come; not if enough devices are ready that may not be invited."""
        is_of_devices = missing.roles == {link_pb2.CLIENT}
        return not is_of_devices or len(self._roster.clients) < self._job.federated.needed

    def _select(
        self, round_: int, plan: Plan, model_hash: Callable[[Plan], bytes | None]
    ) -> SelectedCohort | NoAllowedCohort:
        try:
            return self._cohorts.select(round_, cohort_settings(self._job, plan), model_hash(plan))
        except NoAllowedCohort as refusal:
            return refusal

    def _datacenter_first(self, plan: Plan, why: str) -> Plan | None:
        """A datacenter round in place of the plan, if its policy uses the datacenter at all."""
        if (
            not self._roster.datacenters
            # A datacenter's round changes the current model, and these devices have unmasked one of
            # another.
            or plan.start != CURRENT
            or self._job.strategy.policy == "federated"
        ):
            return None
        instead = dataclasses.replace(
            plan,
            regime="datacenter",
            reason=f"the datacenter changes the model first: {why}",
            cohort=None,
            merge=None,
            transfer_weight=None,
            # Nothing that needs devices, and no weight with which no datacenter would be left.
            measure_gradients=False,
            by_group=False,
            group_weights={},
            datacenter_weights={},
        )
        return instead if self._limits.allow(instead) else None
