"""What sums and training steps reveal together: events, and the epsilon of their composition.

Epsilon is always computed from the events, by the library dp-accounting: with privacy loss
distributions where it has them for all events of a composition (Gaussian and Poisson-sampled ones),
else by Rényi differential privacy (the zero-concentrated guarantee of distributed noise).

>>> half = Composition().plus(ZeroConcentrated(rho=0.5))
>>> round(half.epsilon(1e-6), 4), round(epsilon_of_rho(0.5, 1e-6), 4)
(5.2215, 5.2215)
>>> round(Composition().plus(Gaussian(noise_multiplier=10.0), 100).epsilon(1e-6), 4)
4.8866
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self


@dataclasses.dataclass(frozen=True)
class ZeroConcentrated:
    """A mechanism with `rho`-zero-concentrated differential privacy (Bun and Steinke 2016)."""

    KIND: ClassVar = "zero-concentrated"

    rho: float


@dataclasses.dataclass(frozen=True)
class Gaussian:
    """Gaussian noise on a sum that one member of the unit changes by a 2-norm of at most 1."""

    KIND: ClassVar = "gaussian"

    noise_multiplier: float
    """Standard deviation of the noise over the most that a member changes."""


@dataclasses.dataclass(frozen=True)
class CorrelatedGaussian:
    """One row of Gaussian noise that is correlated over the rounds of a run.

    All rows together are one Gaussian mechanism: a member that is in several is charged once.
    """

    KIND: ClassVar = "correlated"

    noise_multiplier: float
    """Noise multiplier of all rows together."""
    run: str
    """The run whose rows these are."""


@dataclasses.dataclass(frozen=True)
class SampledGaussian:
    """Steps of DP-SGD: Gaussian noise on the sum over a Poisson sample of the members."""

    KIND: ClassVar = "sampled-gaussian"

    noise_multiplier: float
    sampling_probability: float
    steps: int


Event = ZeroConcentrated | Gaussian | CorrelatedGaussian | SampledGaussian

_KINDS: Mapping[str, type[Event]] = {
    kind.KIND: kind for kind in (ZeroConcentrated, Gaussian, CorrelatedGaussian, SampledGaussian)
}


def event_to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON object with its kind."""
    return {"kind": event.KIND, **dataclasses.asdict(event)}


def event_from_json(table: Mapping[str, Any]) -> Event:
    """The event that `event_to_json` wrote.

    Raises:
        ValueError: it is none, or a number is out of its range.
    """
    values = dict(table)
    kind = _KINDS.get(values.pop("kind", ""))
    if kind is None or values.keys() != {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"{dict(table)} is not an event of differential privacy")
    event = kind(**values)
    for name, value in values.items():
        if name == "run":
            fits = isinstance(value, str)
        else:
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            fits = fits and math.isfinite(value) and value > 0
        if not fits or (name == "sampling_probability" and value > 1):
            raise ValueError(f"{name}={value!r} of a {event.KIND} event is out of its range")
    return event


@dataclasses.dataclass(frozen=True)
class Composition:
    """All events of one member of the unit, as far as their order does not matter."""

    rho: float = 0.0
    """Sum of the zero-concentrated ones."""
    gaussian: float = 0.0
    """Sum of 1 / noise multiplier^2 of the Gaussian ones, which compose to one Gaussian."""
    correlated: frozenset[CorrelatedGaussian] = frozenset()
    sampled: frozenset[SampledGaussian] = frozenset()
    """Sampled ones, with the steps of each noise and probability added up."""

    def plus(self, event: Event, times: int = 1) -> Self:
        """The composition with an event, repeated some times."""
        change: dict[str, Any] = {}
        match event:
            case ZeroConcentrated():
                change["rho"] = self.rho + times * event.rho
            case Gaussian():
                change["gaussian"] = self.gaussian + times / event.noise_multiplier**2
            case CorrelatedGaussian():
                change["correlated"] = self.correlated | {event}
            case SampledGaussian():
                steps = times * event.steps
                for other in self.sampled:
                    if dataclasses.replace(other, steps=event.steps) == event:
                        change["sampled"] = self.sampled - {other}
                        steps += other.steps
                rest = change.get("sampled", self.sampled)
                change["sampled"] = rest | {dataclasses.replace(event, steps=steps)}
        return dataclasses.replace(self, **change)

    def together_with(self, other: Composition) -> Composition:
        """The composition of all events of both."""
        if self == Composition():  # as often as a ledger has no charge of everybody
            return other
        joined = dataclasses.replace(
            other,
            rho=self.rho + other.rho,
            gaussian=self.gaussian + other.gaussian,
            correlated=self.correlated | other.correlated,
        )
        for event in self.sampled:
            joined = joined.plus(event)
        return joined

    def epsilon(self, delta: float) -> float:
        """The epsilon of the composition at `delta`; infinity if there is none."""
        return _epsilon(self, delta)

    def covers(self, other: Composition) -> bool:
        """Whether this one contains the other, so that its epsilon is at least as large."""
        return (
            self.rho >= other.rho
            and self.gaussian >= other.gaussian
            and self.correlated >= other.correlated
            and all(
                any(
                    dataclasses.replace(own, steps=each.steps) == each and own.steps >= each.steps
                    for own in self.sampled
                )
                for each in other.sampled
            )
        )

    @property
    def gaussian_multiplier(self) -> float | None:
        """The noise multiplier of the one Gaussian that all of them compose to."""
        total = self.gaussian + math.fsum(
            1 / each.noise_multiplier**2
            for each in sorted(self.correlated, key=lambda each: each.run)
        )
        return 1 / math.sqrt(total) if total else None


_WHOLE_ORDERS = tuple(range(2, 257))
"""Orders of the divergence for sampled events: a series for fractional ones converges slowly, or
not at all."""
FEW_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048)
"""Where a bound is enough: a hundredth of the time, and up to 15 % above that of all of them."""
_LARGEST_OF_DISTRIBUTIONS = 200.0
"""Privacy loss distributions take memory in proportion to epsilon."""


@functools.lru_cache(maxsize=4096)
def _epsilon(composition: Composition, delta: float) -> float:
    if composition == Composition():
        return 0.0
    import dp_accounting
    from dp_accounting import pld, rdp

    multiplier = composition.gaussian_multiplier
    events = []
    if multiplier is not None:
        events.append(dp_accounting.GaussianDpEvent(multiplier))
    for each in sorted(composition.sampled, key=dataclasses.astuple):
        step = dp_accounting.PoissonSampledDpEvent(
            each.sampling_probability, dp_accounting.GaussianDpEvent(each.noise_multiplier)
        )
        events.append(dp_accounting.SelfComposedDpEvent(step, each.steps))
    if composition.rho:
        events.append(dp_accounting.ZCDpEvent(composition.rho))
    renyi = rdp.RdpAccountant(orders=_orders(composition))
    for event in events:
        renyi.compose(event)
    epsilon = float(renyi.get_epsilon(delta))
    if composition.rho or epsilon > _LARGEST_OF_DISTRIBUTIONS:
        return epsilon
    distributions = pld.PLDAccountant()
    for event in events:
        distributions.compose(event)
    return min(epsilon, float(distributions.get_epsilon(delta)))


def _orders(composition: Composition) -> Sequence[float]:
    """Orders of the divergence: the library's own, and more of the small and the large ones.

    With sampled events whole ones; few where privacy loss distributions say more than they do.
    """
    from dp_accounting import rdp

    if composition.sampled:
        return _WHOLE_ORDERS if composition.rho else FEW_ORDERS
    fine = (1 + math.exp(step / 100) for step in range(-700, 1400))
    return sorted({*rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS, *fine})


def epsilon_of_rho(rho: float, delta: float) -> float:
    """The epsilon at `delta` of rho-zero-concentrated differential privacy, without a library.

    For devices, which do not have dp-accounting: the smallest over the order a > 1 of

        rho a + log((a - 1) / a) - log(delta a) / (a - 1)

    (Canonne, Kamath and Steinke 2020, proposition 12), by a search over log(a - 1), in which it has
    one minimum.

    Args:
        rho: 0 or more; infinity without noise.
        delta: above 0, below 1.
    """
    if rho in (0, math.inf):
        return rho

    def at(log_excess: float) -> float:
        excess = math.exp(log_excess)
        order = 1 + excess
        return rho * order + math.log(excess / order) - math.log(delta * order) / excess

    low = -30.0
    high = 30.0
    while True:
        left = low + (high - low) / 3
        right = high - (high - low) / 3
        closer = (low, right) if at(left) < at(right) else (left, high)
        if closer == (low, high):  # no two numbers are closer
            return max(0.0, at(low))
        low, high = closer
