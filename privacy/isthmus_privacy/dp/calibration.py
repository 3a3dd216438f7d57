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
from typing import TYPE_CHECKING, Any, Self

from isthmus.errors import JobError
from isthmus.job.privacy import LARGEST_NOISE, DatacenterPrivacy, PrivacySection
from isthmus_privacy.dp.accounting import (
    FEW_ORDERS,
    Composition,
    CorrelatedGaussian,
    Event,
    Gaussian,
    SampledGaussian,
    ZeroConcentrated,
    epsilon_of_rho,
)
from isthmus_privacy.dp.adaptive_clipping import AdaptiveBound
from isthmus_privacy.dp.correlated import CorrelatedNoise
from isthmus_privacy.dp.searching import least_between

if TYPE_CHECKING:
    from isthmus.job import Job

_CLOSE = 1e-9
_SMALLEST_SAMPLED = 2.0**-7
_FEWER_ORDERS_EXCESS = 1.1
"""How much more noise Rényi differential privacy asks for, about: where the search begins."""
_COARSE = 1e-3
"""Step of a coarse privacy loss distribution; the library's default is a tenth of it."""
_CLOSE_EPSILON = 0.995
"""The noise of DP-SGD uses at least this part of the budget."""
_FIRST_POWER = 1.5
_TRIES = 8
_MARGIN = 1.0005
"""The accountant rounds up: by less than this in the noise."""
_PRECISE_EPSILONS = (0.01, 150.0)
_PRECISE_DELTA = 1e-14
"""Where privacy loss distributions are within `_MARGIN` of the exact epsilon: between these, and
from this delta on."""


@dataclasses.dataclass(frozen=True)
class NoisePlan:
    """The noise of all rounds of a run with devices."""

    privacy: PrivacySection
    participations: int
    """Most rounds that one device is asked for."""
    multiplier: float
    """Noise multiplier; see `PrivacySection.noise`."""
    correlated: CorrelatedNoise | None = None
    measurements: int = 0
    """Most evaluations and comparisons that one device is asked for."""
    measuring_multiplier: float = 0.0
    """Noise multiplier of the sum of such a measurement, over its clipping bound."""

    @classmethod
    def of_job(cls, job: Job) -> Self:
        """The plan of a job with `[privacy]`.

        Raises:
            JobError: no noise meets the budget, or the job's noise does not.
        """
        assert job.privacy is not None
        return cls.of(job.privacy, job.rounds, job.most_measurements)

    @classmethod
    def of(cls, privacy: PrivacySection, rounds: int, measurements: int = 0) -> Self:
        """The plan of so many rounds, and measurements of one device.

        Raises:
            JobError: no noise meets the budget, or that of the section does not.
        """
        participations = privacy.most_rounds(rounds)
        matrix = None
        if privacy.mechanism == "correlated":
            matrix = CorrelatedNoise.best(
                rows=rounds, separation=privacy.separation, participations=participations
            )
        find = _of_distributed if privacy.mechanism == "distributed" else _of_gaussian
        least = find(privacy.epsilon, privacy.delta)
        share = privacy.measurement_share if measurements else 0.0
        if privacy.noise is not None:
            of_one = least / math.sqrt(1 - share)
            if privacy.noise * _MARGIN**2 < of_one:  # with room for the end of the search
                more = f" with {measurements} measurements" if measurements else ""
                raise JobError(
                    f"privacy.noise={privacy.noise:g} is too little: with less than {of_one:.4g} a "
                    f"single round{more} exceeds epsilon={privacy.epsilon:g} at delta="
                    f"{privacy.delta:g}; raise noise or epsilon, or remove noise"
                )
            multiplier = privacy.noise
        else:
            times = 1 if matrix is not None else participations
            multiplier = least * math.sqrt(times / (1 - share))
        measuring = least * math.sqrt(measurements / share) if share else 0.0
        if not max(multiplier, measuring) <= LARGEST_NOISE:
            raise JobError(
                f"privacy.epsilon={privacy.epsilon:g} at delta={privacy.delta:g} in "
                f"{participations} rounds and {measurements} measurements of a device would need "
                f"noise of {max(multiplier, measuring):.3g} times the clipping bound; raise "
                "epsilon, or lower participations, measurements or rounds"
            )
        return cls(privacy, participations, multiplier, matrix, measurements, measuring)

    def event(self, run: str) -> Event:
        """What one round of a run is charged as."""
        if self.correlated is not None:
            return CorrelatedGaussian(self.multiplier, run)
        if self.privacy.mechanism == "distributed":
            return ZeroConcentrated(1 / (2 * self.multiplier**2))
        return Gaussian(self.multiplier)

    @property
    def measuring_event(self) -> Event:
        """What one evaluation or comparison is charged as."""
        assert self.measurements
        if self.privacy.mechanism == "distributed":
            return ZeroConcentrated(1 / (2 * self.measuring_multiplier**2))
        return Gaussian(self.measuring_multiplier)

    def epsilon(self, rounds: int, measurements: int = 0) -> float:
        """Epsilon of a device after so many of its rounds and measurements."""
        spent = Composition()
        if times := min(rounds, self.participations):
            spent = spent.plus(self.event(""), times)
        if times := min(measurements, self.measurements):
            spent = spent.plus(self.measuring_event, times)
        return spent.epsilon(self.privacy.delta)

    @property
    def first_bound(self) -> AdaptiveBound | None:
        """The clipping bound of the first round, if it moves."""
        clip = self.privacy.clip
        quantile = self.privacy.clip_quantile
        if quantile is None:
            return None
        return AdaptiveBound(quantile, self.multiplier, bound=clip, first=clip)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise in the sum of a round, over the clipping bound.

        With correlated noise that of one draw, which later rounds take a part back of.
        """
        if self.first_bound is not None:
            return self.first_bound.update_multiplier
        return self.multiplier * (1 if self.correlated is None else self.correlated.sensitivity)

    def noise_to_signal(self, size: int, clients: int, honest: int | None = None) -> float:
        """2-norm of a round's noise over that of the sum, if all updates are equal and clipped.

        Args:
            size: N, elements of an update.
            clients: devices in the sum.
            honest: those whose noise is counted on, if devices add it: the others add as much.
        """
        uncounted = 1.0 if honest is None else math.sqrt(clients / honest)
        return self.deviation * uncounted * math.sqrt(size) / clients


@dataclasses.dataclass(frozen=True)
class SampledNoisePlan:
    """The noise of DP-SGD on a datacenter's examples."""

    privacy: DatacenterPrivacy
    multiplier: float
    """Noise multiplier; see `DatacenterPrivacy.noise`."""
    probability: float
    """Probability with which an example is in a step."""

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """The plan of a job; None without `[datacenter.privacy]`.

        Raises:
            JobError: no noise meets the budget, or the job's noise does not.
        """
        section = job.datacenter
        privacy = section.privacy
        if privacy is None:
            return None
        probability = section.private_batch / privacy.examples
        if privacy.noise is not None:
            plan = cls(privacy, privacy.noise, probability)
            plan._check_one_step()
            return plan
        steps = privacy.steps or job.rounds * section.steps
        multiplier = _of_sampled(privacy.epsilon, privacy.delta, probability, steps)
        if multiplier is None:
            raise JobError(
                f"datacenter.privacy.epsilon={privacy.epsilon:g} at delta={privacy.delta:g} in "
                f"{steps} steps would need noise of more than {LARGEST_NOISE:g} times the clipping "
                "bound; raise epsilon, or lower batch_size, steps or rounds"
            )
        return cls(privacy, multiplier, probability)

    def _check_one_step(self) -> None:
        """Refuse noise with which not even one step is possible.

        Raises:
            JobError: with what to change.
        """
        privacy = self.privacy
        # The accountant takes a second, and the bound is enough for all but the least noise.
        if self.epsilon_bound(1) > privacy.epsilon < (spent := self.epsilon(1)):
            raise JobError(
                f"datacenter.privacy.noise={self.multiplier:g} is too little: a single step has "
                f"an epsilon of {spent:.4g} at delta={privacy.delta:g}, above epsilon="
                f"{privacy.epsilon:g}; raise noise or epsilon, or remove noise"
            )

    def event(self, steps: int) -> SampledGaussian:
        """What so many steps are charged as."""
        return SampledGaussian(self.multiplier, self.probability, steps)

    def epsilon(self, steps: int) -> float:
        """Epsilon of an example after so many steps."""
        return Composition().plus(self.event(steps)).epsilon(self.privacy.delta) if steps else 0.0

    def epsilon_bound(self, steps: int) -> float:
        """A bound on `epsilon`, in milliseconds: by Rényi differential privacy of few orders."""
        return _bound(self.multiplier, self.probability, steps, self.privacy.delta)


@functools.lru_cache(maxsize=64)  # it takes seconds
def _of_sampled(epsilon: float, delta: float, probability: float, steps: int) -> float | None:
    """The least noise multiplier of steps of DP-SGD, to 0.5 % of epsilon; None if it is too large.

    Bounded by Rényi differential privacy, which is fast for any noise and needs too much; then by
    coarse privacy loss distributions, a tenth of the time of those of the ledger; and from there by
    the accountant of the ledger, which usually agrees at once or after one correction.
    """
    import dp_accounting

    def bound(multiplier: float) -> float:
        return _bound(multiplier, probability, steps, delta)

    def coarse(multiplier: float) -> float:
        accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=_COARSE)
        return _accounted(accountant, multiplier, probability, steps, delta)

    def of_ledger(multiplier: float) -> float:
        event = SampledGaussian(multiplier, probability, steps)
        return Composition().plus(event).epsilon(delta)

    high = _SMALLEST_SAMPLED
    while bound(high) > epsilon:
        high *= 2
        if high > LARGEST_NOISE:
            return None
    high = least_between(high / 2, high, 1.01, lambda each: bound(each) <= epsilon)
    start = _near(epsilon, high / _FEWER_ORDERS_EXCESS, coarse)
    found = _near(epsilon, start, of_ledger)
    if not _CLOSE_EPSILON * epsilon <= of_ledger(found) <= epsilon:
        # Where epsilon is no smooth function of the noise to the accountant's precision.
        low = _SMALLEST_SAMPLED
        return least_between(low, high, 1.005, lambda each: of_ledger(each) <= epsilon)
    return found


def _bound(multiplier: float, probability: float, steps: int, delta: float) -> float:
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(orders=FEW_ORDERS)
    return _accounted(accountant, multiplier, probability, steps, delta)


def _accounted(
    accountant: Any, multiplier: float, probability: float, steps: int, delta: float
) -> float:
    """Epsilon of so many steps of DP-SGD by an accountant of the library that has no event yet."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    step = dp_accounting.PoissonSampledDpEvent(probability, gaussian)
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(delta))


def _near(epsilon: float, multiplier: float, epsilon_of: Callable[[float], float]) -> float:
    """A noise multiplier with a little less than `epsilon`: it falls like a power of the noise.

    From a first one, at most `_TRIES` evaluations.
    """
    power = _FIRST_POWER
    before = None
    for _ in range(_TRIES):
        spent = epsilon_of(multiplier)
        if _CLOSE_EPSILON * epsilon <= spent <= epsilon:
            break
        if before is not None and spent != before[1] and multiplier != before[0]:
            slope = -math.log(spent / before[1]) / math.log(multiplier / before[0])
            power = min(max(slope, 0.5), 20.0)
        before = multiplier, spent
        aim = epsilon * (1 + _CLOSE_EPSILON) / 2
        multiplier *= min(max((spent / aim) ** (1 / power), 0.5), 2.0)
    return multiplier


@functools.lru_cache(maxsize=64)
def _of_gaussian(epsilon: float, delta: float) -> float:
    """The least noise multiplier of one Gaussian (Balle and Wang 2018, theorem 8).

    Where the accountant of the ledger is not as precise, the least with which it agrees: with less
    the last rounds of a run would not be within the budget.
    """

    def fits(multiplier: float) -> bool:
        mean = 1 / multiplier
        below = _normal(mean / 2 - epsilon / mean)
        return below - math.exp(epsilon + _log_normal(-mean / 2 - epsilon / mean)) <= delta

    found = _least(fits) * _MARGIN
    least, most = _PRECISE_EPSILONS
    if least <= epsilon <= most and delta >= _PRECISE_DELTA:
        return found

    def fits_ledger(multiplier: float) -> bool:
        return Composition().plus(Gaussian(multiplier)).epsilon(delta) <= epsilon

    high = found
    while not fits_ledger(high) and high < LARGEST_NOISE:
        high *= 2
    return least_between(found, high, _MARGIN, fits_ledger)


@functools.lru_cache(maxsize=64)
def _of_distributed(epsilon: float, delta: float) -> float:
    """The least noise multiplier by zero-concentrated differential privacy."""
    return _least(lambda each: epsilon_of_rho(1 / (2 * each**2), delta) <= epsilon) * _MARGIN


def _least(fits: Callable[[float], bool]) -> float:
    low = math.log(1e-6)
    high = math.log(1e9)
    while high - low > _CLOSE:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(math.exp(middle)) else (middle, high)
    return math.exp(high)


def _normal(x: float) -> float:
    """Distribution function of the normal distribution."""
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_normal(x: float) -> float:
    """Logarithm of `_normal`; far below zero by the first terms of the asymptotic series."""
    if x > -30:
        return math.log(_normal(x))
    return -(x * x) / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / (x * x))
