"""Rules that aggregate each element by itself: the median and the trimmed mean (Yin et al. 2018).

Both are unweighted, because a weight is a claim of a device that may be dishonest.

Source: D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates. ICML 2018, definitions 1 and 2.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field

from isthmus.errors import JobError, RoundFailed
from isthmus.job import parse_settings
from isthmus.job.federated import FederatedSection
from isthmus.job.section import Section
from isthmus_server.model.fixed_point_sum import TILE
from isthmus_server.regimes.aggregation.rule import AggregatedRound, SingleUpdate

SETTINGS = "federated.aggregation_settings"


class SortedColumns:
    """A round whose result is computed from the sorted values of each element."""

    def __init__(self, facts: AggregatedRound, combine: Callable[[torch.Tensor], torch.Tensor]):
        """`combine` maps values (n, columns), ascending in each column, to (columns)."""
        self._size = facts.size
        self._combine = combine
        self._vectors: list[torch.Tensor] = []

    def add(self, update: SingleUpdate) -> None:
        """Keep an update."""
        self._vectors.append(update.vector)

    def result(self) -> torch.Tensor:
        """The combined values, float32 (N); sorted tile by tile, so that no copy of all is made."""
        out = torch.empty(self._size)
        for start in range(0, self._size, TILE):
            tile = torch.stack([vector[start : start + TILE] for vector in self._vectors])
            out[start : start + TILE] = self._combine(tile.sort(dim=0).values)
        return out


class CoordinateWise(abc.ABC):
    """A rule for each element; it needs all updates of a round at once."""

    needs_all = True

    def begin(self, facts: AggregatedRound) -> SortedColumns:
        """Begin a round."""
        return SortedColumns(facts, self.combine)

    @abc.abstractmethod
    def combine(self, ordered: torch.Tensor) -> torch.Tensor:
        """Values (columns) of values (n, columns) that ascend in each column."""


class MedianSettings(Section):
    """Settings of `median`: none."""


class Median(CoordinateWise):
    """The median of each element; of an even number, the mean of the two in the middle."""

    def __init__(self, federated: FederatedSection) -> None:
        """Check that there are no settings.

        Raises:
            JobError: there are.
        """
        parse_settings(MedianSettings, federated.aggregation_settings, SETTINGS)

    def combine(self, ordered: torch.Tensor) -> torch.Tensor:
        """See `CoordinateWise.combine`.

        >>> Median(FederatedSection()).combine(torch.tensor([[1.0], [2.0], [4.0], [900.0]]))
        tensor([3.])
        """
        n = len(ordered)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


class NothingTrimmed(JobError):
    """A share of a quorum of updates is less than one update."""

    def __init__(self, sentence: str, share: float) -> None:
        """`sentence` is what to show, and `share` the one that is too small."""
        super().__init__(sentence)
        self.share = share


class TrimmedMeanSettings(Section):
    """Settings of `trimmed-mean`."""

    share: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.2
    """Part of the updates whose values are left out at each end, of each element."""


class TrimmedMean(CoordinateWise):
    """The mean of each element without its largest and smallest values."""

    def __init__(self, federated: FederatedSection) -> None:
        """Check the share.

        Raises:
            JobError: it leaves nothing.
            NothingTrimmed: it trims nothing from a quorum of updates.
        """
        table = federated.aggregation_settings
        self.share = parse_settings(TrimmedMeanSettings, table, SETTINGS).share
        if self.share >= 0.5:
            raise JobError(
                f"{SETTINGS}.share={self.share:g} is left out at each end, which leaves nothing; "
                "it must be below 0.5"
            )
        if reason := self._unprotected(federated.needed):
            what = "raise it, federated.quorum or federated.cohort"
            raise NothingTrimmed(f"{reason}; {what}", self.share)

    def begin(self, facts: AggregatedRound) -> SortedColumns:
        """Begin a round.

        Raises:
            RoundFailed: nothing would be trimmed from so few updates.
        """
        if reason := self._unprotected(facts.quorum):
            raise RoundFailed(reason)
        return super().begin(facts)

    def combine(self, ordered: torch.Tensor) -> torch.Tensor:
        """See `CoordinateWise.combine`.

        >>> rule = TrimmedMean(FederatedSection(aggregation_settings={"share": 0.25},
        ...     aggregation="trimmed-mean", secure_aggregation=False))
        >>> rule.combine(torch.tensor([[-7.0], [1.0], [2.0], [900.0]]))
        tensor([1.5000])
        """
        trimmed = self._trimmed(len(ordered))
        return ordered[trimmed : len(ordered) - trimmed].mean(dim=0)

    def _trimmed(self, updates: int) -> int:
        """Values left out at each end; the small term is for shares such as 0.29 x 100."""
        return math.floor(self.share * updates + 1e-9)

    def _unprotected(self, quorum: int) -> str:
        if self._trimmed(quorum):
            return ""
        return (
            f"{SETTINGS}.share={self.share:g} of a quorum of {quorum} updates is less than one "
            "update, so that nothing would be left out"
        )
