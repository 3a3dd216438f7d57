"""The order in which the examples of an epoch are used: random, or that of `Task.order`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import TaskError
from isthmus.task.definition import Task, defines
from isthmus.task.loading import user_code
from isthmus.task.scoring.permutation import first_of_permutation

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class EpochOrder:
    """The order of the epochs of a data set, each a function of a generator's state."""

    def __init__(self, task: Task, dataset: Dataset[Any], examples: int, batch_size: int) -> None:
        """`examples` is the size of the data set, `batch_size` the examples of a batch."""
        self._task = task
        self._dataset = dataset
        self._examples = examples
        self._batch_size = batch_size
        self._own = defines(task, "order")
        self._length: int | None = None if self._own else examples
        self._left_out = 0

    @property
    def length(self) -> int:
        """The number of examples of an epoch."""
        if self._length is None:
            self.epoch(torch.Generator().manual_seed(0))
            assert self._length is not None
        return self._length - self._left_out

    def leave_out_last(self, whether: bool) -> None:
        """End the next epochs before their last example, which differs between random orders."""
        self._left_out = int(whether)

    def epoch(self, generator: torch.Generator) -> torch.Tensor:
        """The indices of the next epoch, int64 (length).

        Raises:
            TaskError: `order()` raised, gave something else than indices, or another number than
                before.
        """
        if self._own:
            with user_code("order()"):
                chosen = self._task.order(self._dataset, self._batch_size, generator)
            if chosen is not None:
                return self._checked(chosen)[: self.length]
        return self._counted(torch.randperm(self._examples, generator=generator))[: self.length]

    def first(self, generator: torch.Generator, count: int) -> torch.Tensor:
        """The first `count` indices of the next epoch, or all; the generator is used up then.

        Without an order of the task this takes time and memory for `count` indices only.

        Raises:
            TaskError: see `epoch`.
        """
        if not self._own:
            first = first_of_permutation(self._examples, count, generator)
            if first is not None:
                return first
        return self.epoch(generator)[:count]

    def _checked(self, chosen: Sequence[int]) -> torch.Tensor:
        with user_code("the indices of order()"):
            indices = torch.as_tensor(chosen)
        if indices.ndim != 1 or indices.dtype not in (torch.int64, torch.int32) or not len(indices):
            raise TaskError("order() must return a sequence of indices of the data set")
        low = int(indices.min())
        high = int(indices.max())
        if low < 0 or high >= self._examples:
            raise TaskError(
                f"order() returned indices from {low} to {high}, and the data set has "
                f"{self._examples} examples"
            )
        return self._counted(indices.long())

    def _counted(self, indices: torch.Tensor) -> torch.Tensor:
        if self._length is None:
            self._length = len(indices)
        if len(indices) != self._length:
            raise TaskError(
                f"order() returned {len(indices)} indices, and {self._length} for another epoch; "
                "return equally many for each"
            )
        return indices


def check_no_order(task: Task, what: str) -> None:
    """Refuse an order of data that cannot be read in any order.

    Raises:
        TaskError: the task has one.
    """
    if defines(task, "order"):
        raise TaskError(
            f"order() chooses examples by index, and {what} is an iterable dataset; return one "
            "with a length and indices, or let the dataset itself order its examples"
        )
