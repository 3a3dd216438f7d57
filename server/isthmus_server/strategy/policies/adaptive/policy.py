"""Plan from the declared target and budget, and test each step that could harm the model.

The share of the target that lives on the devices (`strategy.target_edge_share`, pi) selects the
regime. Measurements on devices and on held-out public data decide what the declaration leaves
open::

    pi = 0        datacenter rounds
    0 < pi < 1    hybrid rounds by one-way gradient transfer (Augenstein et al. 2022). The weight
                  follows from pi and is bounded by the ratio of both sides' gradients at one
                  model. If public data prove to differ from the devices', every other round trains
                  in parallel, and every round does if devices also forget what others taught
    pi = 1        federated rounds, after a warm start in the datacenter if it replaces none:

    start --slack, or devices closed--> warm --beats the initial model--> warm on --limit--> edge
      |                                  +--does not: the initial model again-----------------^
      +--neither------------------------------------------------------------------------------^

    edge, no datacenter   it was not there for a warm start, or left: once it is, and if rounds are
                          still to spare, the warm start (or its rest) begins from the current model
                          and has to beat that
    edge, probation       after some rounds the served model must not lose to the warm one. If it
                          does, training returns to the warm model with zero momentum and half
                          steps; after the second time quarter steps, and no further tests
    edge, gradient used   once what devices learn also holds for public data they apply the
                          datacenter's gradient. If they forget what others taught, steps are half
                          as long, and they do so only if a race shows that it does no harm
    edge, in turns        with several windows a day other devices may come in each: steps are half
                          as long until those of another window show that they forgot little. If
                          they forget, the datacenter trains in parallel
    edge, devices closed  the round waits for their window

With `objective = "time"` or `"cost"` and pi = 1 there is no warm start and no probation:
`target_planner` chooses the side, by forecasts of the target metric to the end of the run, and
where these are unsure by the rates at which both sides approach it.

The parts: `warm_start`, `datacenter_role` (weight of the gradient), `race` (veto), `probation`,
`step_size`, `edge_rounds` (the plan), over `budget_plan` and `evidence`. Phases only move
forward, so the policy cannot oscillate. For the best quality, greedy gain per cost is not a
criterion (docs/strategy.md says why).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from isthmus.job import StrategySection
from isthmus_server.strategy.policies.adaptive import budget_plan
from isthmus_server.strategy.policies.adaptive.comparisons import Comparisons
from isthmus_server.strategy.policies.adaptive.datacenter_role import RoleChooser
from isthmus_server.strategy.policies.adaptive.edge_rounds import EdgePlanner, EdgeRound
from isthmus_server.strategy.policies.adaptive.probation import Probation
from isthmus_server.strategy.policies.adaptive.race import Race
from isthmus_server.strategy.policies.adaptive.state import AdaptiveSettings, AdaptiveState
from isthmus_server.strategy.policies.adaptive.step_size import StepSize
from isthmus_server.strategy.policies.adaptive.target_planner import TargetPlanner
from isthmus_server.strategy.policies.adaptive.warm_start import OUTSIDE_OF_HOURS, WarmStart
from isthmus_server.strategy.policy import Answer, Kind, Observation, Plan, settings_of


class Adaptive:
    """The policy that the module's docstring describes."""

    def __init__(self, strategy: StrategySection) -> None:
        settings = settings_of(strategy, AdaptiveSettings)
        comparisons = Comparisons(settings)
        steps = StepSize(settings, strategy)
        roles = RoleChooser(settings, steps, strategy)
        self.edge_share = strategy.target_edge_share
        self._warm_start = WarmStart(settings, comparisons)
        self._race = Race(settings, roles, comparisons)
        self._probation = Probation(settings, comparisons)
        self._edge = EdgePlanner(settings, roles, steps, strategy)
        quality = strategy.objective == "quality"
        self._target = None if quality else TargetPlanner(settings, strategy)
        self.regimes = self._certain_regimes()

    def _certain_regimes(self) -> tuple[Kind, ...]:
        """The regimes without which it cannot end a run.

        Where it needs devices they can train without a datacenter, so `hybrid` is not among them.
        With another objective than quality the datacenter alone may reach the target.
        """
        if self.edge_share == 0:
            return ("datacenter",)
        return () if self._target is not None and self.edge_share == 1 else ("federated",)

    @staticmethod
    def state_in_words(state: Mapping[str, Any]) -> list[str]:
        """See `isthmus_server.strategy.loading.state_in_words`."""
        return AdaptiveState.from_json(state).in_words()

    def plan(self, observation: Observation) -> Answer:
        """Make one step of the state machine in the module's docstring."""
        state = AdaptiveState.from_json(observation.state)
        if self.edge_share == 0:
            reason = "none of the target lives on the devices"
            return Plan("datacenter", reason, state.to_json())
        step = self._step(observation, state)
        return self._edge.plan(observation, step) if isinstance(step, EdgeRound) else step

    def _step(self, observation: Observation, state: AdaptiveState) -> EdgeRound | Answer:
        if self._target is not None and self.edge_share == 1 and not state.race.branch:
            return self._towards_target(self._target, observation, state)
        if state.phase == "start":
            if self.edge_share == 1:
                return self._warm_start.begin(observation, state)
            state = dataclasses.replace(state, phase="edge")
        if state.phase == "warm":
            return self._warm_start.next(observation, state)
        if not observation.open("federated"):  # the limits delay it until their window opens
            return EdgeRound(state, OUTSIDE_OF_HOURS)
        if state.missed_warm_start and budget_plan.datacenter_available(observation):
            return self._warm_start.begin_late(observation, state)
        if state.race.branch:
            return self._race.next(observation, state)
        if self._probation.is_due(state):
            return self._probation.next(observation, state)
        return EdgeRound(state)

    def _towards_target(
        self, planner: TargetPlanner, observation: Observation, state: AdaptiveState
    ) -> EdgeRound | Plan:
        target, why = planner.choose(observation, state)
        state = dataclasses.replace(state, phase="edge", target=target)
        if target.side == "datacenter":
            return Plan("datacenter", why, state.to_json())
        return EdgeRound(state, why)
