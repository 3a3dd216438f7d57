"""Rounds with devices: the plan that follows from the datacenter's role and the step size."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import get_args

from isthmus.job import StrategySection
from isthmus.job.section import Day
from isthmus.job.strategy import Window
from isthmus_server.strategy.policies.adaptive import budget_plan, evidence
from isthmus_server.strategy.policies.adaptive.datacenter_role import DatacenterRole, RoleChooser
from isthmus_server.strategy.policies.adaptive.state import (
    FORK,
    WARM,
    WITH_GRADIENT,
    AdaptiveSettings,
    AdaptiveState,
)
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
        self, settings: AdaptiveSettings, roles: RoleChooser, strategy: StrategySection
    ) -> None:
        self._settings = settings
        self._roles = roles
        self._edge_share = strategy.target_edge_share
        self._windows = _most_windows(strategy.windows)

    def plan(self, observation: Observation, round_: EdgeRound) -> Plan:
        """Return the plan of a round with devices."""
        settings = self._settings
        state = dataclasses.replace(round_.state, pending_comparison="")
        state, role = self._role(observation, state, round_.role)
        keep = FORK if state.race.branch == "fork" else round_.keep
        scale, why_scale = self._step_size(observation, state)
        transfer = role.transfer_weight > 0
        hybrid = transfer or role.trains
        cost_share = settings.parallel_share if role.trains else settings.transfer_share
        reason = f"the devices hold {self._edge_share:.0%} of the target{role.reason}{why_scale}"
        return Plan(
            "hybrid" if hybrid else "federated",
            f"{round_.why}; {reason}" if round_.why else reason,
            dataclasses.replace(state, edge_rounds=state.edge_rounds + 1).to_json(),
            merge="transfer" if transfer else "weighted" if role.trains else None,
            transfer_weight=role.transfer_weight if transfer else None,
            datacenter_weights=role.datacenter_weights if transfer else {},
            datacenter_steps=(
                budget_plan.affordable_steps(observation, cost_share)
                if hybrid or role.measures
                else None
            ),
            start=round_.start,
            reset_optimizer=round_.start in (WARM, INITIAL, FORK, WITH_GRADIENT),
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

    def _step_size(self, observation: Observation, state: AdaptiveState) -> tuple[float, str]:
        """Return the factor on the server's step: half of it for devices that forget.

        So it is from the start for devices that have several windows a day. Where these are of
        other devices, whole steps in the first window take the model so far that half steps later
        do not make up for it.
        """
        scale, loss_ratio = state.step_scale, evidence.peak_device_loss_ratio(observation)
        if self._windows > 1:
            scale *= self._settings.damped
            return scale, f"; they have {self._windows} windows a day: steps x {scale:g}"
        if loss_ratio <= self._settings.forgotten:
            return scale, ""
        scale *= self._settings.damped
        return scale, f"; their loss rose to {loss_ratio:.2g} times the first: steps x {scale:g}"


def _most_windows(windows: Sequence[Window]) -> int:
    """The most windows of devices that open on one day of the week.

    Without those within another one of the day, in which no other devices come.
    """
    opened: dict[str, set[_Times]] = {}
    for window in windows:
        if window.side == "federated":
            for day in window.days or get_args(Day):
                opened.setdefault(day, set()).add((window.opens, window.closes))
    return max((_outermost(times) for times in opened.values()), default=0)


_Times = tuple[str, str]
"""When a window opens and closes."""


def _outermost(times: Collection[_Times]) -> int:
    """How many windows of a day are not within another one.

    >>> _outermost([("06:00", "12:00"), ("08:00", "09:00"), ("22:00", "06:00"), ("23:00", "02:00")])
    2
    """
    return sum(not any(_is_within(one, other) for other in times) for one in times)


def _is_within(one: _Times, other: _Times) -> bool:
    """Whether a window is within another one that opens on the same day."""
    (opens, closes), (first, last) = one, other
    if first == last:  # all day
        return opens != closes or opens > first
    return one != other and first <= opens and (closes <= opens, closes) <= (last <= first, last)
