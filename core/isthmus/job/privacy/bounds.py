"""Numbers and names that all tables of differential privacy have, with their ranges."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

LARGEST_NOISE = 1e4
"""Largest noise multiplier: with more, nothing can be learned."""
MAX_CORRELATED_ROUNDS = 100_000
"""Most rounds of correlated noise: the search for its bands takes time in proportion."""
MOST_MEASUREMENTS = 1_000_000
"""Most evaluations and comparisons of a device."""
SMALLEST_CLIP = 1e-9
LARGEST_CLIP = 1e9
"""Clipping bounds with which updates and their noise are numbers of float32, and of any ring of
secure aggregation."""


def _clip_in_range(clip: float) -> float:
    if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
        raise ValueError(
            f"{clip:g} is not in the range of clipping bounds, {SMALLEST_CLIP:g} to "
            f"{LARGEST_CLIP:g}; scale what is trained, or use another bound"
        )
    return clip


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NoiseMultiplier = Annotated[float, Field(gt=0, le=LARGEST_NOISE, allow_inf_nan=False)]
ClippingBound = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_clip_in_range)]
PopulationName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
