"""Select the examples of each step by a pure function of the step, so that any replay is exact.

Every rank has the same data set. An epoch is a permutation drawn from the seed and the epoch's
number; the stream of all epochs is divided into global batches, and each replica takes its slice.
`positions` has where a step begins in that stream after the number of replicas has changed.

>>> order = ExampleOrder(examples=5, replicas=2, batch_size=2, seed=7)
>>> indices = [list(order.indices(0, 5, replica)) for replica in (0, 1)]
>>> sorted(indices[0][0:2] + indices[1][0:2] + indices[0][2:3])  # first epoch: each example once
[0, 1, 2, 3, 4]
>>> indices[1][6:] == list(order.indices(3, 5, 1))
True
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.system.process import die_with_parent
from isthmus.task import Task
from isthmus.task.definition import defines
from isthmus.task.scoring import read
from isthmus.task.scoring.inputs import endless
from isthmus.task.scoring.order import EpochOrder, check_no_order
from isthmus_datacenter.training.rng import derived_seed, seed_all

_READER_STREAM = 1
"""Separates the seeds of reader processes from those of the model."""


class BatchSource:
    """Batches of one replica, between any two steps, of either kind of dataset.

    A map-style dataset is read in the order of an `ExampleOrder`. An iterable one is read in its
    own order, again and again: its endless stream is divided into global batches and each replica
    takes its slice. To start in the middle, the dataset's own `start_at(example)`, an iterator over
    the rest, is used; without one the examples before are read and dropped.
    """

    def __init__(
        self,
        task: Task,
        dataset: Dataset[Any],
        order: ExampleOrder,
        replica: int,
        device: torch.device,
        readers: int,
    ) -> None:
        """`readers` is the number of reader processes; an iterable dataset has at most one."""
        self.task = task
        self.dataset = dataset
        self.order = order
        self.replica = replica
        self.device = device
        self.readers = readers

    def batches(self, first: int, until: int) -> Iterator[Any]:
        """Iterate over the batches of steps `first` (included) to `until`, on the device."""
        size = self.order.batch_size
        options: dict[str, Any] = {
            # Copies to a CUDA device are asynchronous only from pinned memory.
            "pin_memory": self.device.type == "cuda",
            # A reader that outlives its rank would hide the rank's end from the agent.
            "worker_init_fn": _end_with_rank,
            # A task need not be picklable for reader processes unless it collates.
            "collate_fn": self.task.collate if defines(self.task, "collate") else None,
            # The loader's seed must not be drawn from the generator that the model uses.
            "generator": torch.Generator().manual_seed(
                derived_seed(self.order.seed, first, self.replica)
            ),
        }
        if isinstance(self.dataset, IterableDataset):
            stream = _ReplicaStream(self.dataset, self.order, first, until, self.replica)
            readers = min(self.readers, 1)
            return read(
                DataLoader(stream, batch_size=size, num_workers=readers, **options), self.device
            )
        indices = self.order.indices(first, until, self.replica)
        if not self.readers:
            return read(
                DataLoader(self.dataset, batch_size=size, sampler=indices, **options), self.device
            )
        seeded = _SeededByStep(self.dataset, self.order.seed, self.replica)
        sampler = _batches_with_step(indices, first, size)
        return read(
            DataLoader(seeded, batch_sampler=sampler, num_workers=self.readers, **options),
            self.device,
        )


def _end_with_rank(reader: int) -> None:
    die_with_parent()


def _batches_with_step(indices: Sequence[int], first: int, size: int) -> Iterator[list[int]]:
    """Batches for reader processes: the step, then the indices of its examples."""
    for start in range(0, len(indices), size):
        yield [first + start // size, *indices[start : start + size]]


class _SeededByStep(Dataset[Any]):
    """A dataset in a reader process whose random numbers depend only on the step and the replica.

    They are the same for any number of readers, and after a restart.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, replica: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._replica = replica

    def __getitems__(self, step_and_indices: list[int]) -> list[Any]:
        step, *indices = step_and_indices
        # Before each batch, as readers take turns: which of them reads a batch depends on their
        # number.
        seed_all(self._seed, step, self._replica, _READER_STREAM)
        get_many = getattr(self._dataset, "__getitems__", None)
        return list(get_many(indices)) if get_many else [self._dataset[index] for index in indices]


class _ReplicaStream(IterableDataset[Any]):
    """One replica's part of some steps of an iterable dataset."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        order: ExampleOrder,
        first: int,
        until: int,
        replica: int,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._first = first
        self._until = until
        self._replica = replica

    def __iter__(self) -> Iterator[Any]:
        order = self._order
        global_batch = order.replicas * order.batch_size
        own = range(self._replica * order.batch_size, (self._replica + 1) * order.batch_size)
        count = (self._until - self._first) * global_batch
        # All replicas read the stream from the same place, and each drops what the others take.
        stream = endless(self._dataset, order.position(self._first))
        for position, example in enumerate(itertools.islice(stream, count)):
            if position % global_batch in own:
                yield example


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleOrder:
    """The order of the training data of one run."""

    examples: int
    """Examples of an epoch: all, or those of the whole batches of `own`."""
    replicas: int
    batch_size: int
    """Examples of one replica in one step."""
    seed: int
    own: EpochOrder | None = None
    """The task's order; None for a random one."""
    origin: tuple[int, int] = (0, 0)
    """A step, and the examples before it, which other numbers of replicas may have used."""

    @classmethod
    def of(
        cls, task: Task, dataset: Dataset[Any], examples: int, replicas: int, job: Job
    ) -> ExampleOrder:
        """The order of a run.

        Args:
            task: it may have an `order`.
            dataset: the training data.
            examples: its size.
            replicas: number of replicas.
            job: the job.

        Raises:
            TaskError: the task's order has no whole batch, or its code raised.
        """
        size = job.datacenter.batch_size
        if isinstance(dataset, IterableDataset):
            check_no_order(task, "local_data()")
        if defines(task, "order") and job.datacenter.global_batch is not None:
            raise TaskError(
                "order() groups examples into batches of one size, and datacenter.global_batch "
                "makes that of a replica depend on the number of ranks; remove one of them"
            )
        if not defines(task, "order"):
            return cls(examples=examples, replicas=replicas, batch_size=size, seed=job.seed)
        own = EpochOrder(task, dataset, examples, size)
        whole = own.length // size * size
        if not whole:
            raise TaskError(
                f"order() returned {own.length} indices, fewer than a batch of "
                f"datacenter.batch_size={size}; lower it"
            )
        return cls(examples=whole, replicas=replicas, batch_size=size, seed=job.seed, own=own)

    def position(self, step: int) -> int:
        """Position of a step's first example in the endless stream of epochs."""
        origin_step, examples_before = self.origin
        return examples_before + (step - origin_step) * self.replicas * self.batch_size

    def indices(self, first: int, until: int, replica: int) -> Sequence[int]:
        """Indices of a replica's examples in steps `first` (included) to `until`."""
        return _ReplicaIndices(self, first, until, replica)

    def examples_between(self, first: int, until: int) -> list[int]:
        """Indices of the examples at positions `first` (included) to `until` of the stream."""
        indices: list[int] = []
        while first < until:
            epoch, offset = divmod(first, self.examples)
            permutation = _permutation(self.examples, self.seed, epoch, self.own)
            indices += permutation[offset : offset + until - first]
            first += self.examples - offset
        return indices

    def example(self, position: int) -> int:
        """Index of the example at a position of the endless stream of epochs."""
        epoch, offset = divmod(position, self.examples)
        return _permutation(self.examples, self.seed, epoch, self.own)[offset]


class _ReplicaIndices(Sequence[int]):
    """One replica's part of some steps, computed on access: a round may have very many steps."""

    def __init__(self, order: ExampleOrder, first: int, until: int, replica: int) -> None:
        self._order = order
        self._first = first
        self._replica = replica
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
        step, offset = divmod(index, size)
        position = self._order.position(self._first + step) + self._replica * size
        return self._order.example(position + offset)


@functools.lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int, own: EpochOrder | None) -> memoryview[int]:
    generator = torch.Generator().manual_seed(derived_seed(seed, epoch))
    if own is None:
        indices = torch.randperm(examples, generator=generator)
    else:
        indices = own.epoch(generator)[:examples]
    # Elements are read ten times as fast as those of a tensor, and from the same memory.
    return indices.contiguous().numpy().data
