"""How large updates and weights are, counted by a secure sum, and the encoding that fits them.

Fixed-point numbers need a range before anything is summed, and a range that is changed after a sum
of the same updates would let the server subtract the two: what is left is the part of the only
device that was clipped. So the range is found first. Each device that has trained adds a 1 to one
bin of four histograms, and the server learns these counts and no device's bin:

    largest   the exponent of the largest absolute element of its update
    typical   that of the root mean square of all elements of parameters
    smallest  that of the least root mean square of a tensor that is not zero
    weights   the step of its number of examples on the ladder 1, 2, 4, 8, 16, 32, 63, 125, 250,
              500, 1000, 2000, ..

The exponent of x is the e with 2^(e-1) <= |x| < 2^e; bin 0 is for zeros. From the counts follow the
range (a power of two), the largest weight (of the ladder) and the ring, the same for all devices
of the sum. Where elements of up to `USUAL_CLIP` and weights of up to `USUAL_WEIGHT` are precise
enough, these are used, so that one device that is a little larger does not change the encoding.

A range bounds what one device can do to the sum, so it must not follow from what one says of
itself: it is at most 16 times that of the others, or the usual one. An update beyond it is clipped,
which the server sees and refuses. From the numbers of examples follows the weight that the sum has,
to a factor of two.

>>> counts = [counts_of(torch.tensor([0.5, -200.0]), [], weight=n) for n in (20, 3_000)]
>>> ranges = Ranges.of(torch.stack(counts).sum(0), devices=2)
>>> ranges.encoding(clients=4)
Encoding(clip=256.0, weight_max=4000, bits=32)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Self

import torch

from isthmus_privacy.crypto.masking import TILE
from isthmus_privacy.secagg.config import MAX_LEVELS, WIDE_LEVELS

USUAL_CLIP = 4.0
"""Range of elements, [-4, 4], where it is precise enough for the updates."""
USUAL_WEIGHT = 1000
"""Largest weight of a device, in examples, where it is precise enough."""

_LOWEST = -127
"""Exponent of the first bin, which zeros have too."""
_EXPONENTS = 256
"""Bins of exponents: `_LOWEST` and less, .. 128, as float32 has."""
_STEPS = 53
"""Bins of weights, the steps of `LADDER`."""
_FIRST_STEP = 10
"""Steps of the ladder below `USUAL_WEIGHT`."""

LADDER = tuple(
    max(1, math.ceil(USUAL_WEIGHT * 2.0 ** (step - _FIRST_STEP))) for step in range(_STEPS)
)
"""Largest weights that a sum may have; the last is 4.4e15."""

SIZE = 3 * _EXPONENTS + _STEPS
"""Counts that a device sends."""

_ROUNDING = 1e-4
"""Largest error of rounding, as a part of the update of a device with the mean weight."""
_TENSOR_ROUNDING = 2.0**-7
"""Largest error of rounding, as a part of the tensor with the smallest elements in the update of
that device. The error has the mean zero."""
_LOST = 2.0**-7
"""Error of rounding, as a part of the middle update, with which that is lost."""
_CODEC_ROUNDING = 1e-2
"""Largest error of rounding with a codec, which later updates make up for, as a part of the update
of a device with the mean weight."""
_LIAR_EXPONENTS = 4
"""Bins by which elements of the few that may lie can be above those of all others."""
_MAGNITUDE_DIGITS = 8.0
"""Binary digits by which the magnitude of what devices send may be below that of their updates."""
_WIDER_EXPONENTS = 4
"""Bins of exponents that are left for larger elements of devices that are not in the counts."""
_WIDER_STEPS = 2
"""Bins of weights that are left for larger weights of devices that are not in the counts."""
_UNKNOWN_CLIP = 2.0**16
"""Range where no ranges are known. In a ring of 64 bits the steps of elements are still small: with
100 examples a device, 4e-8."""
_UNKNOWN_STEPS = 7
"""Steps of the largest weight above the usual one, where no ranges are known."""


def counts_of(
    update: torch.Tensor,
    tensors: Iterable[torch.Tensor],
    weight: int,
    parameters: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a device adds to the histograms: int64 (SIZE), a 1 in each of the four.

    Args:
        update: (N) float32, finite.
        tensors: its parts.
        weight: number of examples.
        parameters: those of the update, without running statistics: these can change by far more.
            None for all of it.
    """
    counts = torch.zeros(SIZE, dtype=torch.int64)
    largest = 0.0
    if len(update):
        least, most = torch.aminmax(update)
        largest = max(abs(float(least)), abs(float(most)))
    parts = [_mean_square(part) for part in tensors]
    smallest = min((part for part in parts if part), default=0.0)
    typical = math.sqrt(_mean_square(update if parameters is None else parameters))
    figures = (largest, typical, math.sqrt(smallest))
    for number, figure in enumerate(figures):
        counts[number * _EXPONENTS + _exponent_bin(figure)] = 1
    step = next((step for step, limit in enumerate(LADDER) if weight <= limit), _STEPS - 1)
    counts[3 * _EXPONENTS + step] = 1
    return counts


def _mean_square(values: torch.Tensor) -> float:
    """The mean of the squares in float64, of a tile at a time: a copy of all takes memory."""
    flat = values.flatten()
    parts = (flat[start : start + TILE] for start in range(0, len(flat), TILE))
    total = math.fsum(float(part.double().square().sum()) for part in parts)
    return total / max(1, values.numel())


def _exponent_bin(value: float) -> int:
    exponent = math.frexp(value)[1] if value else _LOWEST
    return max(0, min(exponent - _LOWEST, _EXPONENTS - 1))


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The numbers of a round configuration that follow from the ranges."""

    clip: float
    """Range of elements: they are clipped to [-clip, clip]."""
    weight_max: int
    """Largest weight of a device, in examples."""
    bits: int
    """Ring size in bits, without a codec."""

    @property
    def levels(self) -> int:
        """See `RoundConfig.levels`; 0 selects those of a ring of 32 bits."""
        return WIDE_LEVELS if self.bits == 64 else 0


@dataclasses.dataclass(frozen=True)
class Ranges:
    """The histograms of a sum, each with one count for each of its devices."""

    largest: Sequence[int]
    """Devices by the exponent of the largest absolute element."""
    typical: Sequence[int]
    """Devices by the exponent of the root mean square of all parameters' elements."""
    smallest: Sequence[int]
    """Devices by the exponent of the least root mean square of a tensor that is not zero."""
    weights: Sequence[int]
    """Devices by the step of `LADDER`."""

    @classmethod
    def of(cls, total: torch.Tensor, devices: int) -> Self:
        """Read a sum of `counts_of`, int64 (SIZE), of so many devices.

        Raises:
            ValueError: devices that follow the protocol cannot have this sum.
        """
        ranges = cls.read(total.tolist())
        parts = (ranges.largest, ranges.typical, ranges.smallest, ranges.weights)
        if any(min(part) < 0 or sum(part) != devices for part in parts):
            raise ValueError(
                f"the sum of the ranges of {devices} devices does not have a count for each: one "
                "sent a vector that does not have the agreed form"
            )
        return ranges

    @classmethod
    def unknown(cls) -> Self:
        """The ranges of a sum that is lost, or has no meaning: there is no count.

        A second sum of ranges could be of other devices, and the difference of the two that of
        one. The encoding is so wide that most updates fit it.
        """
        return cls.read([0] * SIZE)

    @property
    def is_known(self) -> bool:
        """Whether there are counts."""
        return sum(self.largest) > 0

    @classmethod
    def read(cls, counts: Sequence[int]) -> Self:
        """The inverse of `counts`."""
        return cls(
            largest=tuple(counts[:_EXPONENTS]),
            typical=tuple(counts[_EXPONENTS : 2 * _EXPONENTS]),
            smallest=tuple(counts[2 * _EXPONENTS : 3 * _EXPONENTS]),
            weights=tuple(counts[3 * _EXPONENTS : SIZE]),
        )

    @property
    def counts(self) -> list[int]:
        """All counts, SIZE."""
        return [*self.largest, *self.typical, *self.smallest, *self.weights]

    def encoding(
        self,
        *,
        clients: int,
        needed: int | None = None,
        clip: float | None = None,
        weight_max: int | None = None,
        levels: int | None = None,
        wider: bool = False,
        liars: int = 0,
    ) -> Encoding:
        """The encoding of a sum: nothing is clipped, and rounding changes little.

        Args:
            clients: most devices in the sum.
            needed: fewest of these devices in the sum, which may be those of the least weights;
                None for all.
            clip: of the job, which stays; None to choose one.
            weight_max: of the job, which stays; None to choose one.
            levels: of a codec, whose ring cannot be another; None without.
            wider: the sum may have devices that are not in these counts.
            liars: so many may say anything of their updates, see `is_limited`.
        """
        if not self.is_known:
            weight = weight_max or LADDER[_FIRST_STEP + _UNKNOWN_STEPS]
            return Encoding(
                clip=_UNKNOWN_CLIP if clip is None else clip,
                weight_max=weight,
                # With a codec it is that of the weights, which are whole: more bits tell no more.
                bits=64 if levels is None else self._bits(clients, weight),
            )
        usual, narrow = self._candidates(clients, clip, weight_max, wider=wider, liars=liars)
        if not _last(self.largest):
            return usual  # zeros in any range
        fewest = levels or min(MAX_LEVELS, ((1 << 32) - 1) // clients)
        limits = (_ROUNDING, _TENSOR_ROUNDING) if levels is None else (_CODEC_ROUNDING, math.inf)
        chosen = usual
        # A range of the job stays, however much wider than the updates it is.
        if clip is None and not self._is_precise(usual.clip, usual.weight_max, fewest, *limits):
            chosen = narrow
        if levels is not None:
            return chosen
        return self._in_ring(chosen, narrow, fewest, needed, wider=wider)

    def _candidates(
        self, clients: int, clip: float | None, weight_max: int | None, *, wider: bool, liars: int
    ) -> tuple[Encoding, Encoding]:
        """The usual encoding, or what is above it; and the narrowest that has room for all.

        The job's `clip` and `weight_max` are those of both. The arguments are those of `encoding`.
        """
        exponent = self._exponent(liars) + (_WIDER_EXPONENTS if wider else 0)
        step = _last(self.weights) + (_WIDER_STEPS if wider else 0)
        heaviest = LADDER[min(step, _STEPS - 1)]
        usual_clip = max(USUAL_CLIP, 2.0**exponent) if clip is None else clip
        narrow_clip = 2.0 ** max(exponent, _LOWEST + 1) if clip is None else clip
        usual_weight = weight_max or max(USUAL_WEIGHT, heaviest)
        narrow_weight = weight_max or heaviest
        return (
            Encoding(usual_clip, usual_weight, self._bits(clients, usual_weight)),
            Encoding(narrow_clip, narrow_weight, self._bits(clients, narrow_weight)),
        )

    def _in_ring(
        self, chosen: Encoding, narrow: Encoding, fewest: int, needed: int | None, *, wider: bool
    ) -> Encoding:
        """The encoding in a ring of 64 bits if 32 are too few, and narrower if 64 are, too.

        Args:
            chosen: the encoding.
            narrow: the narrowest.
            fewest: levels of an element in a ring of 32 bits.
            needed: as for `encoding`.
            wider: as for `encoding`.
        """
        weight = chosen.weight_max
        # The mean may be far below the updates. Nothing is known of those that are not counted.
        largest_error = _ROUNDING * self._least_product(needed, weight)
        is_precise = self._is_precise(chosen.clip, weight, fewest, _ROUNDING, _TENSOR_ROUNDING)
        if wider or not is_precise or chosen.clip / (fewest - 1) * weight > largest_error:
            chosen = dataclasses.replace(chosen, bits=64)
        if chosen.clip / (WIDE_LEVELS - 1) * weight > largest_error:
            # The usual range and weight are too wide even there.
            return dataclasses.replace(narrow, bits=chosen.bits)
        return chosen

    def is_limited(self, liars: int) -> bool:
        """Whether the range is narrower than the largest update that devices have said they have.

        One that says it is out of all proportion to the others, of whom `liars` may say anything,
        may be right: then its update does not fit, which the sum shows.
        """
        return self.is_known and self._exponent(liars) < _last(self.largest) + _LOWEST

    def _exponent(self, liars: int) -> int:
        """The exponent of the range that the elements of all but a few that may lie allow."""
        largest = _last(self.largest)
        others = _last(self.largest, above=liars)
        usual = math.frexp(USUAL_CLIP)[1] - 1 - _LOWEST  # its elements are up to it, and not above
        return min(largest, max(others + _LIAR_EXPONENTS, usual)) + _LOWEST

    def weight_bounds(self, devices: int, weight_max: int) -> tuple[int, int]:
        """The least and the most that so many of these devices can weigh together.

        They are those that were not lost since. A device that has data has one example at least.
        """
        steps = [step for step, count in enumerate(self.weights) for _ in range(count)]
        lightest = steps[:devices]
        heaviest = steps[max(0, len(steps) - devices) :]
        least = [1, *(limit + 1 for limit in LADDER)]
        most = [*LADDER[:-1], weight_max]
        lower = sum(min(least[step], weight_max) for step in lightest)
        upper = sum(min(most[step], weight_max) for step in heaviest)
        return lower, upper

    def magnitude_bounds(self, weight_max: int, rounds: int, liars: int = 0) -> tuple[float, float]:
        """Between which magnitudes there is what devices send of compressed updates.

        A device divides by the largest weight, and adds what it has not sent in so many rounds.

        Args:
            weight_max: largest weight of the sum.
            rounds: in which each element is sent once.
            liars: as for `encoding`.
        """
        typical = _middle(self.typical)
        if not self.is_known or math.isinf(typical):
            return -math.inf, math.inf
        heaviest = min(LADDER[_last(self.weights)], weight_max)
        high = self._exponent(liars) + math.log2(rounds * heaviest / weight_max)
        low = math.log2(typical * self._mean_weight(weight_max) / weight_max) - _MAGNITUDE_DIGITS
        return low, max(low, high)

    def refusal(self, encoding: Encoding, levels: int, *, by_job: bool = False) -> str:
        """Why updates cannot be summed in an encoding; empty if they can.

        One device whose update is out of all proportion, or that says so, makes the range so wide
        that the updates of the others are lost in rounding.

        Args:
            encoding: what `encoding` chose.
            levels: of an element in the ring.
            by_job: the job says how wide the range is.
        """
        if not self.is_known:
            return ""  # the sum tells, see `lost_in_rounding`
        if self._is_precise(encoding.clip, encoding.weight_max, levels, _LOST, math.inf):
            return ""
        if by_job:
            return (
                f"federated.clip={encoding.clip:g} is so wide that the updates are lost in "
                f"rounding: half of the devices have elements of {_middle(self.typical):.1g} at "
                "least; remove it, and the range is found"
            )
        return (
            f"the devices' updates are too different to be summed: half of them have elements of "
            f"{_middle(self.typical):.1g} at least, and the largest has elements up to "
            f"{encoding.clip:.1g}; a device may have diverged: set federated.clip, which bounds it"
        )

    def are_lost(
        self, mean: torch.Tensor, rounding: float, *, devices: int, weight: int, weight_max: int
    ) -> bool:
        """Whether rounding has changed the mean of some of these devices by too much.

        It has not where it is a small part of the mean, nor where the mean is small only because
        the updates cancel and it is a small part of each of them.

        Args:
            mean: of the parameters' updates, (N) float32.
            rounding: bound on the standard deviation of the error of an element.
            devices: in the sum.
            weight: of the sum, in examples.
            weight_max: largest weight of one.
        """
        if not self.is_known:
            return False
        length = math.sqrt(_mean_square(mean))
        updates = self._least_product(devices, weight_max) * devices / weight
        if not length and not updates:  # those that may be in it have not changed the model
            updates = _middle(self.typical)
        return rounding > _ROUNDING * max(length, updates)

    @staticmethod
    def _bits(clients: int, weight: int) -> int:
        """The narrowest ring in which the sum of the weights cannot wrap."""
        return 32 if clients * weight < 1 << 32 else 64

    def _is_precise(
        self, bound: float, weight: int, levels: int, of_update: float, of_tensor: float
    ) -> bool:
        """Whether rounding changes the update of a device with the mean weight little enough.

        `of_update` and `of_tensor` are the largest errors, relative to root mean squares.
        """
        # Weighted updates are rounded to steps, with an error of at most half a step on average.
        error = bound / (levels - 1) * weight / self._mean_weight(weight)
        return error <= of_update * _middle(self.typical) and error <= of_tensor * _middle(
            self.smallest
        )

    def _least_product(self, needed: int | None, weight_max: int) -> float:
        """The least that updates times weights can be on average, if they do not cancel.

        The histograms do not say which device has which update: those with most examples may have
        the smallest, or be lost. Products of pairs have the least sum in opposite orders.

        Args:
            needed: fewest of the devices in the sum; None for all.
            weight_max: largest weight.
        """
        typical = [_root(index) for index, count in enumerate(self.typical) for _ in range(count)]
        weights = [
            min(([0, *LADDER])[step] + 1, weight_max)
            for step, count in enumerate(self.weights)
            for _ in range(count)
        ]
        survivors = min(needed or len(weights), len(weights))
        pairs = zip(typical[:survivors], reversed(weights[:survivors]), strict=True)
        return sum(value * weight for value, weight in pairs) / survivors

    def _mean_weight(self, weight_max: int) -> float:
        """The mean weight of the devices, or up to half of that."""
        devices = sum(self.weights)
        return self.weight_bounds(devices, weight_max)[0] / devices


def lost_in_rounding(mean: torch.Tensor, rounding: float, part: float = _ROUNDING) -> bool:
    """Whether rounding is more than a part of a mean of updates of which no ranges are known.

    Args:
        mean: of the updates, (N) float32.
        rounding: bound on the standard deviation of the error of an element.
        part: largest one that is right.
    """
    return rounding > part * math.sqrt(_mean_square(mean))


def _last(counts: Sequence[int], *, above: int = 0) -> int:
    """The highest bin with a count, of those with more than `above` counts from it on; 0 for none.

    >>> _last([0, 7, 0, 2]), _last([0, 7, 0, 2], above=2), _last([1], above=2)
    (3, 1, 0)
    """
    from_it_on = 0
    for index in range(len(counts) - 1, -1, -1):
        from_it_on += counts[index]
        if from_it_on > above:
            return index
    return 0


def _root(index: int) -> float:
    """The least value of a bin of exponents; 0 for that of zeros."""
    return 2.0 ** (index + _LOWEST - 1) if index else 0.0


def _middle(counts: Sequence[int]) -> float:
    """The lower end of the median of the values that are not zero; infinite if all are."""
    left = sum(counts[1:])
    if not left:
        return math.inf
    below = 0
    for index, count in enumerate(counts[1:], start=1):
        below += count
        if 2 * below >= left:
            return _root(index)
    raise AssertionError("the counts have a median")
