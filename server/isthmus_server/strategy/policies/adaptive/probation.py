"""Check some rounds after a warm start that the devices' training has not done harm.

It is left out where devices have hours: the devices of now may not be those that trained, and a
model of other devices' classes would lose without a reason. Work with devices never ends here,
because they hold the target.
"""

from __future__ import annotations

import dataclasses
import math

from isthmus_server.strategy.policies.adaptive import budget_plan
from isthmus_server.strategy.policies.adaptive.comparisons import Comparisons, in_words
from isthmus_server.strategy.policies.adaptive.edge_rounds import EdgeRound
from isthmus_server.strategy.policies.adaptive.state import (
    WARM,
    AdaptiveSettings,
    AdaptiveState,
    RaceState,
)
from isthmus_server.strategy.policy import SERVED, Compare, Observation


class Probation:
    """Compares the served model with the warm one, and returns to that if it is worse."""

    def __init__(self, settings: AdaptiveSettings, comparisons: Comparisons) -> None:
        self._settings = settings
        self._comparisons = comparisons

    def is_due(self, state: AdaptiveState) -> bool:
        """Return whether the check is due."""
        return state.edge_rounds >= self._settings.probation and not state.probation_over

    def next(self, observation: Observation, state: AdaptiveState) -> EdgeRound | Compare:
        """Return the comparison, or what follows it."""
        done = dataclasses.replace(state, probation_over=True)
        max_price = self._settings.probation_share * (observation.budget_left or math.inf)
        if (
            self._comparisons.price(observation) > max_price
            or WARM not in observation.models
            or budget_plan.has_device_hours(observation)
        ):
            return EdgeRound(done)
        result = self._comparisons.result(observation, state, "probation", (WARM, SERVED))
        if isinstance(result, Compare):
            return result
        if isinstance(result, str):
            return EdgeRound(done, result)
        outcome = in_words(result, SERVED, WARM)
        # Devices have to prove harm here, and not a gain: without a clear answer training goes on.
        if not result.loses(SERVED, self._settings.error):
            return EdgeRound(done, f"probation is over: {outcome}")
        failures = state.failed_probations + 1
        scale = state.step_scale / 2
        failed = dataclasses.replace(
            state,
            edge_rounds=0,
            race=RaceState(vetoed=state.race.vetoed),
            failed_probations=failures,
            step_scale=scale,
            probation_over=failures >= 2,
        )
        why = f"probation is lost: {outcome}; back to it, with steps {scale:g} times as long"
        return EdgeRound(failed, why, start=WARM)
