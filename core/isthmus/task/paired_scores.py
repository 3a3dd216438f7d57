"""A device's scores of several models, as the numbers whose mean over devices is a comparison.

For k models that is a vector of 3k - 2: each score, then each but the first one's difference to
the first, then the squares of those. Devices send it, masked or not; only its mean is needed.

>>> mean = torch.stack([figures([0.5, 0.25]), figures([0.75, 0.25])]).mean(0)
>>> scores, differences, errors = results(mean.tolist(), devices=2)
>>> scores, differences, errors
([0.625, 0.25], [0.0, -0.375], [0.0, 0.125])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def comparisons_run_id(run_id: str) -> str:
    """What agreements about visits call a run: no sum of updates is set against one of scores."""
    return f"{run_id}/visits"


def length(models: int) -> int:
    """Elements of the vector."""
    return 3 * models - 2


def figures(scores: Sequence[float]) -> torch.Tensor:
    """One device's vector, float64 (3k - 2)."""
    values = torch.tensor(scores, dtype=torch.float64)
    differences = values[1:] - values[0]
    return torch.cat([values, differences, differences.square()])


def results(mean: Sequence[float], *, devices: int) -> tuple[list[float], list[float], list[float]]:
    """Of each model: mean score, mean difference to the first, and that one's standard error.

    Args:
        mean: of the devices' vectors.
        devices: at least two.
    """
    models = (len(mean) + 2) // 3
    differences = [0.0, *mean[models : 2 * models - 1]]
    squares = [0.0, *mean[2 * models - 1 :]]
    # Sums that were rounded may leave a variance just below zero.
    variances = [max(s - d * d, 0.0) for d, s in zip(differences, squares, strict=True)]
    errors = [math.sqrt(variance / (devices - 1)) for variance in variances]
    return list(mean[:models]), differences, errors
