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
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from isthmus.errors import TaskError
from isthmus.system.process import die_with_parent
from isthmus.task.scoring import read
from isthmus_datacenter.training.rng import derived_seed, seed_all

_READING = 1
"""Tells the seeds of what readers draw from those of what the model does."""


class Feed:
    """Batches of one replica, from any step to any other, of either kind of dataset.

    A map-style dataset is read in the order of `Order`. An iterable one is read as it comes, again
    and again: its endless stream is cut into global batches and each replica takes its slice. To
    go on in the middle, a dataset's own `start_at(example)`, an iterator over the rest, is used;
    without one the examples before are read and dropped.
    """

    def __init__(
        self, dataset: Dataset[Any], order: Order, replica: int, device: torch.device, readers: int
    ) -> None:
        """`readers` are processes that read ahead; an iterable dataset has at most one."""
        self.dataset, self.order, self.replica, self.device = dataset, order, replica, device
        self.readers = readers

    def batches(self, first: int, until: int) -> Iterator[tuple[Any, Any]]:
        """`(inputs, target)` of steps `first` (included) to `until`, on the device."""
        size = self.order.batch_size
        options: dict[str, Any] = {
            # Only from pinned memory does a copy to the device not wait for what runs there.
            "pin_memory": self.device.type == "cuda",
            # A reader that outlives its rank keeps the agent from seeing the rank's end.
            "worker_init_fn": _with_rank,
            # What seeds the readers is not drawn from what the model draws from.
            "generator": torch.Generator().manual_seed(
                derived_seed(self.order.seed, first, self.replica)
            ),
        }
        if isinstance(self.dataset, IterableDataset):
            stretch = _Stretch(self.dataset, self.order, first, until, self.replica)
            readers = min(self.readers, 1)
            return read(
                DataLoader(stretch, batch_size=size, num_workers=readers, **options), self.device
            )
        indices = self.order.steps(first, until, self.replica)
        if not self.readers:
            return read(
                DataLoader(self.dataset, batch_size=size, sampler=indices, **options), self.device
            )
        drawing = _Drawing(self.dataset, self.order.seed, self.replica)
        sampler = _numbered(indices, first, size)
        return read(
            DataLoader(drawing, batch_sampler=sampler, num_workers=self.readers, **options),
            self.device,
        )


def _with_rank(reader: int) -> None:
    die_with_parent()


def _numbered(indices: Sequence[int], first: int, size: int) -> Iterator[list[int]]:
    """Batches as readers get them: the step, then the indices of the examples."""
    for at in range(0, len(indices), size):
        yield [first + at // size, *indices[at : at + size]]


class _Drawing(Dataset[Any]):
    """A dataset in a reader: what it draws for a batch depends on the step and the replica alone.

    Whichever reader reads it, and however often the run was resumed.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, replica: int) -> None:
        self._dataset, self._seed, self._replica = dataset, seed, replica

    def __getitems__(self, numbered: list[int]) -> list[Any]:
        step, *indices = numbered
        seed_all(self._seed, step, self._replica, _READING)
        many = getattr(self._dataset, "__getitems__", None)
        return list(many(indices)) if many else [self._dataset[index] for index in indices]


class _Stretch(IterableDataset[Any]):
    """One replica's part of some steps of an iterable dataset."""

    def __init__(
        self, dataset: IterableDataset[Any], order: Order, first: int, until: int, replica: int
    ) -> None:
        self._dataset, self._order = dataset, order
        self._first, self._until, self._replica = first, until, replica

    def __iter__(self) -> Iterator[Any]:
        order = self._order
        whole = order.ranks * order.batch_size
        mine = range(self._replica * order.batch_size, (self._replica + 1) * order.batch_size)
        count = (self._until - self._first) * whole
        stream = _endless(self._dataset, self._first * whole)
        for at, example in enumerate(itertools.islice(stream, count)):
            if at % whole in mine:
                yield example


def _endless(dataset: IterableDataset[Any], start: int) -> Iterator[Any]:
    """The dataset again and again, from an example of that stream on."""
    if hasattr(dataset, "start_at"):
        yield from dataset.start_at(start)
        start = 0
    while True:
        count = 0
        for example in dataset:
            count += 1
            if count > start:
                yield example
        if not count:
            raise TaskError("local_data() gave an iterable dataset with nothing in it")
        start = max(0, start - count)


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

    def examples_between(self, first: int, until: int) -> list[int]:
        """Those at positions `first` (included) to `until` of the stream."""
        found: list[int] = []
        while first < until:
            epoch, offset = divmod(first, self.examples)
            found += _permutation(self.examples, self.seed, epoch)[offset : offset + until - first]
            first += self.examples - offset
        return found

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


@functools.lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int) -> array.array[int]:
    generator = torch.Generator().manual_seed(derived_seed(seed, epoch))
    # Read one by one, an array is ten times as fast as a tensor and as small.
    return array.array("q", torch.randperm(examples, generator=generator).numpy().tobytes())
