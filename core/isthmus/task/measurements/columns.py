"""Columns of the devices' data, and what is counted of each: numbers between bounds, or categories.

The form of the counts depends on no data. One sum has everything: counts, means, variances,
histograms and quantiles.

>>> import torch
>>> age = Column(0, 100, bins=10)
>>> total = sum(age.count(torch.tensor(each)) for each in ([20.0, 30.0], [40.0, 90.0]))
>>> figures = age.describe(total, minimum=1)
>>> figures["count"], round(figures["mean"], 4), round(figures["variance"], 4)
(4, 45.0, 725.0)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isthmus.errors import TaskError
from isthmus.task.measurements.metrics import STEPS, quantile_bin, whole

if TYPE_CHECKING:
    import torch

_LARGEST = 1e150
"""Bounds of a column are below it, so that the square of their distance is finite."""

_ADDED = 1e-9
"""Largest error of a sum of many values in float64, as a part of their number."""

QUANTILES = {"p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9}
"""Quantiles of a column."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of numbers between declared bounds.

    With h half the distance of the bounds, the mean differs from that of the pooled data by at
    most h / 2**29 and the variance by at most 3 h**2 / 2**29: each device rounds its two sums of
    values, moved and scaled to -1 to 1, to steps of 1 / 2**28. Counts are exact. A quantile is the
    middle of the bin that has it, so it differs by at most half a bin.
    """

    low: float
    """Values below it are raised to it."""
    high: float
    """Values above it are lowered to it."""
    bins: int = 50
    """Bins of equal width between the bounds. Whole numbers from a to b are in the middles of the
    bins of `Column(a - 0.5, b + 0.5, bins=b - a + 1)`, so their quantiles are exact."""

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            TaskError: they are not usable.
        """
        if not -_LARGEST < self.low < self.high < _LARGEST:
            raise TaskError(
                f"{self} is not usable: low must be below high, and both within {_LARGEST:g}"
            )
        if not isinstance(self.bins, int) or self.bins < 1:
            raise TaskError(f"{self} is not usable: bins must be a whole number of 1 or more")

    @property
    def size(self) -> int:
        """The values, the missing and the clipped ones, the two sums, and the bins."""
        return 5 + self.bins

    def count(self, values: torch.Tensor) -> torch.Tensor:
        """The counts, int64 (size), of one device's values (n); nan is a missing value.

        Raises:
            TaskError: there are too many.
        """
        import torch

        numbers = values.double()[~values.isnan()]
        clipped = numbers.clamp(self.low, self.high)
        half = (self.high - self.low) / 2
        scaled = (clipped - self.low) / half - 1
        of_bins = (clipped - self.low) * self.bins / (self.high - self.low)
        places = of_bins.long().clamp(0, self.bins - 1)
        tally = [
            len(numbers),
            len(values) - len(numbers),
            int((clipped != numbers).sum()),
            float(scaled.sum()) * STEPS,
            float(scaled.square().sum()) * STEPS,
        ]
        bins = torch.bincount(places, minlength=self.bins).double()
        return whole(torch.cat([torch.tensor(tally, dtype=torch.float64), bins]))

    def check(self, total: torch.Tensor, devices: int) -> None:
        """Refuse a sum of counts, int64 (size), that so many devices cannot have, with any values.

        Raises:
            ValueError: it is such a sum.
        """
        number, missing, clipped, first, second, *bins = total.tolist()
        if min(number, missing, clipped, second, *bins) < 0:
            raise ValueError("a count is below 0")
        if sum(bins) != number or clipped > number:
            raise ValueError("the bins have other values than the column")
        # Each device rounds its sums, of values from -1 to 1 that were added in float64.
        most = number * STEPS * (1 + _ADDED) + devices
        if max(abs(first), second) > most:
            raise ValueError(f"the mean is not from {self.low:g} to {self.high:g}")

    def describe(self, total: torch.Tensor, minimum: int) -> dict[str, Any]:
        """What the sum of the devices' counts, int64 (size), tells; None for what is not shown.

        Neighbouring bins are joined until each has `minimum` values. A quantile needs as many on
        either side.
        """
        number, missing, clipped, first, second, *bins = total.tolist()
        figures: dict[str, Any] = {
            "count": shown(number, minimum),
            "missing": shown(missing, minimum),
            "clipped": shown(clipped, minimum),
        }
        if number < minimum or not number:
            return figures
        half = (self.high - self.low) / 2
        mean = first / STEPS / number
        square = second / STEPS / number
        variance = (square - mean**2) * half**2
        precision = 3 * half**2 / (2 * STEPS)
        if variance <= precision:  # the values are equal, as far as the sums can tell
            variance = 0.0
        width = (self.high - self.low) / self.bins
        edges, counts = joined(bins, minimum)
        quantiles = {
            name: self.low + (quantile_bin(bins, share) + 0.5) * width
            for name, share in QUANTILES.items()
            if number * min(share, 1 - share) >= minimum - 1e-9
        }
        return {
            **figures,
            "mean": self.low + half * (mean + 1),
            "variance": variance,
            "variance_error": precision,
            "deviation": math.sqrt(variance),
            "quantiles": quantiles,
            "histogram": {
                "edges": [_short(self.low + edge * width) for edge in edges],
                "counts": counts,
            },
        }


def _short(value: float) -> float:
    """Without the last digits, which are of the computer's arithmetic."""
    return float(f"{value:.12g}")


@dataclasses.dataclass(frozen=True)
class Category:
    """A column of categories, of which the task declares the possible values."""

    values: Sequence[Any]
    """The values, which are compared with ``==``; others are counted together. Numbers are compared
    in the data's dtype: 0.1 is also that of float32."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            TaskError: there are none, or two are equal, by themselves or as text.
        """
        names = list(map(str, self.values))
        values = list(self.values)
        equal = any(value in values[:place] for place, value in enumerate(values))
        if not names or equal or len(set(names)) < len(names):
            raise TaskError(f"{self} is not usable: give different values, at least one")

    @property
    def size(self) -> int:
        """The values, and all others."""
        return len(self.values) + 1

    def count(self, values: Sequence[Any] | torch.Tensor) -> torch.Tensor:
        """The counts, int64 (size), of one device's values (n).

        Raises:
            ValueError: they have another shape.
        """
        import torch

        if getattr(getattr(values, "dtype", None), "kind", "") in ("b", "f", "i", "u"):
            values = torch.as_tensor(values)  # a numeric array, or a column of a frame
        if isinstance(values, torch.Tensor):
            if values.dim() != 1:
                raise ValueError(f"its shape is {tuple(values.shape)}, not (rows,)")
            counts = [_count(values, value) for value in self.values]
        else:
            values = list(values)
            counts = [sum(each == value for each in values) for value in self.values]
        return torch.tensor([*counts, len(values) - sum(counts)], dtype=torch.int64)

    def check(self, total: torch.Tensor, devices: int) -> None:
        """See `Column.check`.

        Raises:
            ValueError: a count is below 0.
        """
        if bool((total < 0).any()):
            raise ValueError("a count is below 0")

    def describe(self, total: torch.Tensor, minimum: int) -> dict[str, Any]:
        """The count of each value by its text; None for what is not shown.

        Counts from 1 to below `minimum` are not shown. Neither are the next larger ones until
        those that are not shown have `minimum` values together: the total would tell them.
        """
        counts = total.tolist()
        number = sum(counts)
        if number < minimum:
            return {"count": shown(number, minimum)}
        order = sorted(
            (each for each in range(len(counts)) if counts[each]), key=counts.__getitem__
        )
        hidden = [each for each in order if counts[each] < minimum]
        for each in order[len(hidden) :]:
            if not hidden or sum(counts[place] for place in hidden) >= minimum:
                break
            hidden.append(each)
        visible = [None if each in hidden else count for each, count in enumerate(counts)]
        values = dict(zip(map(str, self.values), visible, strict=False))
        return {"count": number, "values": values, "other": visible[-1]}


def _count(values: torch.Tensor, value: object) -> int:
    """How many values (n) equal a category, as a number of their dtype."""
    if not isinstance(value, int | float):
        return 0
    same = values.new_tensor(value) if values.is_floating_point() else value
    return int((values == same).sum())


def shown(count: int, minimum: int) -> int | None:
    """A count, or None if it is of few values."""
    return count if count >= minimum or count == 0 else None


def joined(bins: Sequence[int], minimum: int) -> tuple[list[int], list[int]]:
    """Edges and counts of neighbouring bins joined until each has at least `minimum` values.

    >>> joined([1, 4, 0, 9, 2], 5)
    ([0, 2, 5], [5, 11])
    """
    edges = [0]
    counts = list[int]()
    count = 0
    for place, number in enumerate(bins):
        count += number
        if count >= minimum:
            edges.append(place + 1)
            counts.append(count)
            count = 0
    if counts:  # what is left is part of the last one
        counts[-1] += count
        edges[-1] = len(bins)
    return edges, counts
