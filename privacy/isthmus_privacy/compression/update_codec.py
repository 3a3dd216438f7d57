"""Which elements of an update are sent in a round, and with how many bits.

All clients of a round send the same elements, so that masks cancel and sums are those of single
elements. The update is divided into blocks of `one_in` neighbours, of which one is sent in a round;
in `one_in` rounds in a row each is sent once. The seed of the job and the number of the round
decide the order for each block, so that a device that takes part in every second round misses none.
Some ranges of elements are in no block: all of them are sent in every round.

What is not sent, and what rounding took away, is for the device to add to its next update (error
feedback: Seide et al. 2014, Karimireddy et al. 2019). Rounding goes to the nearest level: a random
one would have an error of more than the value itself with few levels, which feedback would amplify.

>>> codec = UpdateCodec(one_in=2, bits=3)
>>> codec.levels, codec.ring_bits(clients=10), codec.kept(5)
(7, 7, 3)
>>> both = [codec.coordinates(round_, 5).tolist() for round_ in (2, 3)]
>>> sorted({*both[0], *both[1]})
[0, 1, 2, 3, 4]
>>> UpdateCodec(one_in=3, bits=3, always=((1, 3),)).coordinates(0, 5).tolist()[:2]
[1, 2]
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from isthmus.tensors.always_sent import MAX_RANGES
from isthmus_privacy.crypto.canonical import NUMBER, Message, items, row, tagged_hash
from isthmus_privacy.crypto.masking import cipher, ring_vector

MAX_ONE_IN = 256
MAX_BITS = 24
MAX_RING_BITS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateCodec(Message):
    """The elements of an update that are sent, and their precision."""

    TAG = "update-codec-2"
    FIELDS = {
        "one_in": NUMBER,
        "bits": NUMBER,
        "seed": NUMBER,
        "always": items(row(NUMBER, NUMBER), MAX_RANGES),
    }

    one_in: int
    """One of that many neighbouring elements is sent in a round."""
    bits: int
    """A client's element has 2**bits - 1 levels, zero in their middle."""
    seed: int = 0
    """Of the job: which elements are sent follows from it and the number of the round."""
    always: tuple[tuple[int, int], ...] = dataclasses.field(default=(), repr=False)
    """Ranges of elements that are sent in every round: the first one, and the one after the last,
    ascending."""

    @property
    def levels(self) -> int:
        """L: number of different values of an element."""
        return (1 << self.bits) - 1

    def fits(self, levels: int, size: int) -> bool:
        """Whether its fields are in their ranges, and go with a configuration's fields."""
        in_range = 1 <= self.one_in <= MAX_ONE_IN and 2 <= self.bits <= MAX_BITS
        ends = [0, *itertools.chain.from_iterable(self.always), size]
        starts_before_end = all(start < end for start, end in self.always)
        return in_range and levels == self.levels and starts_before_end and ends == sorted(ends)

    def ring_bits(self, clients: int) -> int:
        """Fewest bits of a ring in which a sum over that many clients cannot wrap."""
        return (clients * self.levels).bit_length()

    def digits(self, bits: int) -> int:
        """Elements that a number of that many bits is divided into, which cannot wrap either."""
        return -(-bits // self.bits)

    def kept(self, size: int) -> int:
        """Number of elements that are sent of an update of N = `size`."""
        always = sum(end - start for start, end in self.always)
        return always + -(-(size - always) // self.one_in)

    def coordinates(self, round_: int, size: int) -> torch.Tensor:
        """Indices (kept) of the elements that are sent in a round, int64, each once.

        Those that are sent in every round are the first ones.

        Args:
            round_: number of the round.
            size: N, elements of the update.
        """
        always = [torch.arange(start, end) for start, end in self.always]
        size -= sum(map(len, always))
        first = torch.arange(0, size, self.one_in)
        cycle, step = divmod(round_, self.one_in)
        seed = tagged_hash("sent-elements", NUMBER.write(self.seed), NUMBER.write(cycle))
        stream = bytearray(2 * len(first))
        cipher(seed).update_into(bytes(len(stream)), stream)
        drawn = ring_vector(stream, 16).to(torch.int64)
        chosen = first + (drawn + step) % (size - first).clamp(max=self.one_in)
        return torch.cat([*always, self._in_update(chosen)])

    def _in_update(self, chosen: torch.Tensor) -> torch.Tensor:
        """Indices in the update of elements (M), which are given without those of `always`."""
        if not self.always:
            return chosen
        lengths = torch.tensor([0, *(end - start for start, end in self.always)])
        before = lengths.cumsum(0)  # elements of `always` in front of each range, and in all
        starts = torch.tensor([start for start, _ in self.always]) - before[:-1]
        return chosen + before[torch.searchsorted(starts, chosen, right=True)]

    def split(self, figures: torch.Tensor) -> torch.Tensor:
        """Divide numbers (M) of 32 bits into digits (M x digits), least significant first."""
        digits = self.digits(32)
        values = figures.to(torch.int64) & 0xFFFFFFFF
        shifts = torch.arange(digits) * self.bits
        return ((values.unsqueeze(1) >> shifts) & self.levels).reshape(-1)

    def joined(self, digits: torch.Tensor) -> torch.Tensor:
        """The sums (M) of the numbers that `split` divided, from the sums of their digits.

        Digits of a client are at most `levels`, so that sums of digits wrap no sooner than those
        of elements.
        """
        count = self.digits(32)
        shifts = torch.arange(count) * self.bits
        return (digits.to(torch.int64).reshape(-1, count) << shifts).sum(1)


def magnitude_of(values: torch.Tensor) -> float:
    """Binary logarithm of the root mean square of finite values, within -60 and 60.

    >>> magnitude_of(torch.tensor([0.5, -0.5])), magnitude_of(torch.zeros(3))
    (-1.0, -60.0)
    """
    mean = float(values.double().square().mean()) if len(values) else 0.0
    return max(-60.0, min(60.0, math.log2(mean) / 2)) if mean else -60.0


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
