"""Statistics of the devices' data: one vector of whole numbers for each device, to be summed.

A task declares its columns in `Task.statistics_columns`, with bounds or categories, so that the
form of the vector depends on no data and there is no second request that depends on the first one's
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from isthmus.errors import TaskError
from isthmus.task.definition import Participant, Task
from isthmus.task.loading import user_code
from isthmus.task.measurements.columns import Category, Column
from isthmus.task.measurements.metrics import MAX_COUNTS

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset


class StatisticsVector:
    """What the numbers of a device's vector mean: the columns of `Task.statistics_columns`."""

    def __init__(self, task: Task) -> None:
        """Read the task's declaration.

        Raises:
            TaskError: there is none, or it is not usable.
        """
        with user_code("statistics_columns()"):
            declared = task.statistics_columns()
        if not isinstance(declared, Mapping) or not all(
            isinstance(name, str) and isinstance(column, (Column, Category))
            for name, column in declared.items()
        ):
            raise TaskError(
                "statistics_columns() must return a dictionary of isthmus.Column and "
                f"isthmus.Category by name, not {declared!r}"
            )
        if not declared:
            raise TaskError(
                f"{type(task).__name__} declares no columns; return them from statistics_columns()"
            )
        self.columns = dict(declared)
        """By name, in the order of their numbers."""
        if self.size > MAX_COUNTS:
            raise TaskError(
                f"statistics_columns() has {self.size} numbers, and devices send at most "
                f"{MAX_COUNTS}; use fewer bins or values"
            )
        self._task = task

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(column.size for column in self.columns.values())

    def measure(self, participant: Participant, dataset: Dataset[Any]) -> torch.Tensor:
        """The vector of one device, int64 (size).

        Args:
            participant: the device.
            dataset: its `local_data`, used if the task has no `statistics_data`.

        Raises:
            TaskError: the task's code raised, or a column is missing or is not one of values.
        """
        import torch

        with user_code("statistics_data()"):
            table = self._task.statistics_data(participant)
        if table is None:
            table = self._inputs(dataset)
        counts = []
        for name, column in self.columns.items():
            if name not in table:
                raise TaskError(f"statistics_data() has no column {name!r}")
            with user_code(f"statistics of {name!r}"):
                values = table[name]
                if isinstance(column, Column):
                    values = torch.as_tensor(values)
                    if values.dim() != 1:
                        raise ValueError(f"its shape is {tuple(values.shape)}, not (rows,)")
                counts.append(column.count(values))
        return torch.cat(counts)

    def _inputs(self, dataset: Dataset[Any]) -> dict[str, Any]:
        """The columns of the inputs of `local_data`, in the order of the declaration."""
        import torch

        with user_code("local_data()"):
            examples = cast("Sequence[Any]", dataset)  # with len(), which Dataset does not promise
            rows = torch.stack([torch.as_tensor(examples[at][0]) for at in range(len(examples))])
        if rows.dim() != 2 or rows.shape[1] != len(self.columns):
            raise TaskError(
                f"statistics_columns() declares {len(self.columns)} columns, and the inputs of "
                f"local_data() are {tuple(rows.shape)}; add statistics_data() to the task"
            )
        return dict(zip(self.columns, rows.T, strict=True))

    def check(self, total: torch.Tensor, devices: int) -> None:
        """Refuse a sum of vectors, int64 (size), that so many devices cannot have, with any data.

        Raises:
            ValueError: it is such a sum; with the name of the column.
        """
        for name, column, part in self._parts(total):
            try:
                column.check(part, devices)
            except ValueError as error:
                raise ValueError(f"the counts of {name!r} are impossible: {error}") from None

    def describe(self, total: torch.Tensor, minimum: int) -> dict[str, dict[str, Any]]:
        """What a sum of vectors, int64 (size), tells of each column, see `Column.describe`."""
        return {name: column.describe(part, minimum) for name, column, part in self._parts(total)}

    def _parts(self, total: torch.Tensor) -> Iterator[tuple[str, Column | Category, torch.Tensor]]:
        at = 0
        for name, column in self.columns.items():
            yield name, column, total[at : at + column.size]
            at += column.size
