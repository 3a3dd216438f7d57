"""Metrics that devices measure on their own validation data, each as whole numbers to be summed.

A task names them in `Task.device_metrics`. Their number and kind follow from the task alone, never
from a device's data, so all devices send vectors of one form and the sum of these is all that the
server needs.

>>> import torch
>>> accuracy = Mean(bins=4)
>>> tallies = []
>>> for values in [[1.0, 0.0], [1.0, 1.0, 1.0, 0.0]] * 5:
...     tally = accuracy.empty()
...     accuracy.add(tally, torch.tensor(values))
...     tallies.append(accuracy.counts(tally))
>>> figures = accuracy.figures("accuracy", torch.stack(tallies).sum(0))
>>> round(figures["accuracy"], 9), figures["accuracy_p50"]
(0.666666667, 0.625)

PyTorch is imported on first use, so that ``import isthmus`` stays fast.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isthmus.errors import TaskError

if TYPE_CHECKING:
    import torch

DEVICES = "devices_"
"""Prefix of the metrics of devices' validation data."""

LARGEST = 1 << 50
"""Largest absolute value of one count of one device. 2,048 of them can be added in 63 bits."""

MAX_COUNTS = 1 << 14
"""Most counts of one device."""

STEPS = 1 << 28
"""Steps of the fixed-point numbers in which values are added, from 0 to the bound of a metric."""

LARGEST_WEIGHT = LARGEST // STEPS
"""Largest sum of a device's weights: in steps it is `LARGEST`, and so is that of the values."""

SMALLEST_WEIGHT = 1 / 256
"""Smallest sum of a device's weights but 0: its rounding is less than a millionth of it."""

SPREAD = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Quantiles over devices that are computed from a histogram of the devices' own means."""

FEWEST = 5
"""Least number of devices on either side of a quantile over devices. With fewer it would be close
to the value of a single one."""

CLIPPED = "_clipped"
"""End of the name of the figure that says how many values were outside of a metric's bounds."""

LARGEST_BOUND = 1e300
"""Bounds of values are below it, so that their differences and powers of two are finite."""

Pairs = Callable[[Any, Any], "tuple[torch.Tensor, torch.Tensor]"]
"""Two tensors of one value per scored unit each, from a model's output and the target."""


class DeviceMetric(abc.ABC):
    """Whole numbers that describe a device's own data, and the figures of their sum."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Length of the vector of counts."""

    def empty(self) -> torch.Tensor:
        """The tally of no scored unit, float64 (size)."""
        import torch

        return torch.zeros(self.size, dtype=torch.float64)

    def counts(self, tally: torch.Tensor) -> torch.Tensor:
        """The counts of one device, int64 (size), from its tally.

        Raises:
            TaskError: a count is above `LARGEST`.
        """
        return whole(tally)

    def check(self, total: torch.Tensor, devices: int) -> None:
        """Refuse a sum of counts, int64 (size), that so many devices cannot have, with any data.

        Raises:
            ValueError: it is such a sum.
        """
        if bool((total < 0).any()):
            raise ValueError("a count is below 0")

    def published(self, total: torch.Tensor) -> torch.Tensor:
        """The part of a sum of counts, int64 (size), that reports have."""
        return total

    @abc.abstractmethod
    def figures(self, name: str, total: torch.Tensor) -> dict[str, float]:
        """Figures by name from the sum of the devices' counts, int64 (size); empty if it is 0."""


def whole(tally: torch.Tensor) -> torch.Tensor:
    """A tally rounded to whole numbers, int64.

    Raises:
        TaskError: a number is above `LARGEST`.
    """
    rounded = tally.round()
    if not bool((rounded.abs() <= LARGEST).all()):
        raise TaskError("this device has so much validation data that its counts cannot be summed")
    return rounded.long()


@dataclasses.dataclass(frozen=True)
class Mean(DeviceMetric):
    """A mean over scored units: of the figure of this name in `Task.metrics`, or of the loss.

    With `weighted`, each value counts with the weight that `Task.metrics` (or `Task.loss`) returns
    with it, such as its number of tokens: the mean is the sum of values times weights over the sum
    of weights, in all batches of all devices. Weights are whole steps of 1/2**28 in a device's sum,
    which is at most `LARGEST_WEIGHT`.

    The values of a device are added in float64 and rounded to whole steps of 1/2**28 of the bound,
    the next power of two above |low| and |high|. So the mean differs from that of the pooled data
    by at most half a step, and where values are multiples of a step, such as 0 and 1, not at all.
    If values were clipped, the figure with the suffix `_clipped` says how many, or their weight.
    """

    low: float = 0.0
    """Values below it are raised to it."""
    high: float = 1.0
    """Values above it are lowered to it."""
    bins: int = 20
    """Bins of the histogram of the devices' own means, between the bounds, from which the quantiles
    over devices are computed; they are the middles of bins. 0 for none."""
    weighted: bool = False
    """Values have weights of any size of 0 or more; else only a mask."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            TaskError: they are not usable.
        """
        if not -LARGEST_BOUND < self.low < self.high < LARGEST_BOUND:
            raise TaskError(f"{self} is not usable: low must be below high, and both finite")
        if not isinstance(self.bins, int) or self.bins < 0:
            raise TaskError(f"{self} is not usable: bins must be a whole number of 0 or more")
        # Such as the weights themselves, which belong to the values.
        if not isinstance(self.weighted, bool):
            raise TaskError(
                "isthmus.Mean(weighted=...) must be True or False; return the weights from "
                "metrics(), as a pair of values and weights"
            )

    @property
    def size(self) -> int:
        """The sum, the scored units, those that are not finite, the clipped ones, and the bins.

        With `weighted` the weights of these units, in steps of 1/2**28.
        """
        return 4 + self.bins

    @property
    def step(self) -> float:
        """The fixed-point step."""
        largest = max(abs(self.low), abs(self.high))
        return float(2.0 ** math.ceil(math.log2(largest)) / STEPS)

    @property
    def unit(self) -> float:
        """The weight that a 1 among the counts of units stands for."""
        return 1 / STEPS if self.weighted else 1.0

    def add(
        self, tally: torch.Tensor, values: torch.Tensor, weights: torch.Tensor | None = None
    ) -> None:
        """Add the values of scored units, any shape, to a tally.

        Args:
            tally: float64 (size).
            values: of the units.
            weights: of the units, float64 in the same shape and above 0; None if all count once.
        """
        flat = values.detach().double().flatten()
        finite = flat.isfinite()
        numbers = flat[finite]
        clipped = numbers.clamp(self.low, self.high)
        if weights is None:
            tally[0] += clipped.sum()
            tally[1] += len(flat)
            tally[2] += len(flat) - len(numbers)
            tally[3] += int((clipped != numbers).sum())
            return
        of_numbers = weights.flatten()[finite]
        tally[0] += (clipped * of_numbers).sum()
        tally[1] += weights.sum()
        tally[2] += weights.flatten()[~finite].sum()
        tally[3] += of_numbers[clipped != numbers].sum()

    def counts(self, tally: torch.Tensor) -> torch.Tensor:
        """See `DeviceMetric.counts`; the device's own mean is a 1 in one bin."""
        scaled = tally.clone()
        scaled[0] /= self.step
        if self.weighted:
            self._check_weight(float(tally[1]))
            scaled[1:4] /= self.unit
            scaled[2] = scaled[2].ceil()  # a value that is not finite is told, however light
        numbers = float(tally[1] - tally[2])
        if self.bins and numbers:
            share = (float(tally[0]) / numbers - self.low) / (self.high - self.low)
            scaled[4 + min(int(max(share, 0.0) * self.bins), self.bins - 1)] = 1
        return whole(scaled)

    def _check_weight(self, weight: float) -> None:
        """Refuse a device's sum of weights that whole steps do not hold exactly enough.

        Raises:
            TaskError: so it is.
        """
        if weight > LARGEST_WEIGHT:
            raise TaskError(
                f"the weights of this device's values add up to {weight:g}, and at most "
                f"{LARGEST_WEIGHT} can be summed over devices; divide all weights by one number in "
                "metrics(), which changes no mean"
            )
        if 0 < weight < SMALLEST_WEIGHT:
            raise TaskError(
                f"the weights of this device's values add up to {weight:g}, and less than "
                f"{SMALLEST_WEIGHT:g} cannot be counted exactly; multiply all weights by one "
                "number in metrics(), which changes no mean"
            )

    def check(self, total: torch.Tensor, devices: int) -> None:
        """See `DeviceMetric.check`: a mean is within the bounds, and each device is in one bin."""
        super().check(total[1:], devices)
        summed, units, not_finite, clipped, *histogram = total.tolist()
        # With weights each device rounds each of these three counts, by less than 1.
        rounding = 3 * devices if self.weighted else 0
        if not_finite + clipped > units + rounding:
            raise ValueError("more values are clipped or not finite than there are")
        weight = units * self.unit
        lowest = min(self.low * weight, self.low * (units - not_finite) * self.unit)
        highest = max(self.high * weight, self.high * (units - not_finite) * self.unit)
        # Of whole steps, and of adding many values in float64.
        slack = 2 * devices * self.step + 1e-9 * max(abs(lowest), abs(highest))
        if not lowest - slack <= summed * self.step <= highest + slack:
            raise ValueError(f"the mean is not from {self.low:g} to {self.high:g}")
        if sum(histogram) > devices:
            raise ValueError("a device has more than one mean")

    def figures(self, name: str, total: torch.Tensor) -> dict[str, float]:
        """The mean, nan if a value was not finite; how many were clipped, if any; and quantiles.

        A quantile over devices has at least `FEWEST` devices on either side.
        """
        summed, units, not_finite, clipped, *histogram = total.tolist()
        if not units:
            return {}
        figures = {name: math.nan if not_finite else summed * self.step / (units * self.unit)}
        if clipped:
            figures[f"{name}{CLIPPED}"] = clipped * self.unit
        for suffix, share in SPREAD.items():
            if sum(histogram) * min(share, 1 - share) < FEWEST - 1e-9:
                continue
            middle = (quantile_bin(histogram, share) + 0.5) / self.bins
            figures[f"{name}_{suffix}"] = self.low + middle * (self.high - self.low)
        return figures

    def published(self, total: torch.Tensor) -> torch.Tensor:
        """See `DeviceMetric.published`: not the histogram, in which each device is a 1."""
        return total[:4]


def quantile_bin(histogram: list[int], share: float) -> int:
    """The bin with the smallest value that at least this share of all values do not exceed.

    >>> quantile_bin([1, 0, 2, 1], 0.5)
    2
    """
    needed = share * sum(histogram)
    seen = 0
    for place, count in enumerate(histogram):
        seen += count
        if count and seen >= needed - 1e-9:
            return place
    return len(histogram) - 1


@dataclasses.dataclass(frozen=True)
class Confusion(DeviceMetric):
    """How many scored units of each class were predicted as each class."""

    classes: int
    of: Pairs
    """Class numbers as predicted and in truth, from 0, whole numbers of any equal shape."""

    def __post_init__(self) -> None:
        """Check the number of classes.

        Raises:
            TaskError: it is not usable.
        """
        if not isinstance(self.classes, int) or self.classes < 1:
            raise TaskError(f"Confusion({self.classes!r}) is not usable: give 1 class or more")

    @property
    def size(self) -> int:
        """Classes squared."""
        return self.classes**2

    def add(self, tally: torch.Tensor, predicted: torch.Tensor, truth: torch.Tensor) -> None:
        """Add scored units to a tally.

        Raises:
            TaskError: a class number is not below `classes`, or the shapes differ.
        """
        import torch

        if predicted.shape != truth.shape:
            raise TaskError(
                f"the predicted classes are {tuple(predicted.shape)} and the true ones "
                f"{tuple(truth.shape)}; give tensors of one shape"
            )
        if predicted.is_floating_point() or predicted.is_complex():
            raise TaskError(
                f"the predicted classes are {predicted.dtype}; give whole numbers, such as "
                "output.argmax(1)"
            )
        if not bool(truth.isfinite().all()):
            raise TaskError("a true class is not a number; give class numbers from 0")
        numbers = torch.stack(
            [truth.detach().long().flatten(), predicted.detach().long().flatten()]
        )
        if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.classes:
            raise TaskError(
                f"class numbers from {int(numbers.min())} to {int(numbers.max())} were given for "
                f"Confusion({self.classes}), which takes 0 to {self.classes - 1}"
            )
        cells = numbers[0] * self.classes + numbers[1]
        tally += torch.bincount(cells, minlength=self.size)

    def figures(self, name: str, total: torch.Tensor) -> dict[str, float]:
        """The accuracy, and the mean recall of the classes that occur."""
        matrix = total.double().view(self.classes, self.classes)
        of_class = matrix.sum(1)
        right = matrix.diagonal()
        present = of_class > 0
        if not bool(present.any()):
            return {}
        return {
            f"{name}_accuracy": float(right.sum() / matrix.sum()),
            f"{name}_recall": float((right[present] / of_class[present]).mean()),
        }


@dataclasses.dataclass(frozen=True)
class BinnedScores(DeviceMetric):
    """Histograms of scores from 0 to 1, of positive and of other units, for the area under the ROC.

    The area is that of the scores rounded to bins. It differs from that of the scores themselves by
    at most half the share of the pairs of a positive and another unit that are in one bin, which is
    the figure with the suffix `_error`.
    """

    of: Pairs
    """Scores from 0 to 1 and labels, of which those above 0 are positive. Other scores, such as
    logits, are clipped; the figure with the suffix `_clipped` says how many."""
    bins: int = 100

    def __post_init__(self) -> None:
        """Check the number of bins.

        Raises:
            TaskError: it is not usable.
        """
        if not isinstance(self.bins, int) or self.bins < 1:
            raise TaskError(f"BinnedScores(bins={self.bins!r}) is not usable: give 1 bin or more")

    @property
    def size(self) -> int:
        """The bins of both histograms, and the clipped scores."""
        return 2 * self.bins + 1

    def add(self, tally: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Add scored units to a tally.

        Raises:
            TaskError: a score or a label is not a finite number, or the shapes differ.
        """
        import torch

        finite = bool(scores.isfinite().all()) and bool(labels.isfinite().all())
        if scores.shape != labels.shape or not finite:
            raise TaskError(
                f"BinnedScores was given scores {tuple(scores.shape)} and labels "
                f"{tuple(labels.shape)}; give finite numbers in tensors of one shape"
            )
        tally[-1] += int(((scores < 0) | (scores > 1)).sum())
        places = (scores.detach().double().flatten() * self.bins).long().clamp(0, self.bins - 1)
        cells = places + self.bins * (labels.detach().flatten() > 0)
        tally[:-1] += torch.bincount(cells, minlength=self.size - 1)

    def figures(self, name: str, total: torch.Tensor) -> dict[str, float]:
        """The area under the ROC curve and the bound of its error; none if one label is missing."""
        others, positive = total[:-1].double().view(2, self.bins)
        pairs = float(others.sum() * positive.sum())
        if not pairs:
            return {}
        below = others.cumsum(0) - others
        same = float((positive * others).sum())
        figures = {
            name: (float((positive * below).sum()) + same / 2) / pairs,
            f"{name}_error": same / 2 / pairs,
        }
        return figures | ({f"{name}{CLIPPED}": clipped} if (clipped := int(total[-1])) else {})
