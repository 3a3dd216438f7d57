"""Rounds with devices: the plan that follows from the datacenter's role and the step size."""

from __future__ import annotations

import dataclasses

from isthmus.job import StrategySection
from isthmus_server.strategy.policies.adaptive import budget_plan
from isthmus_server.strategy.policies.adaptive.datacenter_role import DatacenterRole, RoleChooser
from isthmus_server.strategy.policies.adaptive.state import (
    COLD,
    FORK,
    WARM,
    WITH_GRADIENT,
    AdaptiveSettings,
    AdaptiveState,
)
from isthmus_server.strategy.policies.adaptive.step_size import StepSize
from isthmus_server.strategy.policy import CURRENT, INITIAL, Observation, Plan


@dataclasses.dataclass(frozen=True)
class EdgeRound:
    """The next round is one with devices."""

    state: AdaptiveState
    why: str = ""
    """What led to it, before the reason for the datacenter's role."""
    start: str = CURRENT
    keep: str = ""
    """Name under which the model is kept after the round."""
    role: DatacenterRole | None = None
    """The datacenter's role; None to choose it by the declared target."""


class EdgePlanner:
    """Plans rounds with devices."""

    def __init__(
        self,
        settings: AdaptiveSettings,
        roles: RoleChooser,
        steps: StepSize,
        strategy: StrategySection,
    ) -> None:
        self._settings = settings
        self._roles = roles
        self._steps = steps
        self._edge_share = strategy.target_edge_share

    def plan(self, observation: Observation, round_: EdgeRound) -> Plan:
        """Return the plan of a round with devices."""
        settings = self._settings
        state = dataclasses.replace(round_.state, pending_comparison="")
        state, role = self._role(observation, state, round_.role)
        keep = FORK if state.race.branch == "fork" else round_.keep
        # A datacenter that comes goes on from this round's model, which it has to beat. What is
        # kept is the file that the round writes anyway.
        if state.missed_warm_start:
            keep = COLD
        scale, why_scale = self._steps.choose(observation, state)
        windows = tuple(sorted({*state.windows, *self._steps.only_window(observation)}))
        transfer = role.transfer_weight > 0
        hybrid = transfer or role.trains
        cost_share = settings.parallel_share if role.trains else settings.transfer_share
        measured = "; both sides' gradients are measured" if role.measures else ""
        share = f"the devices hold {self._edge_share:.0%} of the target"
        reason = f"{share}{role.reason}{measured}{why_scale}"
        return Plan(
            "hybrid" if hybrid else "federated",
            f"{round_.why}; {reason}" if round_.why else reason,
            dataclasses.replace(
                state, edge_rounds=state.edge_rounds + 1, windows=windows
            ).to_json(),
            merge="transfer" if transfer else "weighted" if role.trains else None,
            transfer_weight=role.transfer_weight if transfer else None,
            datacenter_weights=role.datacenter_weights if transfer else {},
            datacenter_steps=(
                budget_plan.affordable_steps(observation, cost_share)
                if hybrid or role.measures
                else None
            ),
            start=round_.start,
            # The momentum is that of the way to another model.
            reset_optimizer=round_.start in (WARM, COLD, INITIAL, FORK, WITH_GRADIENT),
            step_scale=scale,
            measure_gradients=role.measures,
            keep={keep: CURRENT} if keep else {},
        )

    def _role(
        self, observation: Observation, state: AdaptiveState, role: DatacenterRole | None
    ) -> tuple[AdaptiveState, DatacenterRole]:
        if role is not None:
            return state, role
        if not budget_plan.datacenter_available(observation, state.excluded):
            return state, DatacenterRole(", and no datacenter is available")
        if self._edge_share < 1:
            return state, self._roles.by_share(observation, state)
        return self._roles.if_useful(observation, state)
