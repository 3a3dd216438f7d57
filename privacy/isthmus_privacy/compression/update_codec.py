"""Which elements of an update are sent in a round, and with how many bits.

All clients of a round send the same elements, so that masks cancel and sums are those of single
elements. The update is divided into blocks of `one_in` neighbours, of which one is sent in a round.
Each is sent once in `one_in` rounds, from one whose number is a multiple of it. The seed of the job
and this multiple decide the order for each block, so that a device that takes part in every second
round misses none.
Some ranges of elements have a number of their own in place of `one_in`: 1 sends all of them.

What is not sent, and what rounding took away, is for the device to add to its next update (error
feedback: Seide et al. 2014, Karimireddy et al. 2019). Rounding goes to the nearest level: a random
one would have an error of more than the value itself with few levels, which feedback would amplify.

>>> codec = UpdateCodec(one_in=2, bits=3)
>>> codec.levels, codec.ring_bits(clients=10), codec.kept(5)
(7, 6, 3)
>>> both = [codec.coordinates(round_, 5).tolist() for round_ in (2, 3)]
>>> sorted({*both[0], *both[1]})
[0, 1, 2, 3, 4]
>>> UpdateCodec(one_in=3, bits=3, rates=((1, 3, 1),)).coordinates(0, 5).tolist()[:2]
[1, 2]
"""

from __future__ import annotations

import dataclasses
import math

import torch

from isthmus.tensors.sending_rates import MAX_RANGES
from isthmus_privacy.crypto.canonical import NUMBER, Message, items, row, tagged_hash
from isthmus_privacy.crypto.masking import cipher, ring_vector

MAX_ONE_IN = 256
MAX_BITS = 24
MAX_RING_BITS = 32
MAX_MAGNITUDE = 60.0
"""Largest absolute value of `magnitude_of`."""


class Levels:
    """Numbers of an element with `bits` bits."""

    bits: int

    @property
    def levels(self) -> int:
        """L: number of different values of an element."""
        return (1 << self.bits) - 1

    @property
    def highest(self) -> int:
        """The number of an element's highest level; that of the lowest is 0."""
        return self.levels - 1

    def ring_bits(self, clients: int) -> int:
        """Fewest bits of a ring in which a sum over that many clients cannot wrap."""
        return (clients * self.highest).bit_length()


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateCodec(Levels, Message):
    """The elements of an update that are sent in a secure sum, and their precision.

    A codec of another package is `sum_codecs.ProvidedSumCodec` in its place.
    """

    TAG = "update-codec-3"
    FIELDS = {
        "one_in": NUMBER,
        "bits": NUMBER,
        "seed": NUMBER,
        "rates": items(row(NUMBER, NUMBER, NUMBER), MAX_RANGES),
    }

    one_in: int
    """One of that many neighbouring elements is sent in a round."""
    bits: int
    """A client's element has 2**bits - 1 levels, zero in their middle."""
    seed: int = 0
    """Seed of the job: which elements are sent follows from it and the number of the round."""
    rates: tuple[tuple[int, int, int], ...] = dataclasses.field(default=(), repr=False)
    """Ranges of elements with another number than `one_in`: the first one, the one after the last,
    and this number, ascending."""

    @property
    def more(self) -> str:
        """What a message about it says besides its fields."""
        return f", {len(self.rates)} ranges of elements with another one_in"

    def fits(self, highest: int, size: int) -> bool:
        """Whether its fields are in their ranges, and go with a configuration's fields."""
        numbers = [self.one_in, *(one_in for _, _, one_in in self.rates)]
        in_range = min(numbers) >= 1 and max(numbers) <= MAX_ONE_IN and 2 <= self.bits <= MAX_BITS
        ends = [0, *(end for each in self.rates for end in each[:2]), size]
        starts_before_end = all(start < end for start, end, _ in self.rates)
        return in_range and highest == self.highest and starts_before_end and ends == sorted(ends)

    def kept(self, size: int) -> int:
        """Number of elements that are sent of an update of N = `size`."""
        each = self._ranges(size).items()
        return sum(-(-sum(end - start for start, end in ranges) // n) for n, ranges in each)

    def in_round(self, round_: int, size: int) -> SentElements:
        """What is done with an update of N = `size` in a round."""
        return SentElements(self.coordinates(round_, size), size)

    def coordinates(self, round_: int, size: int) -> torch.Tensor:
        """Indices (kept) of the elements that are sent in a round, int64, each once.

        Those of which more are sent come first.

        Args:
            round_: number of the round.
            size: N, elements of the update.
        """
        sent = []
        for one_in, ranges in sorted(self._ranges(size).items()):
            starts, ends = torch.tensor(ranges).T
            lengths = ends - starts
            after = lengths.cumsum(0)  # elements in this range and those before it
            chosen = self._chosen(round_, one_in, int(after[-1]))
            at = torch.searchsorted(after, chosen, right=True)
            sent.append(chosen + (ends - after)[at])
        return torch.cat(sent) if sent else torch.empty(0, dtype=torch.int64)

    def _ranges(self, size: int) -> dict[int, list[tuple[int, int]]]:
        """All ranges of elements of an update of N = `size`, by the number of their blocks."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        at = 0
        for start, end, one_in in (*self.rates, (size, size, self.one_in)):
            for each, number in (((at, start), self.one_in), ((start, end), one_in)):
                if each[0] < each[1]:
                    ranges.setdefault(number, []).append(each)
            at = end
        return ranges

    def _chosen(self, round_: int, one_in: int, count: int) -> torch.Tensor:
        """Which of `count` elements are sent in a round: one of each block."""
        first = torch.arange(0, count, one_in)
        if one_in == 1:
            return first
        cycle, step = divmod(round_, one_in)
        seed = tagged_hash("sent-elements", NUMBER.write(self.seed), NUMBER.write(cycle))
        stream = bytearray(2 * len(first))
        cipher(seed).update_into(bytes(len(stream)), stream)
        drawn = ring_vector(stream, 16).to(torch.int64)
        return first + (drawn + step) % (count - first).clamp(max=one_in)


@dataclasses.dataclass(frozen=True)
class SentElements:
    """The elements that are sent in one round."""

    indices: torch.Tensor
    """(kept) int64."""
    size: int
    """N."""

    def project(self, values: torch.Tensor) -> torch.Tensor:
        """The elements (kept) that are sent of an update (N)."""
        return values[self.indices]

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """The update, float32 (N), that sent elements, float32 (kept), stand for."""
        return torch.zeros(self.size).index_copy_(0, self.indices, values)


def magnitude_of(values: torch.Tensor) -> float:
    """Binary logarithm of the root mean square of finite values, within -60 and 60.

    >>> magnitude_of(torch.tensor([0.5, -0.5])), magnitude_of(torch.zeros(3))
    (-1.0, -60.0)
    """
    mean = float(values.double().square().mean()) if len(values) else 0.0
    magnitude = math.log2(mean) / 2 if mean else -MAX_MAGNITUDE
    return max(-MAX_MAGNITUDE, min(MAX_MAGNITUDE, magnitude))


def round_to_levels(
    values: torch.Tensor, bound: float, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest levels (N, int64, 0 .. levels - 1) and the values (N, float32) they stand for.

    >>> numbers, sent = round_to_levels(torch.tensor([0.4, -9.0]), 1.0, 3)
    >>> numbers.tolist(), sent.tolist()
    ([1, 0], [0.0, -1.0])

    Args:
        values: (N) finite.
        bound: of the values that are sent; others are clipped to it.
        levels: an odd number of them, from -bound to bound.
    """
    half = levels // 2
    step = bound / half
    numbers = (values.double() / step).round_().clamp_(-half, half)
    return (numbers + half).to(torch.int64), (numbers * step).float()


def value_of(total: torch.Tensor, clients: int, bound: float, levels: int) -> torch.Tensor:
    """The sum of values (N, float64) of the sum of their numbers in `round_to_levels`."""
    half = levels // 2
    return (total.double() - clients * half) * (bound / half)
