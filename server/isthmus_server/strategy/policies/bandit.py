"""A bandit on gain per cost: a baseline, and for regimes that differ only in speed.

In measurements, greedy gain per cost is worse than planning (docs/strategy.md): the gain of one
round is noisy, the gains of the regimes change during training, and a regime that gains nothing now
may be the basis for gains of the other one.
"""

from __future__ import annotations

import math
import random
from typing import Annotated, Literal

from pydantic import Field

from isthmus.job import RegimeName, StrategySection
from isthmus.job.section import Section
from isthmus_server.strategy.observation import metric_of
from isthmus_server.strategy.policy import Observation, Plan, settings_of


class BanditSettings(Section):
    """`[strategy.settings]` of the bandit policy."""

    method: Literal["ucb", "thompson"] = "ucb"
    """Discounted UCB (Garivier and Moulines 2011), or Thompson sampling of a normal mean."""
    arms: Annotated[tuple[RegimeName, ...], Field(min_length=2, max_length=3)] = (
        "datacenter",
        "federated",
    )
    """The regimes to choose from."""
    metric: str = "loss"
    """A central held-out figure; its decrease per price is the gain."""
    discount: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Factor on the weight of a gain per later decision."""
    exploration: Annotated[float, Field(ge=0)] = 0.5
    """Width of the confidence bound, in units of the largest gain so far."""
    seed: int = 0
    """Seed of Thompson sampling."""


class Bandit:
    """Selects the regime with the highest bound (or sample) of its discounted gain per cost."""

    def __init__(self, strategy: StrategySection) -> None:
        self.settings = settings_of(strategy, BanditSettings)
        self.regimes = self.settings.arms
        self.metric = self.settings.metric

    def plan(self, observation: Observation) -> Plan:
        """Score each arm from the history."""
        gains = _gains(observation, self.settings)
        # Each at least once: an arm without a measurement has no score.
        for arm in self.settings.arms:
            if not any(name == arm for name, _ in gains):
                return Plan(arm, f"no {arm} round has been measured yet")
        scores = {arm: self._score(arm, gains, observation.round) for arm in self.settings.arms}
        best = max(self.settings.arms, key=lambda arm: scores[arm])
        listed = ", ".join(f"{arm} {score:.3g}" for arm, score in scores.items())
        return Plan(best, f"its score of gain per cost is the highest ({listed})")

    def _score(self, arm: str, gains: list[tuple[str, float]], round_: int) -> float:
        settings = self.settings
        # In units of the largest gain, so that the exploration does not depend on the scale of the
        # metric.
        unit = max(abs(gain) for _, gain in gains) or 1.0
        weights = [settings.discount**age for age in range(len(gains) - 1, -1, -1)]
        arm_gains = [
            (weight, gain / unit)
            for weight, (name, gain) in zip(weights, gains, strict=True)
            if name == arm
        ]
        count = sum(weight for weight, _ in arm_gains)
        mean = sum(weight * gain for weight, gain in arm_gains) / count
        if settings.method == "thompson":
            # From the round and not from a generator that goes on: the same observation has the
            # same answer, also after a crash.
            rng = random.Random(f"{settings.seed}/{round_}/{arm}")  # noqa: S311 - not a secret
            return rng.gauss(mean, settings.exploration / math.sqrt(count))
        return mean + settings.exploration * math.sqrt(max(math.log(sum(weights)), 0.0) / count)


def _gains(observation: Observation, settings: BanditSettings) -> list[tuple[str, float]]:
    """Return the metric's decrease per price of each evaluated round that follows another."""
    gains: list[tuple[str, float]] = []
    before: float | None = None
    for past in observation.history:
        if not past.metrics:
            before = None
            continue
        after = metric_of(past, settings.metric, "strategy.settings.metric")
        if before is not None and past.regime in settings.arms:
            gains.append((past.regime, (before - after) / max(past.price, 1e-9)))
        before = after
    return gains
