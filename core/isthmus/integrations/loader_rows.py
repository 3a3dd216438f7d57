"""The rows of a `DataLoader`, with how it orders and collates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
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
        sampler = loader.sampler
        plain = type(sampler) is SequentialSampler or (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]  # map-style
        )
        if type(loader.batch_sampler) is not BatchSampler:
            raise TaskError(
                f"{what} has the batch sampler {type(loader.batch_sampler).__name__}, and a job "
                "says how large batches are; leave it out, and override order()"
            )
        self.dataset = loader.dataset
        self.sampler = "" if plain else type(sampler).__name__
        """The name of a sampler that has an order of its own; empty if not."""
        self._what = what
        self._collate = loader.collate_fn
        self._shuffled = type(sampler) is RandomSampler
        self._whole = loader.drop_last
        if hasattr(loader.dataset, "digest"):
            self.digest = loader.dataset.digest

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


def collated(rows: list[Any]) -> Any:
    """A batch of rows, by the loader that they come from."""
    if rows and isinstance(rows[0], Row):
        return rows[0].collate([row.value for row in rows])
    return torch.utils.data.default_collate(rows)
