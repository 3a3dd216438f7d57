"""Evaluation of a model on a device's validation data: one vector of whole numbers.

The sum of the devices' vectors has the metrics of their pooled data, as exactly as
`isthmus.task.measurements.metrics` states for each kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from isthmus.errors import JobError, TaskError
from isthmus.job import Job
from isthmus.task.definition import Task
from isthmus.task.loading import user_code
from isthmus.task.measurements.metrics import (
    CLIPPED,
    DEVICES,
    MAX_COUNTS,
    SPREAD,
    BinnedScores,
    Confusion,
    DeviceMetric,
    Mean,
)
from isthmus.task.scoring import (
    UnitValues,
    batches,
    count_examples,
    figures_of,
    losses_of,
    output_of,
)

if TYPE_CHECKING:
    from torch.utils.data import Dataset

LARGEST_LOSS = 1000.0
"""Losses are clipped to this absolute value, unless the task gives other bounds for `loss`."""

DEFAULT_LOSS = Mean(-LARGEST_LOSS, LARGEST_LOSS, bins=0)
"""The metric `loss` of a task that gives no bounds for it."""


@dataclasses.dataclass(frozen=True)
class Clipping:
    """What to say of a metric of which values were outside of its bounds."""

    sentence: str
    share: float
    """Part of the values."""


class EvaluationVector:
    """What the numbers of a device's vector mean: the loss, and the task's `device_metrics`."""

    def __init__(self, task: Task) -> None:
        """Read the task's declaration.

        Raises:
            TaskError: it is not usable.
        """
        with user_code("device_metrics()"):
            declared = task.device_metrics()
        if not isinstance(declared, Mapping) or not all(
            isinstance(metric, (Mean, Confusion, BinnedScores)) for metric in declared.values()
        ):
            raise TaskError(
                "device_metrics() must return a dictionary of isthmus.Mean, isthmus.Confusion and "
                f"isthmus.BinnedScores by name, not {declared!r}"
            )
        self.metrics: dict[str, DeviceMetric] = {"loss": DEFAULT_LOSS, **declared}
        """By name, in the order of their numbers."""
        self.left_out: list[str] = []
        """Metrics of the task that are not measured."""
        self._check()
        self._task = task

    def _check(self) -> None:
        if self.size > MAX_COUNTS:
            raise TaskError(
                f"device_metrics() has {self.size} numbers, and devices send at most {MAX_COUNTS}; "
                "use fewer classes or bins"
            )
        if not isinstance(self.metrics["loss"], Mean):
            raise TaskError("device_metrics() has 'loss', which can only be an isthmus.Mean")
        for name in self.metrics:
            if not isinstance(name, str) or not name.isidentifier():
                raise TaskError(
                    f"device_metrics() has the name {name!r}; use letters, digits and underscores"
                )
        figures = self.figure_names
        twice = sorted({name for name in figures if figures.count(name) > 1})
        if twice:
            raise TaskError(f"device_metrics() gives two metrics the name {twice[0]!r}; rename one")

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(metric.size for metric in self.metrics.values())

    @property
    def figure_names(self) -> list[str]:
        """Names of all figures that `figures` may have."""
        return [
            DEVICES + figure
            for name, metric in self.metrics.items()
            for figure in _names(name, metric)
        ]

    def measure(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        batch_size: int,
        first: int | None = None,
    ) -> torch.Tensor:
        """The vector of one device, int64 (size); see `count`."""
        return self.count(model, dataset, batch_size, first)

    @torch.no_grad()
    def count(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        batch_size: int,
        first: int | None = None,
    ) -> torch.Tensor:
        """The counts of all metrics on one device, int64, with the model in evaluation mode.

        Args:
            model: the module to evaluate.
            dataset: `(input, target)` pairs.
            batch_size: examples per batch.
            first: batches that are counted; None for all.

        Raises:
            TaskError: the task's code raised, or the data cannot be counted.
        """
        tallies = {name: metric.empty() for name, metric in self.metrics.items()}
        examples = count_examples(dataset, "validation_data()")
        order = range(examples if first is None else min(examples, first * batch_size))
        was_training = model.training
        model.eval()
        try:
            for inputs, target in batches(
                self._task, dataset, order, batch_size, torch.device("cpu")
            ):
                output = output_of(self._task, model, inputs)
                values = losses_of(self._task, output, target)
                figures = {**figures_of(self._task, output, target), "loss": values}
                for name, metric in self.metrics.items():
                    _add(name, metric, tallies[name], figures, output, target)
        finally:
            model.train(was_training)
        return torch.cat([metric.counts(tallies[name]) for name, metric in self.metrics.items()])

    def check(self, total: torch.Tensor, devices: int) -> None:
        """Refuse a sum of vectors, int64 (size), that so many devices cannot have, with any data.

        Raises:
            ValueError: it is such a sum; with the name of the metric.
        """
        for name, metric, part in self._parts(total):
            try:
                metric.check(part, devices)
            except ValueError as error:
                raise ValueError(f"the counts of {name!r} are impossible: {error}") from None

    def figures(self, total: torch.Tensor) -> dict[str, float]:
        """The metrics of a sum of vectors, int64 (size), with the prefix `DEVICES`."""
        figures: dict[str, float] = {}
        for name, metric, part in self._parts(total):
            for figure, value in metric.figures(name, part).items():
                figures[DEVICES + figure] = value
        return figures

    def own_figures(self, counts: torch.Tensor) -> dict[str, float]:
        """The metrics of a device's own vector, int64 (size), by their names in the task."""
        figures: dict[str, float] = {}
        for name, metric, part in self._parts(counts):
            figures.update(metric.figures(name, part))
        return figures

    def not_finite(self, counts: torch.Tensor) -> list[str]:
        """Metrics of which `count` met a value that is nan or infinite; their means are nan."""
        return [
            name
            for name, metric, part in self._parts(counts)
            if isinstance(metric, Mean) and part[2]
        ]

    def sums(self, total: torch.Tensor) -> dict[str, list[int]]:
        """The numbers of each metric in a sum of vectors, int64 (size), as reports have them."""
        return {name: metric.published(part).tolist() for name, metric, part in self._parts(total)}

    def clipped(self, total: torch.Tensor) -> dict[str, Clipping]:
        """The metrics of which values in a sum of vectors, int64 (size), were clipped."""
        found = {}
        for name, metric, part in self._parts(total):
            count = metric.figures(name, part).get(name + CLIPPED, 0)
            if not count:
                continue
            low = 0.0
            high = 1.0
            instead = "give scores from 0 to 1, such as probabilities"
            units = float(part[:-1].sum())
            what = "values"
            if isinstance(metric, Mean):
                low = metric.low
                high = metric.high
                units = float(part[1]) * metric.unit
                what = "the weight of the values" if metric.weighted else "values"
                instead = f"declare bounds in device_metrics(), {name!r}: isthmus.Mean(low, high)"
            found[DEVICES + name] = Clipping(
                f"{count:.9g} of {units:.9g} {what} of {DEVICES}{name} were not within {low:g} to "
                f"{high:g} and were clipped; {instead}",
                count / units,
            )
        return found

    def _parts(self, total: torch.Tensor) -> Iterator[tuple[str, DeviceMetric, torch.Tensor]]:
        at = 0
        for name, metric in self.metrics.items():
            yield name, metric, total[at : at + metric.size]
            at += metric.size


def check_evaluates_on_devices(job: Job, task: Task) -> None:
    """Refuse a job that evaluates a task without `validation_data` on devices.

    Raises:
        JobError: with what to change.
    """
    if job.evaluation.devices and type(task).validation_data is Task.validation_data:
        raise JobError(
            f"evaluation.devices={job.evaluation.devices} and {type(task).__name__} has no "
            "validation_data(); add it, or set evaluation.devices = 0"
        )


def _add(
    name: str,
    metric: DeviceMetric,
    tally: torch.Tensor,
    figures: Mapping[str, UnitValues],
    output: Any,
    target: Any,
) -> None:
    """Add one batch to the tally of a metric.

    Raises:
        TaskError: the task's code raised, or what it returned cannot be counted.
    """
    if isinstance(metric, Mean):
        if name not in figures:
            raise TaskError(
                f"device_metrics() has Mean {name!r}, and metrics() has no figure of that name"
            )
        if metric.weighted:
            metric.add(tally, *figures[name].weighed(repr(name)))
            return
        metric.add(tally, _counted(name, figures[name]))
        return
    assert isinstance(metric, (Confusion, BinnedScores))
    with user_code(f"device_metrics()[{name!r}].of"):
        first, second = metric.of(output, target)
    metric.add(tally, first, second)


def _counted(name: str, figure: UnitValues) -> torch.Tensor:
    """The values of the units that a mask leaves.

    Raises:
        TaskError: there are weights.
    """
    try:
        return figure.scored(repr(name))
    except TaskError as error:
        raise TaskError(
            f'{error}, or declare {{"{name}": isthmus.Mean(low, high, weighted=True)}} in '
            "device_metrics()"
        ) from None


def _names(name: str, metric: DeviceMetric) -> list[str]:
    if isinstance(metric, Mean):
        spread = [f"{name}_{suffix}" for suffix in SPREAD if metric.bins]
        return [name, f"{name}{CLIPPED}", *spread]
    suffixes: tuple[str, ...] = ("", "_error", CLIPPED)
    if isinstance(metric, Confusion):
        suffixes = ("_accuracy", "_recall")
    return [name + suffix for suffix in suffixes]
