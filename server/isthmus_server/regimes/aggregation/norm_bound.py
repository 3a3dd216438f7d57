"""The weighted mean of updates whose 2-norm is bounded (Sun et al. 2019).

A device cannot move the model further than its share of the weights times twice the bound, whatever
it sends: its weight is at most the examples that it declared when it opened the run.

Source: Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan: Can You Really Backdoor Federated Learning?
2019, section 3 ("norm thresholding of updates"), without the paper's noise, which `[privacy]` adds.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from isthmus.job import parse_settings
from isthmus.job.federated import FederatedSection
from isthmus.job.section import Section
from isthmus_server.model.fixed_point_sum import TILE, WeightedSum
from isthmus_server.regimes.aggregation.rule import AggregatedRound, SingleUpdate


class NormBoundSettings(Section):
    """Settings of `norm-bound`."""

    norm: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Largest 2-norm of an update, of all that is exchanged; a longer one is scaled down to it."""


class BoundedSum:
    """A round that adds each update when it arrives; memory for one sum and one update.

    The sum is in fixed point, so that the order of arrival does not change the result.
    """

    def __init__(self, facts: AggregatedRound, norm: float) -> None:
        """Zeros; `norm` bounds each update."""
        self._norm = norm
        self._total = WeightedSum(facts.size, sum(max(1, each) for each in facts.cohort.values()))

    def add(self, update: SingleUpdate) -> None:
        """Scale an update to the bound, and add it with its weight."""
        vector = update.vector
        length = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        if length > self._norm:
            vector.mul_(self._norm / length)
        self._total.reserve(update.examples)
        for start in range(0, len(vector), TILE):
            self._total.add(start, vector[start : start + TILE], update.examples)

    def result(self) -> torch.Tensor:
        """The mean weighted by examples, float32 (N)."""
        return self._total.mean()


class NormBound:
    """Bounds each update; it uses them one by one."""

    needs_all = False

    def __init__(self, federated: FederatedSection) -> None:
        """Read the bound.

        Raises:
            JobError: there is none, or it is not a positive number.
        """
        table = federated.aggregation_settings
        self.norm = parse_settings(NormBoundSettings, table, "federated.aggregation_settings").norm

    def begin(self, facts: AggregatedRound) -> BoundedSum:
        """Begin a round."""
        return BoundedSum(facts, self.norm)
