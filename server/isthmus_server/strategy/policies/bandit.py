"""A bandit on gain per cost: for comparison, and where regimes differ in nothing but their speed.

Measured, greedy gain per cost loses to plans (docs/strategy.md): one round's gain is noisy, what
regimes gain changes as training goes on, and a regime that gains nothing now may be what the other
one builds on.
"""

from __future__ import annotations

import math
import random
from typing import Annotated, Literal

from pydantic import Field

from isthmus.job import RegimeName, StrategySection
from isthmus.job.section import Section
from isthmus_server.strategy.policy import Observation, Plan, settings_of


class Settings(Section):
    """`[strategy.settings]` of this policy."""

    method: Literal["ucb", "thompson"] = "ucb"
    """Discounted UCB (Garivier and Moulines 2011), or Thompson sampling of a normal mean."""
    arms: Annotated[tuple[RegimeName, ...], Field(min_length=2, max_length=3)] = (
        "datacenter",
        "federated",
    )
    """The regimes to choose from."""
    metric: str = "loss"
    """A central held-out figure; its fall per price is the gain."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.9
    """What a gain counts for one decision later."""
    exploration: Annotated[float, Field(ge=0)] = 0.5
    """Width of the bound, in units of the largest gain so far."""
    seed: int = 0
    """Of Thompson's draws."""


class Bandit:
    """The regime with the highest bound (or draw) on its discounted gain per cost."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, Settings)

    def plan(self, observation: Observation) -> Plan:
        """Score each arm from the history alone."""
        gains = _gains(observation, self.settings)
        for arm in self.settings.arms:
            if not any(name == arm for name, _ in gains):
                return Plan(arm, f"no {arm} round has been measured yet")
        scores = {arm: self._score(arm, gains, observation.round) for arm in self.settings.arms}
        best = max(self.settings.arms, key=lambda arm: scores[arm])
        said = ", ".join(f"{arm} {score:.3g}" for arm, score in scores.items())
        return Plan(best, f"its score of gain per cost is the highest ({said})")

    def _score(self, arm: str, gains: list[tuple[str, float]], round_: int) -> float:
        settings = self.settings
        unit = max(abs(gain) for _, gain in gains) or 1.0
        weights = [settings.discount**age for age in range(len(gains) - 1, -1, -1)]
        mine = [
            (w, gain / unit) for w, (name, gain) in zip(weights, gains, strict=True) if name == arm
        ]
        count = sum(weight for weight, _ in mine)
        mean = sum(weight * gain for weight, gain in mine) / count
        if settings.method == "thompson":
            draw = random.Random(f"{settings.seed}/{round_}/{arm}")  # noqa: S311 - not a secret
            return draw.gauss(mean, settings.exploration / math.sqrt(count))
        return mean + settings.exploration * math.sqrt(max(math.log(sum(weights)), 0.0) / count)


def _gains(observation: Observation, settings: Settings) -> list[tuple[str, float]]:
    """The fall of the metric per price of each evaluated round that follows an evaluated one."""
    found: list[tuple[str, float]] = []
    before: float | None = None
    for past in observation.history:
        after = past.metrics.get(settings.metric)
        if before is not None and after is not None and past.regime in settings.arms:
            found.append((past.regime, (before - after) / max(past.price, 1e-9)))
        before = after
    return found
