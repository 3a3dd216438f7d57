"""What a task returns of a batch, and exact averages of it.

A task returns one value per scored unit and never averages. Sums and counts are accumulated here,
on the device, so that partial last batches, ranks with unequal shares and clients of unequal size
are weighted by the number of units that they scored.

>>> import torch
>>> averages = Averages()
>>> averages.add({"loss": UnitValues(torch.tensor([1.0, 2.0, 3.0]))})
>>> averages.add({"loss": UnitValues(torch.tensor([6.0, 9.0]), torch.tensor([True, False]))})
>>> averages.result()
{'loss': 3.0}
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.definition import MAX_FIGURE_NAME, StepLoss, Task, defines
from isthmus.task.loading import user_code
from isthmus.task.scoring.inputs import move

_ONE_VALUE = (
    "loss() must return one value per example, not a single number; with PyTorch's losses use "
    "reduction='none', and for a loss of the batch as a whole define training_step()"
)


UNUSABLE_WEIGHTS = (
    "a weight that is negative or not finite; give the weight of each value as a number of 0 or "
    "more, such as its number of tokens"
)


@dataclasses.dataclass(frozen=True)
class UnitValues:
    """One value for each scored unit of a batch."""

    values: torch.Tensor
    """Any shape but 0-d."""
    weights: torch.Tensor | None = None
    """Weights of the same shape, or a mask of the units that are scored; None: all count once."""

    def total(self) -> torch.Tensor:
        """The weighted sum, a scalar. Values of weight 0 do not matter, even if not finite."""
        if self.weights is None:
            return self.values.sum()
        return self._weighted(self.values).sum()

    def count(self) -> int | torch.Tensor:
        """The sum of the weights: a number without weights, otherwise a float64 scalar.

        It is nan if a weight is negative or not a number, so that no mean hides it.
        """
        if self.weights is None:
            return self.values.numel()
        weights = _wide(self.weights)
        total = weights.sum(dtype=torch.float64)
        if weights.dtype == torch.bool or not weights.numel():
            return total
        # Chosen where the weights are: reading them would wait for an accelerator in every batch.
        return torch.where(weights.min() < 0, math.nan, total)

    def mean(self) -> torch.Tensor:
        """The weighted mean, a scalar; 0 if no unit is scored."""
        if self.weights is None:
            return self.values.mean()
        count = self.weights.sum()
        return self.total() / torch.where(count == 0, 1, count)

    def total64(self) -> torch.Tensor:
        """The weighted sum in float64, without gradient."""
        values = _wide(self.values.detach())
        if self.weights is None:
            return values.sum(dtype=torch.float64)
        return self._weighted(values.double()).sum()

    def scored(self, what: str) -> torch.Tensor:
        """The values (units,) of the units that a mask leaves.

        Raises:
            TaskError: there are weights other than 0 and 1.
        """
        if self.weights is None:
            return self.values.flatten()
        if not bool(((self.weights == 0) | (self.weights == 1)).all()):
            raise TaskError(
                f"{what} returned weights other than 0 and 1, and here units are counted; return "
                "a mask"
            )
        return self.values[self.weights.bool()]

    def weighed(self, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The values (units,) with a weight above 0, and these weights, float64 (units,).

        Raises:
            TaskError: a weight is negative or not finite.
        """
        if self.weights is None:
            values = self.values.flatten()
            return values, torch.ones_like(values, dtype=torch.float64)
        weights = _wide(self.weights.detach()).double()
        if not bool((weights.isfinite() & (weights >= 0)).all()):
            raise TaskError(f"{what} returned {UNUSABLE_WEIGHTS}")
        return self.values[weights > 0], weights[weights > 0]

    def on(self, device: torch.device) -> UnitValues:
        """The units, their values and weights on a device."""
        weights = None if self.weights is None else self.weights.to(device)
        return UnitValues(self.values.to(device), weights)

    def _weighted(self, values: torch.Tensor) -> torch.Tensor:
        assert self.weights is not None
        present = torch.where(self.weights != 0, values, 0)
        return present if self.weights.dtype == torch.bool else present * self.weights


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.cpu() if values.device.type == "mps" else values  # has no float64


def unit_values(returned: Any, single: str) -> UnitValues | None:
    """What a task returned: values, or a pair of values and their mask or weights.

    Args:
        returned: by the task.
        single: the method for error messages, such as ``loss()``.

    NumPy arrays become tensors that share their memory.

    Returns:
        None if it is a single number or something else, see `described`.

    Raises:
        TaskError: the weights do not fit the values, or one of both is complex.
    """
    values = returned
    weights = None
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        values, weights = returned
    values = _as_tensor(values)
    weights = _as_tensor(weights)
    if not isinstance(values, torch.Tensor) or values.ndim == 0:
        return None
    if values.is_complex():  # their imaginary part would be dropped
        raise TaskError(f"{single} returned complex numbers; return real ones, as by .abs()")
    if weights is not None and (
        not isinstance(weights, torch.Tensor) or weights.shape != values.shape
    ):
        what = tuple(weights.shape) if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise TaskError(
            f"{single} returned values of shape {tuple(values.shape)} and a mask of {what}; "
            "give one element for each value"
        )
    if weights is not None and weights.is_complex():
        raise TaskError(f"{single} returned complex weights; return real ones, as by .abs()")
    return UnitValues(values, weights)


def _as_tensor(value: Any) -> Any:
    """A NumPy array of numbers as a tensor; everything else as it is."""
    arrays = sys.modules.get("numpy")  # only if it was imported
    if arrays is not None and isinstance(value, arrays.ndarray) and value.dtype.kind in "biuf":
        return torch.as_tensor(value)
    return value


def check_name(name: object, what: str) -> None:
    """Refuse the name of a figure that messages, logs and tables cannot have.

    Raises:
        TaskError: it is no text, empty, too long, or has line ends or other control characters.
    """
    if not (isinstance(name, str) and 0 < len(name) <= MAX_FIGURE_NAME and name.isprintable()):
        shown = ascii(name)[: MAX_FIGURE_NAME + 2]
        raise TaskError(
            f"{what} has a figure with the name {shown}; use a text of 1 to {MAX_FIGURE_NAME} "
            "printable characters"
        )


def described(value: Any) -> str:
    """What a task returned in place of one value per scored unit, for a sentence."""
    if isinstance(value, numbers.Number) or getattr(value, "ndim", None) == 0:
        return "a single number"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}; return a tensor"
    return f"{type(value).__name__}; return a tensor"


class Averages:
    """Running sums and counts of named metrics, as tensors on their original device."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        """float64 scalars."""
        self.counts: dict[str, int | torch.Tensor] = {}
        """Numbers of units, or their weights as float64 scalars."""

    def add(self, figures: Mapping[str, UnitValues]) -> None:
        """Add the metrics of one batch."""
        for name, values in figures.items():
            self.add_sum(name, values.total64(), values.count())

    def add_step(self, step: StepLoss, optimizer: str = "") -> None:
        """Add the loss and the named parts of one batch, with the weight of the step.

        The loss for one of several optimizers is added under its name, too.
        """
        figures = {"loss": step.loss, **step.parts}
        if optimizer:
            figures[f"{optimizer}_loss"] = step.loss
        for name, value in figures.items():
            weight = step.weight
            assert weight is not None
            self.add_sum(name, _wide(value.detach()).double() * weight, weight)

    def add_sum(self, name: str, total: torch.Tensor, count: float | torch.Tensor) -> None:
        """Add a sum of values, a float64 scalar, and the sum of their weights."""
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.counts[name] = self.counts.get(name, 0) + count  # type: ignore[assignment]  # float only with weights

    def result(self) -> dict[str, float]:
        """The averages; this synchronises with the device.

        Raises:
            TaskError: a weight was negative or not finite.
        """
        counts = {name: float(count) for name, count in self.counts.items()}
        for name, count in counts.items():
            if not math.isfinite(count):
                where = "loss()" if name == "loss" else f"metrics()[{name!r}]"
                raise TaskError(f"{where} returned {UNUSABLE_WEIGHTS}")
        return {
            name: float(self.sums[name]) / counts[name] if counts[name] else math.nan
            for name in sorted(self.sums)
        }


def losses(task: Task, model: nn.Module, inputs: Any, target: Any) -> tuple[Any, UnitValues]:
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
        return move(task.forward(model, move(inputs, device)), cpu)


def losses_of(task: Task, output: Any, target: Any) -> UnitValues:
    """The loss of each scored unit of an output.

    Raises:
        TaskError: there is none, the task's code raised an exception, its loss is already
            averaged, or it is of whole numbers or truth values.
    """
    if not defines(task, "loss"):
        raise TaskError(
            "this task has no loss(), which tells how good a model is on one example; define it"
        )
    with user_code("loss()"):
        returned = task.loss(output, target)
    first = returned[0] if isinstance(returned, (list, tuple)) and returned else returned
    if not isinstance(first, (torch.Tensor, numbers.Number)):
        raise TaskError(
            "loss() must return one value per example as a tensor, which has a gradient, and not "
            f"{type(first).__name__}"
        )
    values = unit_values(returned, "loss()")
    if values is None:
        raise TaskError(_ONE_VALUE)
    if not values.values.is_floating_point():  # has neither a mean nor a gradient in PyTorch
        raise TaskError(
            f"loss() returned values of {values.values.dtype}, which have no gradient; return "
            "floating-point numbers"
        )
    return values


def figures_of(task: Task, output: Any, target: Any) -> dict[str, UnitValues]:
    """The task's further metrics of an output.

    Raises:
        TaskError: the task's code raised an exception, or they are already averaged, which would
            weight partial batches wrongly.
    """
    with user_code("metrics()"):
        figures = task.metrics(output, target)
    if not isinstance(figures, Mapping):
        raise TaskError(
            f"metrics() must return a dictionary of tensors, not {type(figures).__name__}"
        )
    if "loss" in figures:
        raise TaskError(
            "metrics() has a figure 'loss', which is the name of loss()'s result; rename it"
        )
    checked = {}
    for name, returned in figures.items():
        check_name(name, "metrics()")
        values = unit_values(returned, f"metrics()[{name!r}]")
        if values is None:
            raise TaskError(
                f"metrics() must return one value per example for {name!r}, not "
                f"{described(returned)}"
            )
        checked[name] = values
    return checked
