"""A warm start: datacenter rounds before the rounds with devices, where these hold the target.

It uses rounds that the budget leaves to no device, or the time before the devices' window, and
ends if devices do not find the warm model better than the initial one. If no datacenter is there at
the start, it begins when one has come, and has to beat the model that devices have trained so far.
So does the rest of a warm start whose datacenter left, once one is there again.
"""

from __future__ import annotations

import dataclasses

from isthmus_server.strategy.policies.adaptive import budget_plan, evidence
from isthmus_server.strategy.policies.adaptive.comparisons import Comparisons, in_words
from isthmus_server.strategy.policies.adaptive.edge_rounds import EdgeRound
from isthmus_server.strategy.policies.adaptive.state import (
    COLD,
    WARM,
    AdaptiveSettings,
    AdaptiveState,
)
from isthmus_server.strategy.policy import CURRENT, INITIAL, Compare, Observation, Plan

OUTSIDE_OF_HOURS = "it is outside of the devices' hours"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """What the limits leave for a warm start."""

    slack: float
    """Rounds that it takes from no device."""
    limit: int
    """Datacenter rounds that it may have."""
    reason: str
    """Why it does not fit, if the limit is too low."""


class WarmStart:
    """Decides whether a warm start fits, tests it, and ends it."""

    def __init__(self, settings: AdaptiveSettings, comparisons: Comparisons) -> None:
        self._settings = settings
        self._comparisons = comparisons

    def begin(self, observation: Observation, state: AdaptiveState) -> EdgeRound | Plan | Compare:
        """Begin a warm start if it fits: into spare rounds, or before the devices' window."""
        edge = dataclasses.replace(state, phase="edge")
        devices_open = observation.open("federated")
        room = self._room(observation)
        available = budget_plan.datacenter_available(observation, state.excluded)
        if room.limit >= self._settings.warm_test and available:
            warm = dataclasses.replace(
                state,
                phase="warm",
                max_warm_rounds=room.limit,
                min_warm_rounds=int(room.slack / 2) if devices_open else 0,
                before_devices=not devices_open,
            )
            return self.next(observation, warm)
        if not available:
            edge = dataclasses.replace(edge, missed_warm_start=True)
        if not devices_open:
            return EdgeRound(edge, OUTSIDE_OF_HOURS)
        if not available:
            return EdgeRound(edge, "no datacenter is available for a warm start")
        return EdgeRound(edge, room.reason)

    def begin_late(self, observation: Observation, state: AdaptiveState) -> EdgeRound | Plan:
        """Begin a warm start from the current model, if it still fits.

        The datacenter was not there at the start, or left. Each round without it has kept its model
        as `COLD` (`EdgePlanner`), so that devices can compare the last one with the warm one.
        """
        room = self._room(observation, state.edge_rounds)
        limit = room.limit
        reason = room.reason
        # A datacenter that comes and goes has no more rounds than one that stays.
        if state.max_warm_rounds and state.max_warm_rounds < limit:
            limit = state.max_warm_rounds
            reason = f"the {limit} rounds left of the warm start are not worth their test"
        if limit < self._settings.warm_test:
            too_late = dataclasses.replace(state, missed_warm_start=False)
            return EdgeRound(too_late, f"a datacenter has come, and {reason}")
        if COLD not in observation.models:
            why = "a datacenter has come, which goes on from the model after this round"
            return EdgeRound(state, why)
        # Rounds with devices are counted anew, so that they are on probation after it.
        warm = dataclasses.replace(
            state,
            phase="warm",
            missed_warm_start=False,
            before_devices=False,
            warm_reference=COLD,
            warm_accepted=False,
            warm_rounds=0,
            max_warm_rounds=limit,
            min_warm_rounds=int(room.slack / 2),
            edge_rounds=0,
            probation_over=False,
        )
        first = self.next(observation, warm)
        assert isinstance(first, Plan)  # a datacenter is there, and no test is due before a round
        return dataclasses.replace(first, reason=f"a datacenter has come: {first.reason}")

    def _room(self, observation: Observation, edge_rounds: int = 0) -> Room:
        """What the limits leave for a warm start after so many rounds with devices."""
        devices_open = observation.open("federated")
        possible, affordable = budget_plan.rounds_with_devices(observation)
        rounds_left = observation.rounds - observation.round + 1
        # Rounds in which the budget could not pay the devices anyway: a warm start takes nothing
        # from them.
        slack = (possible if devices_open else rounds_left) - affordable
        budget = self._settings.warm_share * (observation.budget_left or 0)
        # The comparison that the warm start has to pass is paid from the same share.
        budget -= self._comparisons.price(observation)
        payable = budget / max(observation.price("datacenter"), 1e-9)
        reason = (
            f"the limits allow {affordable:.0f} of the {possible:.0f} rounds in which devices can "
            "work, which leaves no room for a warm start worth its test"
        )
        # As long as it would have been at the start, and not longer than what follows it.
        share = self._settings.warm_length
        length = min(share * (edge_rounds + affordable), max(share, 1.0) * affordable)
        limit = int(min(slack, payable, length))
        return Room(slack=slack, limit=limit, reason=reason)

    def next(self, observation: Observation, state: AdaptiveState) -> EdgeRound | Plan | Compare:
        """Plan a datacenter round, and compare with the model before it early on."""
        settings = self._settings
        devices_open = observation.open("federated")
        left = not observation.datacenter_ready and state.warm_rounds > 0
        test_due = state.before_devices or left or state.warm_rounds >= settings.warm_test
        if not state.warm_accepted and devices_open and test_due:
            result = self._comparisons.result(
                observation, state, "warm", (state.warm_reference, CURRENT)
            )
            if isinstance(result, Compare):
                return result
            # Without a clear gain it begins cold: the warm start has to prove its use.
            if isinstance(result, str) or not result.beats(CURRENT, settings.error):
                reference = state.warm_reference
                outcome = (
                    result if isinstance(result, str) else in_words(result, CURRENT, reference)
                )
                begins = "it begins cold" if reference == INITIAL else "back to the one before"
                # One that left before its test was due has not failed it.
                early = left and state.warm_rounds < settings.warm_test
                cold = _interrupted(state) if early else dataclasses.replace(state, phase="edge")
                why = f"after {state.warm_rounds} warm rounds {outcome}: {begins}"
                return EdgeRound(cold, why, start=reference)
            state = dataclasses.replace(state, warm_accepted=True, pending_comparison="")
        flat = evidence.flat_rounds(observation)
        plateau = flat >= settings.plateau and state.warm_rounds >= state.min_warm_rounds
        # The model is kept with the last warm round, so that its name says that the warm start is
        # over.
        ended = state.before_devices or WARM in observation.models
        if devices_open and ended:
            why = f"the warm start ends after {state.warm_rounds} rounds"
            return EdgeRound(dataclasses.replace(state, phase="edge"), why)
        if devices_open and not observation.datacenter_ready:
            why = f"the datacenter left after {state.warm_rounds} rounds of the warm start"
            return EdgeRound(_interrupted(state), why)
        limit_reached = state.warm_rounds >= state.max_warm_rounds
        if not devices_open and (limit_reached or (state.before_devices and plateau)):
            return EdgeRound(state, OUTSIDE_OF_HOURS)
        return self._round(state, flat if plateau else 0)

    def _round(self, state: AdaptiveState, flat_rounds: int) -> Plan:
        """Plan a warm round; `flat_rounds` is 0 unless the held-out loss has stopped to fall."""
        round_ = state.warm_rounds + 1
        last = state.warm_accepted and (flat_rounds or round_ >= state.max_warm_rounds)
        why = (
            "outside of the devices' hours"
            if state.before_devices
            else "which take nothing from the devices"
        )
        if flat_rounds:
            why += f"; the held-out loss has been flat for {flat_rounds} rounds"
        return Plan(
            "datacenter",
            f"warm round {round_} of at most {state.max_warm_rounds}, {why}",
            dataclasses.replace(state, warm_rounds=round_).to_json(),
            keep={WARM: CURRENT} if last else {},
        )


def _interrupted(state: AdaptiveState) -> AdaptiveState:
    """Wait for a datacenter that makes the rest of the warm start, or none if nothing is left."""
    rest = state.max_warm_rounds - state.warm_rounds
    return dataclasses.replace(
        state, phase="edge", missed_warm_start=rest > 0, max_warm_rounds=rest
    )
