"""Switch to the other regime whenever the held-out metric stops improving."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.job import RegimeName, StrategySection
from isthmus.job.section import Section
from isthmus_server.strategy.observation import metric_of
from isthmus_server.strategy.policy import Observation, Plan, settings_of


class PlateauSettings(Section):
    """`[strategy.settings]` of the plateau policy."""

    metric: str = "loss"
    """A central held-out figure; lower is better."""
    patience: Annotated[int, Field(ge=1)] = 3
    """Evaluated rounds without improvement that are a plateau."""
    improvement: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Part of the best figure so far by which a round must be better to count."""
    first: RegimeName = "datacenter"
    """The regime to begin with."""
    then: RegimeName = "federated"
    """The regime to switch to on a plateau; on the next one the policy switches back."""


class Plateau:
    """Switches regimes on plateaus of the held-out metric."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, PlateauSettings)
        self.regimes = (self.settings.first, self.settings.then)
        self.metric = self.settings.metric

    def plan(self, observation: Observation) -> Plan:
        """Look for a plateau in the evaluated rounds since the last switch."""
        settings = self.settings
        state = observation.state
        regime: RegimeName = state.get("regime", settings.first)
        since = state.get("since", 0)
        values = [
            metric_of(past, settings.metric, "strategy.settings.metric")
            for past in observation.history
            # Only since the last switch: the other regime's figures say nothing of this one.
            if past.metrics and past.round > since
        ]
        best, idle = _best(values, settings.improvement)
        if idle >= settings.patience:
            other = settings.then if regime == settings.first else settings.first
            return Plan(
                other,
                f"{settings.metric} has not fallen below {best:.4g} by "
                f"{settings.improvement:.0%} in {idle} evaluated {regime} rounds",
                {"regime": other, "since": observation.round - 1},
            )
        status = f"{settings.metric} is {best:.4g} at best" if values else "it begins"
        return Plan(
            regime,
            f"{status}, and a plateau is {settings.patience} rounds without a fall",
            {"regime": regime, "since": since},
        )


def _best(values: list[float], improvement: float) -> tuple[float, int]:
    """Return the last figure that was an improvement, and how many figures followed it."""
    best = float("inf")
    idle = 0
    for value in values:
        # A part of the magnitude, as a figure may be negative.
        if value < best - improvement * abs(best) or best == float("inf"):
            best = value
            idle = 0
        else:
            idle += 1
    return best, idle
