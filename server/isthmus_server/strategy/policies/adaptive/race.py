"""A race: two short branches from one model, after which devices compare their ends.

It decides whether the datacenter's gradient may influence a model whose whole target is the
devices'. One branch takes the gradient, the other does not. Only a gradient that is shown not to
harm is used: the upper end of a confidence interval of the difference must lie below a margin.

The interval belongs to an asymptotic confidence sequence, which holds at any number of devices, so
that the same race may be judged early or late (Waudby-Smith et al., "Time-uniform central limit
theory and asymptotic confidence sequences", Annals of Statistics 2024, theorem 2.2). It needs only
the mean and the standard error, which is what a secure sum reveals.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from isthmus_server.strategy.policy import Comparison

FORK = "fork"
"""Name of the model from which both branches begin."""
WITH = "with-gradient"
"""Name of the model at the end of the branch that takes the gradient."""

TIGHTEST_DEVICES = 10
"""Number of devices for which the interval is the shortest: a usual comparison."""

Verdict = Literal["harmless", "harmful", "open"]


@dataclasses.dataclass(frozen=True)
class Race:
    """Progress of the races of a run."""

    branch: Literal["", "fork", "with", "without"] = ""
    """The branch that trains now; fork: the next round is the first of a race."""
    rounds: int = 0
    """Rounds of that branch so far."""
    not_before: int = 0
    """The round with devices before which no race begins: after one without an answer."""
    vetoed: bool = False
    """Whether a race has shown that the gradient does harm."""


def radius(comparison: Comparison, model: str, error: float) -> float:
    """Half the length of the confidence interval of a model's difference, at one side.

    Args:
        comparison: the scores.
        model: the model whose difference from the first one is judged.
        error: probability, at any number of devices, that the interval misses the difference.
    """
    shape = -2 * math.log(error) + math.log(1 - 2 * math.log(error))  # equation 22 of the paper
    scaled = comparison.devices * shape / TIGHTEST_DEVICES
    factor = 2 * (scaled + 1) / scaled * math.log(math.sqrt(scaled + 1) / error)
    return comparison.standard_error[model] * math.sqrt(factor)


def verdict(comparison: Comparison, *, margin: float, error: float) -> Verdict:
    """Judge the branch with the gradient, whose scores are compared with the other's."""
    difference, half = comparison.difference[WITH], radius(comparison, WITH, error)
    if difference + half < margin:
        return "harmless"
    return "harmful" if difference - half > 0 else "open"
