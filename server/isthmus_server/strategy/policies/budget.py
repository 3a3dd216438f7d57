"""Train on the edge until its resources are nearly used up, then in the datacenter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.job import RegimeName, StrategySection
from isthmus.job.section import Section
from isthmus_server.strategy.policy import Observation, Plan, settings_of


class BudgetSettings(Section):
    """`[strategy.settings]` of the budget policy."""

    first: RegimeName = "federated"
    """The regime while every limit has more than the reserve left."""
    then: RegimeName = "datacenter"
    """The regime from then on."""
    reserve: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Part of each limit (budget, device_bytes) that is kept for the second regime."""


class Budget:
    """One regime while every limit has more than a reserve left, and then another one."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, BudgetSettings)
        self.regimes = (self.settings.first, self.settings.then)

    def plan(self, observation: Observation) -> Plan:
        """Compare the rest of each limit with its initial value."""
        settings = self.settings
        left = {
            "the budget": observation.budget_left,
            "the bytes of devices": observation.bytes_left,
        }
        limits = {name: value for name, value in left.items() if value is not None}
        # As they were at the first decision: a run that is resumed would otherwise measure the
        # reserve by what is left.
        initial = {**limits, **observation.state.get("initial", {})}
        for name, value in limits.items():
            if value <= settings.reserve * initial[name]:
                return Plan(
                    settings.then,
                    f"{value:.4g} of {initial[name]:.4g} is left of {name}, and "
                    f"{settings.reserve:.0%} is kept back",
                    {"initial": initial},
                )
        listed = ", ".join(
            f"{value:.4g} of {initial[name]:.4g} of {name}" for name, value in limits.items()
        )
        reason = f"{listed} is left" if listed else "the job sets no limit"
        return Plan(settings.first, reason, {"initial": initial})
