"""A race of two short branches from one model, as a test whether the datacenter's gradient harms.

It is a veto, not a selector: a gain often appears only after more rounds than a branch has. So the
gradient has to be found useful first (`datacenter_role.py`). The race decides for devices whose
public data are not known to be alike and who forget what others taught: it is used only if it is
shown to do no harm, and it is never used again after it is shown to do harm.
"""

from __future__ import annotations

import dataclasses

from isthmus_server.strategy.policies.adaptive import budget_plan, evidence
from isthmus_server.strategy.policies.adaptive.comparisons import Comparisons, in_words
from isthmus_server.strategy.policies.adaptive.datacenter_role import DatacenterRole, RoleChooser
from isthmus_server.strategy.policies.adaptive.edge_rounds import EdgeRound
from isthmus_server.strategy.policies.adaptive.state import (
    FORK,
    WITH_GRADIENT,
    AdaptiveSettings,
    AdaptiveState,
    RaceState,
)
from isthmus_server.strategy.policy import CURRENT, Compare, Observation


class Race:
    """Trains a branch with the gradient and one without it, and has devices compare them."""

    def __init__(
        self, settings: AdaptiveSettings, roles: RoleChooser, comparisons: Comparisons
    ) -> None:
        self._settings = settings
        self._roles = roles
        self._comparisons = comparisons

    def next(self, observation: Observation, state: AdaptiveState) -> EdgeRound | Compare:
        """Return the next round of the race, the comparison at its end, or what follows it."""
        branch = state.race.branch
        rounds = state.race.rounds
        length = self._settings.race_rounds
        # The second branch begins where the first did, at the model that was kept as the fork.
        if branch == "with" and rounds == length:
            branch = "without"
            rounds = 0
        if branch == "fork":
            branch = "with"
        if branch == "with" and not budget_plan.datacenter_available(observation, state.excluded):
            return EdgeRound(_race_later(state), "the test has no datacenter")
        if rounds == length:
            return self._judge(observation, state)
        start = FORK if not rounds else CURRENT
        state = dataclasses.replace(state, race=RaceState(branch, rounds + 1))
        why = f"round {rounds + 1} of {length} of the test {branch} the datacenter's gradient"
        if branch == "without":
            return EdgeRound(state, why, start, role=DatacenterRole(""))
        keep = WITH_GRADIENT if rounds + 1 == length else ""
        role = self._roles.rehearsal(observation, state)
        return EdgeRound(state, why, start, keep, role)

    def _judge(self, observation: Observation, state: AdaptiveState) -> EdgeRound | Compare:
        result = self._comparisons.result(observation, state, "race", (CURRENT, WITH_GRADIENT))
        if isinstance(result, Compare):
            return result
        if isinstance(result, str):
            return EdgeRound(_race_later(state), result)
        outcome = in_words(result, WITH_GRADIENT, CURRENT)
        margin = self._settings.margin
        error = self._settings.error
        if result.is_no_worse(WITH_GRADIENT, margin, error):
            state = dataclasses.replace(
                state, race=RaceState(), uses_gradient=True, gradient_since=observation.round
            )
            return EdgeRound(state, outcome, start=WITH_GRADIENT)
        if result.loses(WITH_GRADIENT, error):
            used = set(observation.datacenter_names) - set(state.excluded)
            worst = evidence.most_opposed(observation, used)
            # Not all of them need be harmful: the race is repeated without the one that pulls the
            # other way.
            if len(used) > 1 and worst is not None:
                left = dataclasses.replace(state, excluded=(*state.excluded, worst))
                outcome += f": the gradient of {worst}, the most opposed one, is not used"
                return EdgeRound(_race_later(left), outcome)
            state = dataclasses.replace(state, race=RaceState(vetoed=True))
            return EdgeRound(state, f"{outcome}: its gradient is not used")
        later = f"{outcome}, which decides nothing: it is tested again later"
        return EdgeRound(_race_later(state), later)


def _race_later(state: AdaptiveState) -> AdaptiveState:
    """Ask again after as many rounds with devices as there were."""
    later = RaceState(not_before=2 * max(state.edge_rounds, 1))
    return dataclasses.replace(state, race=later)
