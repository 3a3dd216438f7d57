"""Evaluation on devices with noise: the mean of each metric on a device, within its bounds.

With `[privacy]` a device sends one number for each `isthmus.Mean` in `device_metrics()`: its own
mean, from -1 at the lower bound to 1 at the upper one. So a device changes the sum by at most
`norm`, and noise in proportion to that hides it. Every device counts the same, whatever its number
of examples. Histograms, and a loss without bounds, would get more noise than they have signal, and
are left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task.measurements.evaluation import DEFAULT_LOSS, Clipping, EvaluationVector
from isthmus.task.measurements.metrics import DEVICES, STEPS, Mean

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from isthmus.job import Job
    from isthmus.task.definition import Task

NOISE = "_noise"
"""End of the name of the figure with the standard deviation of the noise in a metric."""


def measured_norm(size: int) -> float:
    """Largest 2-norm of so many numbers from -1 to 1."""
    return math.sqrt(size)


class BoundedMeans(EvaluationVector):
    """What the numbers of a device's vector mean; they are whole steps of 1/2**28."""

    def __init__(self, task: Task) -> None:
        """Read the task's declaration.

        Raises:
            TaskError: it is not usable, or has no metric with bounds.
        """
        super().__init__(task)
        self.left_out = [
            name
            for name, metric in self.metrics.items()
            if not isinstance(metric, Mean) or metric is DEFAULT_LOSS
        ]
        self.metrics = {n: each for n, each in self.metrics.items() if n not in self.left_out}
        if not self.metrics:
            raise TaskError(
                f"with [privacy], devices evaluate the metrics that have bounds, and "
                f"{type(task).__name__} declares none; add one to device_metrics(), such as "
                '{"accuracy": isthmus.Mean()}, or {"loss": isthmus.Mean(0, 5)}'
            )

    @property
    def size(self) -> int:
        """Number of elements: one for each metric."""
        return len(self.metrics)

    @property
    def figure_names(self) -> list[str]:
        """See `EvaluationVector.figure_names`."""
        return [DEVICES + name + end for name in self.metrics for end in ("", NOISE)]

    def measure(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        batch_size: int,
        first: int | None = None,
    ) -> torch.Tensor:
        """See `EvaluationVector.measure`; a value that is not finite counts as the upper bound."""
        counts = self.count(model, dataset, batch_size, first)
        shares = []
        at = 0
        for metric in self.metrics.values():
            assert isinstance(metric, Mean)
            summed, units, not_finite, *_ = counts[at : at + metric.size].tolist()
            bounded = summed * metric.step + not_finite * metric.unit * metric.high
            mean = bounded / (units * metric.unit) if units else 0.0
            share = (mean - metric.low) / (metric.high - metric.low) if units else 0.5
            shares.append(round((2 * min(max(share, 0.0), 1.0) - 1) * STEPS))
            at += metric.size
        return torch.tensor(shares)

    def own_figures(self, counts: torch.Tensor) -> dict[str, float]:
        """See `EvaluationVector.own_figures`; without noise."""
        own = self.figures_of_mean(counts.double() / STEPS, 0.0)
        return {
            name.removeprefix(DEVICES): value
            for name, value in own.items()
            if not name.endswith(NOISE)
        }

    def sums(self, total: torch.Tensor) -> dict[str, list[int]]:
        """None: there are no whole numbers."""
        return {}

    def clipped(self, total: torch.Tensor) -> dict[str, Clipping]:
        """None: devices do not say how many values were outside of the bounds."""
        return {}

    def figures_of_mean(self, mean: torch.Tensor, deviation: float) -> dict[str, float]:
        """The metrics of the mean of the devices' numbers, float (size), with the noise of each.

        Args:
            mean: with noise, by which a metric may be outside of its bounds: cutting it off would
                bias it, and make the best of several models equal.
            deviation: standard deviation of the noise of an element of the mean.
        """
        figures: dict[str, float] = {}
        for (name, metric), value in zip(self.metrics.items(), mean.tolist(), strict=True):
            assert isinstance(metric, Mean)
            half = (metric.high - metric.low) / 2
            figures[DEVICES + name] = metric.low + half * (value + 1)
            figures[DEVICES + name + NOISE] = half * deviation
        return figures


def evaluation_vector(job: Job, task: Task) -> EvaluationVector:
    """What devices send of an evaluation in this job.

    Raises:
        TaskError: the task's declaration cannot be used.
    """
    return EvaluationVector(task) if job.privacy is None else BoundedMeans(task)


def numbers_of(steps: torch.Tensor) -> torch.Tensor:
    """The numbers from -1 to 1, float32 (size), of a device's whole steps, int64 (size)."""
    return (steps.double() / STEPS).clamp(-1, 1).float()
