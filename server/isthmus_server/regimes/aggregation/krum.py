"""Krum and multi-Krum: updates that are close to most others (Blanchard et al. 2017).

Both are unweighted, because a weight is a claim of a device that may be dishonest.

Source: P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer: Machine Learning with Adversaries:
Byzantine Tolerant Gradient Descent. NeurIPS 2017, sections 3 and 5.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from isthmus.errors import JobError, RoundFailed
from isthmus.job import parse_settings
from isthmus.job.federated import FederatedSection
from isthmus.job.section import Section
from isthmus_server.regimes.aggregation.rule import AggregatedRound, SingleUpdate

SETTINGS = "federated.aggregation_settings"


class KrumSettings(Section):
    """Settings of `krum`."""

    faulty: Annotated[int, Field(ge=0)] = 1
    """f: number of updates in a round that may be arbitrary."""


class MultiKrumSettings(KrumSettings):
    """Settings of `multi-krum`."""

    selected: Annotated[int, Field(ge=1)] | None = None
    """m: number of updates in the mean. Default: all but `faulty` of those that arrived."""


class KrumRound:
    """A round that selects the updates with the lowest scores."""

    def __init__(self, faulty: int, selected: int | None) -> None:
        """`selected`: how many are averaged; None for all but `faulty`."""
        self._faulty = faulty
        self._selected = selected
        self._vectors: list[torch.Tensor] = []

    def add(self, update: SingleUpdate) -> None:
        """Keep an update."""
        self._vectors.append(update.vector)

    def result(self) -> torch.Tensor:
        """The mean of the selected updates, float32 (N); equal scores are in the cohort's order."""
        scores = krum_scores(self._vectors, self._faulty)
        count = self._selected or len(self._vectors) - self._faulty
        best = torch.argsort(scores, stable=True)[:count].tolist()
        total = torch.zeros_like(self._vectors[0])
        for at in sorted(best):
            total += self._vectors[at]
        return total.div_(len(best))


def krum_scores(vectors: list[torch.Tensor], faulty: int) -> torch.Tensor:
    """The sum of squared distances from each update to its n - f - 2 nearest ones, float64 (n).

    Args:
        vectors: n updates, float32 (N) each.
        faulty: f.
    """
    n = len(vectors)
    squared = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i):
            # The norm of the difference: large updates would leave nothing of |a|^2 + |b|^2 - 2 ab.
            distance = float(torch.linalg.vector_norm(vectors[i] - vectors[j], dtype=torch.float64))
            squared[i, j] = squared[j, i] = distance * distance
    nearest = squared.sort(dim=1).values[:, 1 : n - faulty - 1]  # the first is the update itself
    return nearest.sum(dim=1)


class MultiKrum:
    """The mean of the updates with the lowest scores; it needs all updates of a round at once."""

    needs_all = True

    def __init__(self, federated: FederatedSection) -> None:
        """Check the settings.

        Raises:
            JobError: a quorum is too small for `faulty`, or for `selected`.
        """
        table = federated.aggregation_settings
        settings = parse_settings(MultiKrumSettings, table, SETTINGS)
        self._bound = KrumBound(federated, settings.faulty, settings.selected)

    def begin(self, facts: AggregatedRound) -> KrumRound:
        """Begin a round.

        Raises:
            RoundFailed: its quorum is too small.
        """
        return self._bound.begin(facts)


class Krum:
    """The one update with the lowest score; it needs all updates of a round at once."""

    needs_all = True

    def __init__(self, federated: FederatedSection) -> None:
        """Check the settings.

        Raises:
            JobError: a quorum is too small for `faulty`.
        """
        settings = parse_settings(KrumSettings, federated.aggregation_settings, SETTINGS)
        self._bound = KrumBound(federated, settings.faulty, 1)

    def begin(self, facts: AggregatedRound) -> KrumRound:
        """Begin a round.

        Raises:
            RoundFailed: its quorum is too small.
        """
        return self._bound.begin(facts)


class KrumBound:
    """The condition n >= 2 f + 3 of the paper's proposition 1, for every round of a run."""

    def __init__(self, federated: FederatedSection, faulty: int, selected: int | None) -> None:
        """Check the job's cohort.

        Raises:
            JobError: its quorum, with which a round may be committed, is too small.
        """
        self._faulty = faulty
        self._selected = selected
        if reason := self._too_small(federated.needed, federated.cohort):
            raise JobError(f"{reason}; raise federated.cohort or federated.quorum, or lower it")

    def begin(self, facts: AggregatedRound) -> KrumRound:
        """Begin a round, with what a policy chose for it.

        Raises:
            RoundFailed: its quorum is too small.
        """
        if reason := self._too_small(facts.quorum, facts.max_updates):
            raise RoundFailed(reason)
        return KrumRound(self._faulty, self._selected)

    def _too_small(self, quorum: int, cohort: int) -> str:
        least = 2 * self._faulty + 3
        if quorum < least:
            return (
                f"{SETTINGS}.faulty={self._faulty} needs at least 2 x {self._faulty} + 3 = {least} "
                f"updates, and a round of federated.cohort={cohort} may have its quorum of {quorum}"
            )
        most = quorum - self._faulty
        if self._selected is not None and self._selected > most:
            return (
                f"{SETTINGS}.selected={self._selected} is above {most}, the updates of a quorum of "
                f"{quorum} (federated.cohort={cohort}) that are not faulty={self._faulty}"
            )
        return ""
