"""Paired comparison of models from the mean of the devices' score vectors.

For k models a device sends a vector of 3k - 2 elements: the score of each model, the difference of
each model but the first to the first, and the squares of these differences. The mean over devices
is all that the comparison needs, so the vectors can be summed securely.

>>> mean = torch.stack([score_vector([0.5, 0.25]), score_vector([0.75, 0.25])]).mean(0)
>>> scores, differences, errors = comparison(mean.tolist(), devices=2)
>>> scores, differences, errors
([0.625, 0.25], [0.0, -0.375], [0.0, 0.125])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_ROUNDING = 1e-4
"""Largest error of an element of the mean: devices round theirs to steps of less than 1e-6."""


def comparisons_run_id(run_id: str) -> str:
    """The run id of secure sums of scores, distinct from that of the run's sums of updates."""
    return f"{run_id}/comparisons"


def vector_size(models: int) -> int:
    """Number of elements of a score vector, 3k - 2 for k models."""
    return 3 * models - 2


def score_vector(scores: Sequence[float]) -> torch.Tensor:
    """The score vector of one device, float64 (3k - 2), from its k scores."""
    values = torch.tensor(scores, dtype=torch.float64)
    differences = values[1:] - values[0]
    return torch.cat([values, differences, differences.square()])


def centred(vector: torch.Tensor) -> torch.Tensor:
    """A score vector with the middle of each element's range subtracted, float64 (3k - 2).

    Its 2-norm is at most `centred_norm`, about half of that of the vector itself.
    """
    return vector - _middles(len(vector))


def restored(mean: torch.Tensor) -> torch.Tensor:
    """The mean of score vectors, float64 (3k - 2), from that of centred ones."""
    return mean.double() + _middles(len(mean))


def centred_norm(models: int) -> float:
    """Largest 2-norm of a centred score vector of k models.

    Scores and squares are within 1/2 of their middles, differences within 1.
    """
    return math.sqrt(models / 4 + (models - 1) * 5 / 4)


def _middles(size: int) -> torch.Tensor:
    """Middle of each element's range: scores and squares are from 0 to 1, differences around 0."""
    models = (size + 2) // 3
    middles = torch.full((size,), 0.5, dtype=torch.float64)
    middles[models : 2 * models - 1] = 0
    return middles


def check(mean: Sequence[float]) -> None:
    """Refuse a mean (3k - 2) that score vectors of no devices have, but for the rounding of sums.

    >>> check([0.6, 0.4, -0.2, 0.05])
    >>> check([0.6, 0.4, -0.2, -0.05])
    Traceback (most recent call last):
        ...
    ValueError: the mean square of a difference is -0.05, and the square of their mean is 0.04

    Raises:
        ValueError: a score is not from 0 to 1, or the differences are not those of the scores.
    """
    models = (len(mean) + 2) // 3
    scores = mean[:models]
    for score in scores:
        if not -_ROUNDING <= score <= 1 + _ROUNDING:
            raise ValueError(f"a score is {score:g}, and each is from 0 to 1")
    differences = mean[models : 2 * models - 1]
    squares = mean[2 * models - 1 :]
    for score, difference, square in zip(scores[1:], differences, squares, strict=True):
        if abs(score - scores[0] - difference) > _ROUNDING:
            raise ValueError(
                f"a difference is {difference:g}, and that of the scores {score - scores[0]:g}"
            )
        if not difference**2 - _ROUNDING <= square <= 1 + _ROUNDING:
            raise ValueError(
                f"the mean square of a difference is {square:g}, and the square of their mean is "
                f"{difference**2:g}"
            )


def comparison(
    mean: Sequence[float], *, devices: int, noise: float = 0.0
) -> tuple[list[float], list[float], list[float]]:
    """Mean score, mean difference to the first model and its standard error, for each model.

    Args:
        mean: of the devices' score vectors (3k - 2).
        devices: number of vectors in the mean, at least two.
        noise: standard deviation of the noise of an element of the mean. It adds to the error of a
            difference, and the variance of the differences is taken to be larger by as much as the
            noise may have lowered it.
    """
    models = (len(mean) + 2) // 3
    differences = [0.0, *mean[models : 2 * models - 1]]
    squares = [0.0, *mean[2 * models - 1 :]]
    # Rounding of the sums may leave a variance just below zero.
    variances = [max(s - d * d, 0.0) for d, s in zip(differences, squares, strict=True)]
    squared = ((variance + noise) / (devices - 1) + noise**2 for variance in variances[1:])
    errors = [0.0, *map(math.sqrt, squared)]
    return list(mean[:models]), differences, errors
