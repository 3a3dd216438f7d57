"""Find the noise of a run from its budget, before anything runs.

>>> plan = NoisePlan.of(PrivacySection(mechanism="gaussian", epsilon=8, delta=1e-6), rounds=100)
>>> round(plan.multiplier, 3), round(plan.epsilon(100), 3), round(plan.epsilon(10), 3)
(6.533, 7.995, 2.175)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from isthmus.errors import JobError
from isthmus.job.privacy import DatacenterPrivacy, PrivacySection
from isthmus_privacy.dp.accounting import (
    WHOLE_ORDERS,
    Composition,
    CorrelatedGaussian,
    Event,
    Gaussian,
    SampledGaussian,
    ZeroConcentrated,
    epsilon_of_rho,
)
from isthmus_privacy.dp.correlated import CorrelatedNoise

if TYPE_CHECKING:
    from isthmus.job import Job

LARGEST_NOISE = 1e4
"""Largest noise multiplier that is looked for: with more, nothing can be learned."""

_CLOSE = 1e-9
_SMALLEST_SAMPLED = 2.0**-7
_RENYI_EXCESS = 1.4
"""Rényi differential privacy asks for at most so much more noise."""
_MARGIN = 1.0005
"""The accountant rounds up: by less than this in the noise."""


@dataclasses.dataclass(frozen=True)
class NoisePlan:
    """The noise of all rounds of a run with devices."""

    privacy: PrivacySection
    participations: int
    """Most rounds that one device is asked for."""
    multiplier: float
    """Noise multiplier; see `PrivacySection.noise`."""
    correlated: CorrelatedNoise | None = None

    @classmethod
    def of(cls, privacy: PrivacySection, rounds: int) -> Self:
        """The plan of a job.

        Raises:
            JobError: no noise meets the budget, or the job's noise does not.
        """
        participations = privacy.most_rounds(rounds)
        matrix = None
        if privacy.mechanism == "correlated":
            matrix = CorrelatedNoise.best(
                rows=rounds, separation=privacy.separation, participations=participations
            )
        if privacy.noise is not None:
            return cls(privacy, participations, privacy.noise, matrix)
        times = 1 if matrix is not None else participations
        find = _of_distributed if privacy.mechanism == "distributed" else _of_gaussian
        multiplier = find(privacy.epsilon, privacy.delta) * math.sqrt(times)
        if not multiplier <= LARGEST_NOISE:
            raise JobError(
                f"privacy.epsilon={privacy.epsilon:g} at delta={privacy.delta:g} in "
                f"{participations} rounds of a device would need noise of {multiplier:.3g} times "
                "the clipping bound; raise epsilon, or lower participations or rounds"
            )
        return cls(privacy, participations, multiplier, matrix)

    def event(self, run: str) -> Event:
        """What one round of a run is charged as."""
        if self.correlated is not None:
            return CorrelatedGaussian(self.multiplier, run)
        if self.privacy.mechanism == "distributed":
            return ZeroConcentrated(1 / (2 * self.multiplier**2))
        return Gaussian(self.multiplier)

    def epsilon(self, rounds: int) -> float:
        """Epsilon of a device after so many of its rounds."""
        times = min(rounds, self.participations)
        return Composition().plus(self.event(""), times).epsilon(self.privacy.delta) if times else 0

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise in the sum of a round, in units of the parameters.

        With correlated noise that of one draw, which later rounds take a part back of.
        """
        unit = self.multiplier * self.privacy.clip
        return unit if self.correlated is None else unit * self.correlated.sensitivity

    def noise_to_signal(self, size: int, clients: int) -> float:
        """2-norm of a round's noise over that of the sum, if all updates are equal and clipped.

        Args:
            size: N, elements of an update.
            clients: devices in the sum.
        """
        return self.deviation * math.sqrt(size) / (clients * self.privacy.clip)


@dataclasses.dataclass(frozen=True)
class SampledNoisePlan:
    """The noise of DP-SGD on a datacenter's examples."""

    privacy: DatacenterPrivacy
    multiplier: float
    """Noise multiplier; see `DatacenterPrivacy.noise`."""
    probability: float
    """With which an example is in a step."""

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """The plan of a job; None without `[datacenter.privacy]`.

        Raises:
            JobError: no noise meets the budget.
        """
        section = job.datacenter
        privacy = section.privacy
        if privacy is None:
            return None
        probability = section.private_batch / privacy.examples
        if privacy.noise is not None:
            return cls(privacy, privacy.noise, probability)
        steps = privacy.steps or job.rounds * section.steps
        multiplier = _of_sampled(privacy.epsilon, privacy.delta, probability, steps)
        if multiplier is None:
            raise JobError(
                f"datacenter.privacy.epsilon={privacy.epsilon:g} at delta={privacy.delta:g} in "
                f"{steps} steps would need noise of more than {LARGEST_NOISE:g} times the clipping "
                "bound; raise epsilon, or lower batch_size, steps or rounds"
            )
        return cls(privacy, multiplier, probability)

    def event(self, steps: int) -> SampledGaussian:
        """What so many steps are charged as."""
        return SampledGaussian(self.multiplier, self.probability, steps)

    def epsilon(self, steps: int) -> float:
        """Epsilon of an example after so many steps."""
        return Composition().plus(self.event(steps)).epsilon(self.privacy.delta) if steps else 0.0


@functools.lru_cache(maxsize=64)  # it takes seconds
def _of_sampled(epsilon: float, delta: float, probability: float, steps: int) -> float | None:
    """The least noise multiplier of steps of DP-SGD, to 0.5 %; None if it is too large.

    Bounded by Rényi differential privacy, which is fast for any noise and needs a little too much,
    and from there by the accountant of the ledger.
    """
    import dp_accounting

    def fits(multiplier: float) -> bool:
        gaussian = dp_accounting.GaussianDpEvent(multiplier)
        step = dp_accounting.PoissonSampledDpEvent(probability, gaussian)
        accountant = dp_accounting.rdp.RdpAccountant(orders=WHOLE_ORDERS)
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
        return bool(accountant.get_epsilon(delta) <= epsilon)

    def fits_ledger(multiplier: float) -> bool:
        event = SampledGaussian(multiplier, probability, steps)
        return Composition().plus(event).epsilon(delta) <= epsilon

    high = _SMALLEST_SAMPLED
    while not fits(high):
        high *= 2
        if high > LARGEST_NOISE:
            return None
    high = _between(high / 2, high, 1.05, fits)
    return _between(high / _RENYI_EXCESS, high, 1.005, fits_ledger)


def _between(low: float, high: float, precision: float, fits: Callable[[float], bool]) -> float:
    """The least number that fits, by a factor of at most `precision` above it; `high` fits."""
    while high / low > precision:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _of_gaussian(epsilon: float, delta: float) -> float:
    """The least noise multiplier of one Gaussian (Balle and Wang 2018, theorem 8)."""

    def fits(multiplier: float) -> bool:
        mean = 1 / multiplier
        below = _normal(mean / 2 - epsilon / mean)
        return below - math.exp(epsilon + _log_normal(-mean / 2 - epsilon / mean)) <= delta

    return _least(fits) * _MARGIN


def _of_distributed(epsilon: float, delta: float) -> float:
    """The least noise multiplier by zero-concentrated differential privacy."""
    return _least(lambda each: epsilon_of_rho(1 / (2 * each**2), delta) <= epsilon) * _MARGIN


def _least(fits: Callable[[float], bool]) -> float:
    low, high = math.log(1e-6), math.log(1e9)
    while high - low > _CLOSE:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(math.exp(middle)) else (middle, high)
    return math.exp(high)


def _normal(x: float) -> float:
    """Distribution function of the normal distribution."""
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_normal(x: float) -> float:
    """Its logarithm; far below zero by the first terms of the asymptotic series."""
    if x > -30:
        return math.log(_normal(x))
    return -(x**2) / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / x**2)
