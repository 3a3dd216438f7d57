"""Batches and exact averages for training and evaluation in every regime.

A task returns one value per scored unit and never averages. Sums and counts are accumulated here,
on the device, so that partial last batches, ranks with unequal shares and clients of unequal size
are weighted by the number of units that they scored.

>>> import torch
>>> averages = Averages()
>>> averages.add({"loss": torch.tensor([1.0, 2.0, 3.0])})
>>> averages.add({"loss": torch.tensor([6.0])})
>>> averages.result()
{'loss': 3.0}
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from isthmus.errors import TaskError
from isthmus.task.definition import Task
from isthmus.task.loading import user_code
from isthmus.tensors.division import Division, divide
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.fingerprint import explain_difference

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from isthmus.job import Job


class Averages:
    """Running sums and counts of named metrics, as tensors on their original device."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        """float64 scalars."""
        self.counts: dict[str, int] = {}

    def add(self, figures: Mapping[str, torch.Tensor]) -> None:
        """Add the metrics of one batch: tensors of any shape with one value per scored unit."""
        for name, values in figures.items():
            values = values.cpu() if values.device.type == "mps" else values  # has no float64
            total = values.detach().sum(dtype=torch.float64)
            self.sums[name] = self.sums[name] + total if name in self.sums else total
            self.counts[name] = self.counts.get(name, 0) + values.numel()

    def result(self) -> dict[str, float]:
        """The averages; this synchronises with the device."""
        return {
            name: float(self.sums[name]) / self.counts[name] if self.counts[name] else math.nan
            for name in sorted(self.sums)
        }


def build_model(task: Task, seed: int) -> nn.Module:
    """The task's model, initialised equally on all participants with the same seed.

    Raises:
        TaskError: `model()` raised or did not return a module.
    """
    with _seeded(seed), user_code("model()"):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    return model


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all random generators that a task may use, and restore their states afterwards."""
    arrays = sys.modules.get("numpy")  # only if it was imported
    states = random.getstate(), None if arrays is None else arrays.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        if arrays is not None:
            arrays.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            if arrays is not None:
                arrays.random.set_state(states[1])


def build_same_model(
    task: Task,
    job: Job,
    header: bytes,
    frozen: Mapping[str, Sequence[float]],
    owner: str,
    *,
    on_device: bool = False,
) -> tuple[nn.Module, Division]:
    """Build the task's model, divided as the job says, and check that it equals the server's.

    Args:
        task: of this participant.
        job: gives the seed, and what is exchanged.
        header: `TensorLayout.header` of the server's model.
        frozen: the fingerprint of its frozen parameters.
        owner: owner of the model for the error message, e.g. "this device".
        on_device: whether personal parameters are trained.

    Raises:
        TaskError: `model()` failed, or the exchange sets or the frozen parameters differ.
        JobError: see `isthmus.tensors.division.divide`.
    """
    model = build_model(task, job.seed)
    expected = TensorLayout.from_header(header)
    division = divide(model, job.exchange, on_device=on_device)
    difference = division.exchanged.explain_difference(expected)
    difference = difference or explain_difference(model, frozen)
    if difference is not None:
        raise TaskError(f"{owner}'s model is not the server's: {difference}")
    return model, division


def count_examples(dataset: Dataset[Any], what: str) -> int:
    """Length of a map-style dataset.

    Raises:
        TaskError: it has no length, is empty, or is a DataLoader.
    """
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"{what} is a DataLoader; return its dataset, which Isthmus divides into batches"
        )
    with user_code(f"len() of {what}"):
        count = len(dataset)  # type: ignore[arg-type]  # not declared by torch's Dataset
    if count == 0:
        raise TaskError(f"{what} is empty: there is no data to train or evaluate on")
    return count


def batches(
    dataset: Dataset[Any], indices: Sequence[int], batch_size: int, device: torch.device
) -> Iterator[tuple[Any, Any]]:
    """`(inputs, target)` pairs of the examples at `indices`, in that order, moved to `device`."""
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        # The same batches as those of a loader, without collating single examples.
        for start in range(0, len(indices), batch_size):
            chosen = torch.as_tensor(indices[start : start + batch_size])
            with user_code("reading the dataset"):
                inputs, target = (tensor[chosen] for tensor in dataset.tensors)
            yield _to(inputs, device), _to(target, device)
        return
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=batch_size, sampler=indices)
    yield from read(loader, device)


def read(loader: DataLoader[Any], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """The batches of a loader as `(inputs, target)` pairs, moved to `device`."""
    iterator = iter(loader)
    while True:
        with user_code("reading the dataset"):
            batch = next(iterator, None)
        if batch is None:
            return
        if not isinstance(batch, (list, tuple)) or len(batch) != 2:
            raise TaskError(
                f"a dataset must give (input, target) pairs, not {type(batch).__name__}"
                + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")
            )
        yield _to(batch[0], device), _to(batch[1], device)


def losses(task: Task, model: nn.Module, inputs: Any, target: Any) -> tuple[Any, torch.Tensor]:
    """The model's output and the loss of each scored unit.

    Raises:
        TaskError: the task's code raised an exception, or its loss is already averaged.
    """
    with user_code("forward()"):
        output = task.forward(model, inputs)
    return output, losses_of(task, output, target)


def output_of(task: Task, model: nn.Module, inputs: Any) -> Any:
    """The model's output for inputs on the processor, moved there from the model's device.

    Raises:
        TaskError: the task's code raised an exception.
    """
    cpu = torch.device("cpu")
    device = next((each.device for each in model.parameters()), cpu)
    with user_code("forward()"):
        return _to(task.forward(model, _to(inputs, device)), cpu)


def losses_of(task: Task, output: Any, target: Any) -> torch.Tensor:
    """The loss of each scored unit of an output.

    Raises:
        TaskError: the task's code raised an exception, or its loss is already averaged.
    """
    with user_code("loss()"):
        values = task.loss(output, target)
    if not isinstance(values, torch.Tensor) or values.ndim == 0:
        raise TaskError(
            "loss() must return one value per example, not a single number; "
            "with PyTorch's losses use reduction='none'"
        )
    return values


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    dataset: Dataset[Any],
    indices: Sequence[int],
    batch_size: int,
    device: torch.device,
) -> Averages:
    """Loss and metrics of the examples at `indices`, with the model in evaluation mode."""
    averages = Averages()
    was_training = model.training
    model.eval()
    try:
        for inputs, target in batches(dataset, indices, batch_size, device):
            output, values = losses(task, model, inputs, target)
            with user_code("metrics()"):
                figures = task.metrics(output, target)
            _check_figures(figures)
            averages.add({"loss": values, **figures})
    finally:
        model.train(was_training)
    return averages


def _check_figures(figures: Any) -> None:
    """Refuse metrics that are already averaged, which would weight partial batches wrongly."""
    if not isinstance(figures, Mapping):
        raise TaskError(
            f"metrics() must return a dictionary of tensors, not {type(figures).__name__}"
        )
    if "loss" in figures:
        raise TaskError(
            "metrics() has a figure 'loss', which is the name of loss()'s result; rename it"
        )
    for name, values in figures.items():
        if not isinstance(values, torch.Tensor) or values.ndim == 0:
            raise TaskError(
                f"metrics() must return one value per example for {name!r}, not a single number"
            )


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type != "cpu")
    if isinstance(value, dict):
        return {key: _to(inner, device) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [_to(inner, device) for inner in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value
