"""Find the example of a dataset that makes a loss nan."""

from __future__ import annotations

from collections.abc import Sequence
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


def _is_finite(value: object) -> bool:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return bool(torch.isfinite(value).all())
    return not isinstance(value, float) or -float("inf") < value < float("inf")
