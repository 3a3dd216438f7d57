"""Work on the edge until what it uses up is nearly spent, then in the datacenter."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.job import RegimeName, StrategySection
from isthmus.job.section import Section
from isthmus_server.strategy.policy import Observation, Plan, settings_of


class Settings(Section):
    """`[strategy.settings]` of this policy."""

    first: RegimeName = "federated"
    """The regime while there is enough of everything."""
    then: RegimeName = "datacenter"
    """The regime from then on."""
    reserve: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Part of a limit (budget, device_bytes, privacy) that is not to be spent on the first."""


class Budget:
    """One regime while every limit has more than a reserve left, another one afterwards."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, Settings)

    def plan(self, observation: Observation) -> Plan:
        """Compare what is left of each limit with what there was at first."""
        settings = self.settings
        left = {
            "the budget": observation.left,
            "the bytes of devices": observation.bytes_left,
            "the privacy budget": observation.epsilon_left,
        }
        limits = {name: value for name, value in left.items() if value is not None}
        had = {**limits, **observation.state.get("had", {})}
        for name, value in limits.items():
            if value <= settings.reserve * had[name]:
                return Plan(
                    settings.then,
                    f"{value:.4g} of {had[name]:.4g} is left of {name}, and "
                    f"{settings.reserve:.0%} is kept back",
                    {"had": had},
                )
        said = ", ".join(
            f"{value:.4g} of {had[name]:.4g} of {name}" for name, value in limits.items()
        )
        reason = f"there is left {said}" if said else "the job sets no limit"
        return Plan(settings.first, reason, {"had": had})
