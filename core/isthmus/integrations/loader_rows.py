"""The rows of a `DataLoader`, with how it orders and collates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data.sampler import BatchSampler

from isthmus.errors import TaskError
from isthmus.integrations.carrying import epoch_order


class Row(NamedTuple):
    """A row with what makes batches of it: loaders of one module may differ in that."""

    value: Any
    collate: Callable[[list[Any]], Any]


class LoaderRows(Dataset[Row]):
    """The data set of a loader; a job says how large the batches are."""

    def __init__(self, loader: object, what: str) -> None:
        """Take a loader apart.

        Args:
            loader: what `what` returned.
            what: for messages, such as "train_dataloader()".

        Raises:
            TaskError: it is not one loader of rows by index, or its sampler has an order of its
                own.
        """
        if not isinstance(loader, DataLoader):
            raise TaskError(
                f"{what} returned {type(loader).__name__}, and not one torch.utils.data.DataLoader;"
                " return one, or override local_data() and eval_data()"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise TaskError(
                f"{what} reads an iterable dataset, whose batches only the loader knows; override "
                "local_data() and collate()"
            )
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise TaskError(
                f"{what} returned a {type(loader).__name__}, whose __iter__() is not called, "
                "because a job says how large batches are; do what it does in collate_fn"
            )
        sampler: object = loader.sampler
        dataset: Dataset[Any] = loader.dataset
        subset = False
        if type(sampler) is SubsetRandomSampler:
            subset = True
            dataset = Subset(dataset, [int(index) for index in sampler.indices])
        plain = subset or _draws_all(sampler, len(dataset))  # type: ignore[arg-type]  # map-style
        if type(loader.batch_sampler) is not BatchSampler:
            raise TaskError(
                f"{what} has the batch sampler {type(loader.batch_sampler).__name__}, and a job "
                "says how large batches are; leave it out, and override order()"
            )
        self.dataset = dataset
        self.sampler = "" if plain else type(sampler).__name__
        """The name of a sampler that has an order of its own; empty if not."""
        self._what = what
        self._collate = loader.collate_fn
        self._shuffled = subset or type(sampler) is RandomSampler
        self._whole = loader.drop_last
        self._batch_size = loader.batch_size
        if hasattr(dataset, "digest"):
            self.digest = dataset.digest

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # map-style

    def __getitem__(self, index: int) -> Row:
        return Row(self.dataset[index], self._collate)

    def order(self, batch_size: int, generator: torch.Generator) -> Sequence[int] | None:
        """The indices of an epoch, see `epoch_order`.

        Raises:
            TaskError: the loader's sampler has an order of its own.
        """
        if self.sampler:
            raise TaskError(
                f"{self._what} draws rows by {self.sampler}, which is not carried over; override "
                "order()"
            )
        return epoch_order(
            len(self), batch_size, generator, shuffled=self._shuffled, whole=self._whole
        )

    def check_all_are_drawn(self) -> None:
        """Refuse what leaves rows out, or draws some more often, of held-out data.

        Raises:
            TaskError: the loader's sampler or `drop_last` does.
        """
        if self.sampler:
            raise TaskError(
                f"{self._what} draws rows by {self.sampler}, and a run evaluates all rows; make a "
                "torch.utils.data.Subset, or override eval_data()"
            )
        if self._whole and self._batch_size and len(self) % self._batch_size:
            raise TaskError(
                f"{self._what} has drop_last=True, which leaves out {len(self) % self._batch_size} "
                f"of {len(self)} rows, and a run evaluates all; leave it out, or override "
                "eval_data()"
            )


def _draws_all(sampler: object, count: int) -> bool:
    """Whether a sampler draws each of so many rows once, in sequence or at random."""
    if type(sampler) is SequentialSampler:
        return len(sampler) == count
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == count
    )


def collated(rows: list[Any]) -> Any:
    """A batch of rows, by the loader that they come from."""
    if rows and isinstance(rows[0], Row):
        return rows[0].collate([row.value for row in rows])
    return torch.utils.data.default_collate(rows)
