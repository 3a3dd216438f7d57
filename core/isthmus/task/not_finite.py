"""What to say of figures that are not finite, and the example that makes a loss nan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def explain_not_finite(dataset: Dataset[Any], indices: Sequence[int], what: str) -> str:
    """What to do about a loss that is not finite: name the example to blame, if there is one.

    Args:
        dataset: a map-style dataset; it is read again, up to the first example to blame.
        indices: of the examples that were used.
        what: name of the dataset, such as ``eval_data()``.
    """
    for index in indices:
        if not all(map(_is_finite, tree_leaves(dataset[index]))):
            return f"example {index} of {what} has a value that is not finite; remove or fill it"
    return "lower the learning rate or check the data"


def not_finite_in_words(figures: Mapping[str, float]) -> str:
    """Which figures are nan or infinite, as in ", where f1 is nan"; empty if all are finite."""
    found = [f"{name} is {value}" for name, value in figures.items() if not math.isfinite(value)]
    return f", where {', '.join(found)}" if found else ""


def _is_finite(value: object) -> bool:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return bool(torch.isfinite(value).all())
    return not isinstance(value, float) or -float("inf") < value < float("inf")
