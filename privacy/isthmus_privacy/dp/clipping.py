"""Clip an update to a 2-norm, so that no device changes a sum by more.

>>> import torch
>>> update = torch.tensor([3.0, 4.0])
>>> clip_to_norm(update, 1.0), [round(x, 3) for x in update.tolist()]
(True, [0.6, 0.8])
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TILE = 1 << 20
_MARGIN = 1 - 2.0**-20
"""Rounding of the clipped elements to float32 changes their norm by less."""


def norm_of(vector: torch.Tensor) -> float:
    """2-norm of a vector (N) of any real floating type, added in float64."""
    parts = (vector[at : at + _TILE] for at in range(0, len(vector), _TILE))
    return math.sqrt(math.fsum(float(part.double().square().sum()) for part in parts))


def clip_to_norm(vector: torch.Tensor, bound: float) -> bool:
    """Scale a vector (N), finite, to a 2-norm of at most `bound`, in place.

    Returns:
        Whether it was longer.
    """
    norm = norm_of(vector)
    if norm <= bound * _MARGIN:
        return False
    factor = bound * _MARGIN / norm
    for start in range(0, len(vector), _TILE):
        part = vector[start : start + _TILE]
        # In float64: of a diverged update the factor may be below the least normal float32, and
        # would be rounded there, by up to a half and also upwards.
        part.copy_(part.double().mul_(factor))
    return norm > bound
