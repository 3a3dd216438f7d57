"""What right guesses about canaries say about a guarantee of differential privacy.

A canary is a device or an example that an auditor makes up. A coin decides whether it contributes
or is zeros, and the auditor, who sees everything that is released, guesses the coin (Steinke, Nasr
and Jagielski 2023, "Privacy Auditing with One (1) Training Run"). A mechanism allows at most

    (1 + delta(0)) / 2,    delta(0): the delta of its guarantee at epsilon = 0

of such guesses to be right on average, whatever the auditor computes. For Gaussian noise with the
multiplier z that is Phi(1 / 2z). From the number that was right follows a lower bound on this
probability (Clopper and Pearson 1934), from it how much weaker than promised the noise must be, and
the epsilon with so much noise (as Nasr et al. 2023, "Tight Auditing of Differentially Private
Machine Learning", convert error rates by the curve of a mechanism).

The canaries of one run are counted as independent. They are, if each has a direction of its own,
orthogonal to the others', and the noise of different directions is independent, as that of the
mechanisms here. A bound without this assumption (theorem 5.2 of the former) needs far more canaries
to find that half of the noise is missing.

>>> claim = Claim(Gaussian(1.0), times=1, delta=1e-5)
>>> round(claim.epsilon(), 3), round(claim.right(), 3)
(4.377, 0.691)
>>> honest = claim.measured(right=691, guesses=1000, confidence=0.9999)
>>> honest.is_alarm, round(honest.epsilon, 2), round(honest.most, 1)
(False, 2.84, 30.4)
>>> claim.measured(right=841, guesses=1000, confidence=0.9999).is_alarm  # Phi(1): half of the noise
True
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from isthmus_privacy.dp.accounting import (
    Composition,
    CorrelatedGaussian,
    Event,
    Gaussian,
    SampledGaussian,
    ZeroConcentrated,
)

CONFIDENCE = 0.9999
"""Confidence of a lower bound: an audit of an honest job raises an alarm in at most one of
10,000."""
CANARIES = 1000
"""Guesses of an audit that is not told how many to make."""
POWER = 0.99
"""The noise that an audit is said to find is found in at least so many of them."""
CONFIDENCES = (0.9, 1 - 1e-9)
"""Least and largest confidence that an audit can have."""
_LARGEST_FACTOR = 64.0
"""Noise that is weaker by more is not told apart."""
_CERTAIN = 1 - 1e-9
"""A claim that allows more right guesses than this excludes nothing."""
_SHARES_OF_SAMPLED = 4
"""Shares of sampled participations that are told apart, as each has a distribution of its own."""

Shares = Mapping[float, int]
"""How many canaries took part in each share of the participations that are claimed, 0 to 1.

The share is of the sum of 1 / noise multiplier^2: of independent noise, that of participations.
"""
_CLOSE = 5e-3
"""Relative precision of factors."""
_FINE = 1e-3
"""Unit up to which the privacy losses of a claim of a hundred sampled steps are rounded.

With more steps it is smaller by the square root of their number, as is what each step loses.
"""
_COARSE = 1e-2
"""Unit with other noise than the claimed: a search needs many distributions of losses."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What an audit has found, and what it could have found."""

    right: int
    guesses: int
    confidence: float
    probability: float
    """Lower bound on the probability with which a guess is right."""
    allowed: float
    """The largest one that the claim allows, on average over the canaries."""
    factor: float
    """How many times weaker than promised the noise is, at least; below 1 for none."""
    epsilon: float
    """Lower bound on epsilon, of the mechanism with so much noise; 0 if nothing was learned.

    `least`, if not even the mechanism without noise allows so many right guesses."""
    least: float
    """Lower bound on epsilon whatever the fault is, also if it is no missing noise."""
    claimed: float
    """Epsilon of the claim."""
    most: float
    """The largest epsilon that so many guesses could show, if all were right; infinity if that
    would show that there is no noise."""
    finds: float | None
    """Share of the promised noise below which so many guesses find that some is missing, in 99 of
    100 audits; None if they find nothing."""

    @property
    def is_alarm(self) -> bool:
        """Whether more was revealed than the claim allows."""
        return self.probability > self.allowed


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a mechanism promises about one canary."""

    event: Event
    """What one participation is charged as."""
    times: int
    """Participations."""
    delta: float
    """Delta of the epsilon that is claimed."""

    def epsilon(self, factor: float = 1.0) -> float:
        """Epsilon at `delta`, with noise that is weaker by a factor.

        Of sampled steps that of privacy loss distributions: a ledger may say more.
        """
        composition = self._composition(factor)
        if composition.sampled:
            found = _distribution(composition, is_fine=factor == 1.0)
            return float(found.get_epsilon(self.delta))
        return composition.epsilon(self.delta)

    def right(self, factor: float = 1.0, shares: Shares | None = None) -> float:
        """The largest probability of a right guess, with noise that is weaker by a factor.

        On average over canaries that took part in shares of the participations; None for all. A sum
        of guesses that are right with different probabilities is as likely to be above a number as
        one with their mean, or less (Hoeffding 1956, theorem 4).
        """
        is_fine = factor == 1.0
        if shares is None:
            return _right(self._composition(factor), is_fine)
        total = sum(
            count * _right(self._composition(factor, share), is_fine)
            for share, count in shares.items()
        )
        return total / sum(shares.values())

    def measured(
        self, right: int, guesses: int, confidence: float, shares: Shares | None = None
    ) -> Measurement:
        """What follows from so many right guesses.

        Args:
            right: of `guesses`.
            guesses: one for each canary.
            confidence: of the lower bounds, above 0.5 and below 1.
            shares: of the participations that the canaries had; None for all.

        Raises:
            ValueError: the numbers are not in their range.
        """
        if not (0 <= right <= guesses and guesses >= 1 and 0.5 < confidence < 1):
            raise ValueError(f"{right} of {guesses} right guesses, with confidence {confidence}")
        allowed = self.right(1.0, shares)
        probability = lower_bound(right, guesses, confidence)
        factor = self._factor(probability, shares)
        least = self._of_any(probability)
        return Measurement(
            right=right,
            guesses=guesses,
            confidence=confidence,
            probability=probability,
            allowed=allowed,
            factor=factor,
            epsilon=least if factor >= _LARGEST_FACTOR else self._at(factor),
            least=least,
            claimed=self.epsilon(),
            most=self.most(guesses, confidence, shares),
            finds=self.finds(guesses, confidence, shares),
        )

    def most(self, guesses: int, confidence: float, shares: Shares | None = None) -> float:
        """The largest epsilon that so many guesses can show, see `Measurement.most`."""
        factor = self._factor(lower_bound(guesses, guesses, confidence), shares)
        return math.inf if factor >= _LARGEST_FACTOR else self._at(factor)

    def needed(self, confidence: float) -> int | None:
        """The fewest guesses that can show more than is claimed, if all are right; None for any."""
        allowed = self.right()
        if allowed > _CERTAIN:
            return None
        return math.floor(math.log(1 - confidence) / math.log(allowed)) + 1

    def finds(self, guesses: int, confidence: float, shares: Shares | None = None) -> float | None:
        """What so many guesses find, see `Measurement.finds`."""
        allowed = self.right(1.0, shares)
        low = 0
        high = guesses + 1  # the fewest right guesses that are an alarm; more than all for none
        while low < high:
            middle = (low + high) // 2
            if lower_bound(middle, guesses, confidence) > allowed:
                high = middle
            else:
                low = middle + 1
        if low > guesses:
            return None
        found = _least(lambda probability: at_least(low, guesses, probability) >= POWER)
        factor = self._factor(found, shares)
        return None if factor >= _LARGEST_FACTOR else min(1.0, 1 / factor)

    def _at(self, factor: float) -> float:
        return self.epsilon(factor) if factor else 0.0

    def _of_any(self, probability: float) -> float:
        """The least epsilon of any mechanism with `delta` that allows so many right guesses.

        Such a mechanism allows (e^epsilon + delta) / (e^epsilon + 1) of them (Kairouz, Oh and
        Viswanath 2015).
        """
        if probability <= 0.5:
            return 0.0
        return max(0.0, math.log((probability - self.delta) / (1 - probability)))

    def _factor(self, probability: float, shares: Shares | None) -> float:
        """By which factor noise is weaker if a guess is right with a probability; 0: any."""
        if probability <= 0.5:
            return 0.0
        high = 1.0
        while self.right(high, shares) < probability:
            high *= 1.5
            if high > _LARGEST_FACTOR:
                return _LARGEST_FACTOR
        low = high
        while self.right(low, shares) > probability:
            low /= 1.5
            if low < 1 / _LARGEST_FACTOR:
                return 0.0
        while high / low > 1 + _CLOSE:
            middle = math.sqrt(low * high)
            if self.right(middle, shares) < probability:
                low = middle
            else:
                high = middle
        # The search ends a little below the factor, which is above 1 if the claim is exceeded.
        return max(low, 1.0) if self.right(1.0, shares) < probability else low

    def _composition(self, factor: float, share: float = 1.0) -> Composition:
        """The participations of a canary, in a share of all, with weaker noise."""
        event = _weaker(self.event, factor)
        if isinstance(event, SampledGaussian):
            part = math.ceil(share * _SHARES_OF_SAMPLED - 1e-9) / _SHARES_OF_SAMPLED
            return Composition().plus(event, math.ceil(part * self.times))
        return Composition().plus(_weaker(event, math.sqrt(share)), self.times)


def lower_bound(right: int, guesses: int, confidence: float) -> float:
    """What the probability of a right guess is at least (Clopper and Pearson 1934).

    >>> round(lower_bound(90, 100, 0.99), 4), lower_bound(0, 100, 0.99)
    (0.8087, 0.0)
    """
    if right == 0:
        return 0.0
    return _least(lambda probability: at_least(right, guesses, probability) >= 1 - confidence)


def at_least(right: int, guesses: int, probability: float) -> float:
    """The probability of at least so many right guesses, of independent ones.

    >>> round(at_least(1, 2, 0.5), 12), round(at_least(2, 2, 0.5), 12)
    (0.75, 0.25)
    """
    if right <= 0:
        return 1.0
    if probability <= 0 or right > guesses:
        return 0.0
    if probability >= 1:
        return 1.0
    upper = right > guesses * probability  # the side with fewer and smaller terms is added
    logs = math.log(probability), math.log1p(-probability)
    total = 0.0
    number = right if upper else right - 1
    while 0 <= number <= guesses:
        ways = (
            math.lgamma(guesses + 1) - math.lgamma(number + 1) - math.lgamma(guesses - number + 1)
        )
        term = math.exp(ways + number * logs[0] + (guesses - number) * logs[1])
        total += term
        if term <= total * 1e-17:
            break
        number += 1 if upper else -1
    return min(1.0, total) if upper else max(0.0, 1 - total)


def _least(holds: Callable[[float], bool]) -> float:
    """The least probability for which something holds that holds for all larger ones."""
    low = 0.0
    high = 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return low


def _weaker(event: Event, factor: float) -> Event:
    match event:
        case ZeroConcentrated():
            return ZeroConcentrated(event.rho * factor**2)
        case Gaussian() | CorrelatedGaussian() | SampledGaussian():
            return dataclasses.replace(event, noise_multiplier=event.noise_multiplier / factor)


@functools.lru_cache(maxsize=1024)
def _right(composition: Composition, is_fine: bool) -> float:
    """See `Claim.right`.

    Discrete Gaussian noise of devices, which is charged as zero-concentrated, is Gaussian in a sum
    of theirs to 1e-30, see `distributed`.
    """
    multiplier = composition.gaussian_multiplier
    squared = 2 * composition.rho + (0.0 if multiplier is None else multiplier**-2)
    if not composition.sampled:
        return math.erfc(-math.sqrt(squared) / 2 / math.sqrt(2)) / 2
    assert not squared
    return (1 + float(_distribution(composition, is_fine).get_delta(0.0))) / 2


@functools.lru_cache(maxsize=64)
def _distribution(composition: Composition, is_fine: bool) -> Any:
    """The privacy loss distribution of sampled steps."""
    import dp_accounting

    steps = sum(each.steps for each in composition.sampled)
    interval = (_FINE if is_fine else _COARSE) / max(1.0, math.sqrt(steps / 100))
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=interval)
    for each in composition.sampled:
        step = dp_accounting.PoissonSampledDpEvent(
            each.sampling_probability, dp_accounting.GaussianDpEvent(each.noise_multiplier)
        )
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, each.steps))
    return accountant
