"""Privacy loss distributions of Gaussian noise: those of dp-accounting, in less time.

The library looks for each of up to millions of points of a distribution by itself, in Python. Here
NumPy looks for all of them, by the same operations; everything else is done by the library.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_Numbers = npt.NDArray[np.float64]

STEP = 1e-4
"""Between two points of a distribution: the library's default."""


class LossDistribution:
    """The privacy loss of Gaussian and Poisson-sampled Gaussian noise together.

    >>> distribution = LossDistribution()
    >>> distribution.add(noise_multiplier=2.0)
    >>> distribution.add_sampled(noise_multiplier=1.0, probability=0.01, steps=100)
    >>> round(distribution.epsilon(1e-5), 3)
    2.085
    """

    def __init__(self, step: float = STEP) -> None:
        from dp_accounting.pld import privacy_loss_distribution

        self._step = step
        self._all = privacy_loss_distribution.identity(value_discretization_interval=step)

    def add(self, noise_multiplier: float) -> None:
        """Compose it with Gaussian noise on a sum."""
        self._all = self._all.compose(_of_step(noise_multiplier, 1.0, self._step))

    def add_sampled(self, noise_multiplier: float, probability: float, steps: int) -> None:
        """Compose it with steps, each with Gaussian noise on the sum over a Poisson sample."""
        one = _of_step(noise_multiplier, probability, self._step)
        self._all = self._all.compose(one.self_compose(steps))

    def epsilon(self, delta: float) -> float:
        """The epsilon of all of it at `delta`; infinity if there is none."""
        return float(self._all.get_epsilon_for_delta(delta))


def _of_step(noise_multiplier: float, probability: float, step: float) -> Any:
    """The library's distribution of one sum."""
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    kinds = [AdjacencyType.REMOVE]
    if probability < 1:  # else to add a member reveals as much as to remove one
        kinds.append(AdjacencyType.ADD)
    return PrivacyLossDistribution(
        *(_mass(noise_multiplier, probability, kind, step) for kind in kinds)
    )


def _mass(noise_multiplier: float, probability: float, adjacency: Any, step: float) -> Any:
    """Its probability mass function, rounded up, if a member is removed or added."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    loss = GaussianPrivacyLoss(
        noise_multiplier, sampling_prob=probability, adjacency_type=adjacency
    )
    bounds = loss.connect_dots_bounds()
    lower = math.floor(bounds.epsilon_lower / step)
    upper = math.ceil(bounds.epsilon_upper / step)
    deltas = _deltas(loss, np.arange(lower, upper + 1) * step)
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, lower, upper, deltas)


def _deltas(loss: Any, epsilons: _Numbers) -> _Numbers:
    """As `loss.get_delta_for_epsilon(epsilons)`: (N) of (N) that increase."""
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    deltas = np.zeros_like(epsilons)
    if loss.sampling_prob == 1:
        reached = np.full_like(epsilons, True, dtype=bool)
    elif loss.adjacency_type == AdjacencyType.ADD:
        reached = epsilons < -math.log1p(-loss.sampling_prob)
    else:
        reached = epsilons > math.log1p(-loss.sampling_prob)
        deltas[~reached] = -np.expm1(epsilons[~reached])
    inside = epsilons[reached]
    points = _points(loss, inside)
    deltas[reached] = loss.mu_upper_cdf(points) - np.exp(inside + loss.mu_lower_log_cdf(points))
    return np.clip(deltas, 0, 1)


def _points(loss: Any, epsilons: _Numbers) -> _Numbers:
    """The largest numbers at which the loss is at least each epsilon: (N) of (N)."""
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    probability = loss.sampling_prob
    adding = loss.adjacency_type == AdjacencyType.ADD
    unsampled = epsilons
    by_library = np.zeros_like(epsilons, dtype=bool)
    if probability < 1:
        signed = -epsilons if adding else epsilons
        # log(exp(signed) / probability + 1 - 1 / probability)
        first = signed + np.log(1 / probability)
        second = np.log(1 / probability - 1)
        # Close to the largest loss, and at 0, the library computes something else.
        by_library = (first - second < 1e-6) | (signed == 0)
        by_library |= np.isclose(signed, math.log(1 - probability), rtol=1e-8, atol=0)
        first[by_library] = second + 1  # any value without a warning
        unsampled = first + np.log1p(-np.exp(second - first))
        if adding:
            unsampled = -unsampled
    points: _Numbers = (
        -0.5 * loss.sensitivity - unsampled * loss.standard_deviation**2 / loss.sensitivity
    )
    if adding:
        points = loss.sensitivity + points
    for place in np.flatnonzero(by_library):
        points[place] = loss.inverse_privacy_loss(epsilons[place])
    return points
