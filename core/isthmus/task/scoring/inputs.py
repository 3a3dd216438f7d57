"""From the rows of a dataset to batches on a device.

A batch is what a loader with the task's `collate` gives: a tensor or any nested structure of them.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from isthmus.errors import TaskError
from isthmus.task.definition import Task, defines
from isthmus.task.loading import user_code

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def count_examples(dataset: Dataset[Any], what: str) -> int:
    """Length of a map-style dataset.

    Raises:
        TaskError: it has no length, is empty, or is a DataLoader.
    """
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"{what} is a DataLoader; return its dataset, which Isthmus divides into batches"
        )
    if isinstance(dataset, IterableDataset):
        raise TaskError(
            f"{what} is an iterable dataset, which only real devices and ranks can use, and only "
            "for training; return one with a length and indices"
        )
    with user_code(f"len() of {what}"):
        count = len(dataset)  # type: ignore[arg-type]  # not declared by torch's Dataset
    if count == 0:
        raise TaskError(f"{what} is empty: there is no data to train or evaluate on")
    return count


def batches(
    task: Task,
    dataset: Dataset[Any],
    indices: Sequence[int],
    batch_size: int,
    device: torch.device,
) -> Iterator[tuple[Any, Any]]:
    """`(inputs, target)` pairs of the examples at `indices`, in that order, moved to `device`."""
    for batch in training_batches(task, dataset, indices, batch_size, device):
        yield pair_of(task, batch)


def training_batches(
    task: Task,
    dataset: Dataset[Any],
    indices: Sequence[int],
    batch_size: int,
    device: torch.device,
) -> Iterator[Any]:
    """Batches of the examples at `indices`, in that order, moved to `device`."""
    if type(dataset) is TensorDataset and not defines(task, "collate"):
        # The same batches as those of a loader, without collating single examples.
        for start in range(0, len(indices), batch_size):
            chosen = torch.as_tensor(indices[start : start + batch_size])
            with user_code("reading the dataset"):
                tensors = [tensor[chosen] for tensor in dataset.tensors]
            yield move(tensors, device)
        return
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=batch_size, sampler=indices, collate_fn=task.collate
    )
    yield from read(loader, device)


def read(loader: DataLoader[Any], device: torch.device) -> Iterator[Any]:
    """The batches of a loader, moved to `device`."""
    iterator = iter(loader)
    while True:
        with user_code("reading the dataset"):
            batch = next(iterator, None)
        if batch is None:
            return
        yield move(batch, device)


def pair_of(task: Task, batch: Any) -> tuple[Any, Any]:
    """Inputs and target of a batch.

    Raises:
        TaskError: it is not a pair.
    """
    with user_code("inputs_and_target()"):
        pair = task.inputs_and_target(batch)
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        what = type(pair).__name__
        counted = f" of {len(pair)}" if isinstance(pair, (list, tuple)) else ""
        if defines(task, "inputs_and_target"):
            raise TaskError(
                f"inputs_and_target() must return (inputs, target), not {what}{counted}"
            )
        raise TaskError(
            f"a dataset must give (input, target) pairs, not {what}{counted}; return pairs, or "
            "define inputs_and_target(batch) in the task"
        )
    return pair[0], pair[1]


def endless(dataset: IterableDataset[Any], start: int) -> Iterator[Any]:
    """Repeat the dataset for ever, starting at an example of that stream.

    The dataset's own `start_at(example)`, an iterator over the rest, is used; without one the
    examples before are read and dropped.

    Raises:
        TaskError: the dataset is empty.
    """
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
            raise TaskError("local_data() gave an iterable dataset without any example")
        start = max(0, start - count)


def streamed_batches(
    task: Task,
    dataset: IterableDataset[Any],
    start: int,
    count: int,
    batch_size: int,
    device: torch.device,
) -> Iterator[Any]:
    """Batches of the examples from `start` of an endless stream, `count` of them."""
    stream = itertools.islice(endless(dataset, start), count)
    while True:
        with user_code("reading the dataset"):
            rows = list(itertools.islice(stream, batch_size))
        if not rows:
            return
        with user_code("collate()"):
            batch = task.collate(rows)
        yield move(batch, device)


def move(value: Any, device: torch.device) -> Any:
    """A nested structure with its tensors on `device`."""
    return map_tensors(
        lambda each: each.to(device, non_blocking=device.type != "cpu"),
        value,
        lambda each: each.to(device) if callable(getattr(each, "to", None)) else each,
    )


def map_tensors(
    function: Callable[[torch.Tensor], Any],
    value: Any,
    other: Callable[[Any], Any] = lambda each: each,
) -> Any:
    """A nested structure with `function` applied to its tensors, and `other` to other leaves.

    It is followed through mappings (also a `BatchEncoding`), lists, tuples and dataclasses.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        mapped = {key: map_tensors(function, each, other) for key, each in value.items()}
        if type(value) is dict:
            return mapped
        copied = copy.copy(value)
        copied.update(mapped)
        return copied
    if isinstance(value, Mapping):
        return {key: map_tensors(function, each, other) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [map_tensors(function, each, other) for each in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: map_tensors(function, getattr(value, field.name), other)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **fields)
    return other(value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested structure; see `map_tensors`."""
    found: list[torch.Tensor] = []

    def note(each: torch.Tensor) -> torch.Tensor:
        found.append(each)
        return each  # a dataclass that is made anew may compute something from its fields

    map_tensors(note, value)
    return found
