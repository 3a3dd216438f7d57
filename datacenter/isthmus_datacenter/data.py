"""Which examples a step trains on: a pure function of the step, so that any replay is exact.

Every rank holds the same data set. An epoch is a permutation drawn from the seed and the epoch's
number; the stream of all epochs is cut into global batches, and each rank takes its slice.

>>> order = Order(examples=5, ranks=2, batch_size=2, seed=7)
>>> whole = [list(order.steps(0, 5, rank)) for rank in (0, 1)]
>>> sorted(whole[0][0:2] + whole[1][0:2] + whole[0][2:3])  # the first epoch: each example once
[0, 1, 2, 3, 4]
>>> whole[1][6:] == list(order.steps(3, 5, 1))
True
"""

from __future__ import annotations

import array
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import overload

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The order of the training data of one run."""

    examples: int
    ranks: int
    batch_size: int
    """Per rank."""
    seed: int

    def steps(self, first: int, until: int, rank: int) -> Sequence[int]:
        """Indices of the examples that `rank` sees in steps `first` (included) to `until`."""
        return _Slice(self, first, until, rank)

    def example(self, position: int) -> int:
        """The example at a position of the endless stream of epochs."""
        epoch, offset = divmod(position, self.examples)
        return _permutation(self.examples, self.seed, epoch)[offset]


class _Slice(Sequence[int]):
    """One rank's part of some steps, computed as it is read: a round may be very long."""

    def __init__(self, order: Order, first: int, until: int, rank: int) -> None:
        self._order, self._first, self._rank = order, first, rank
        self._length = (until - first) * order.batch_size

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < self._length:
            raise IndexError(index)
        size = self._order.batch_size
        step, within = divmod(index, size)
        batch = (self._first + step) * self._order.ranks + self._rank
        return self._order.example(batch * size + within)


def derived_seed(*parts: int) -> int:
    """A seed of 63 bits for a purpose named by numbers, unrelated to that of any other.

    >>> derived_seed(0, 1) == derived_seed(0, 1) != derived_seed(1, 0)
    True
    """
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@functools.lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int) -> array.array[int]:
    generator = torch.Generator().manual_seed(derived_seed(seed, epoch))
    # Read one by one, an array is ten times as fast as a tensor and as small.
    return array.array("q", torch.randperm(examples, generator=generator).numpy().tobytes())
