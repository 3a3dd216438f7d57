"""Merge the updates of the federated and the datacenter regime into one pseudo-gradient.

Every vector is a pseudo-gradient, the model before minus the model after (Reddi et al. 2021),
float32 (N). Functions that merge write into the memory of an argument, as their docstrings say.

>>> import torch
>>> federated, datacenter = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
>>> norms, cosine = norms_and_cosine({"federated": federated, "datacenter": datacenter})
>>> round(cosine, 6)
-0.707107
>>> remove_conflict(datacenter, federated)
tensor([0., 1.])
>>> interpolate(federated, datacenter, datacenter_weight=0.25)
tensor([0.7500, 0.2500])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

TILE = 1 << 17
"""Elements of a vector converted to double precision at a time."""


def interpolate(
    federated: torch.Tensor, datacenter: torch.Tensor, *, datacenter_weight: float
) -> torch.Tensor:
    """Return the mean with `datacenter_weight` (0 to 1), in the memory of `federated`."""
    return federated.mul_(1 - datacenter_weight).add_(datacenter, alpha=datacenter_weight)


def remove_conflict(datacenter: torch.Tensor, federated: torch.Tensor) -> torch.Tensor:
    """Remove from `datacenter`, in place, its component against `federated` (Yu et al. 2020)."""
    product = dot(datacenter, federated)
    square = dot(federated, federated)
    if product < 0 < square:
        if -product / square <= torch.finfo(datacenter.dtype).max:
            datacenter.sub_(federated, alpha=product / square)
        else:  # tiny elements: the quotient is above the range of float32, and the parts are not
            norm = math.sqrt(square)
            datacenter.sub_(federated / norm, alpha=product / norm)
    return datacenter


def mean_by_examples(updates: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Average several datacenters' vectors by their examples, in the memory of the first.

    With no examples at all, every vector has the same weight.
    """
    total = sum(examples for _, examples in updates)
    weights = [examples / total if total else 1 / len(updates) for _, examples in updates]
    merged = updates[0][0].mul_(weights[0])
    for (vector, _), weight in zip(updates[1:], weights[1:], strict=True):
        merged.add_(vector, alpha=weight)
    return merged


def weighted_mean(
    updates: Mapping[str, tuple[torch.Tensor, int]], weights: Mapping[str, float]
) -> tuple[torch.Tensor, float]:
    """Average vectors by their examples times a weight, in the memory of the first.

    Returns the mean and its own weight, the mean of the weights by examples: with equal weights
    the mean is that of `mean_by_examples`, and its weight is theirs.

    Args:
        updates: vector and examples by name.
        weights: from 0, by the same names; not all 0.
    """
    total = sum(examples for _, examples in updates.values())
    parts = [
        (vector, weights[name] * (examples / total if total else 1 / len(updates)))
        for name, (vector, examples) in updates.items()
    ]
    weight = math.fsum(part for _, part in parts)
    (merged, first), *others = parts
    merged.mul_(first / weight)
    for vector, part in others:
        merged.add_(vector, alpha=part / weight)
    return merged, weight


def norms_and_cosine(
    vectors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, float], float | None]:
    """Return the 2-norm of each vector, and the cosine if there are two and neither is zero."""
    norms = {name: math.sqrt(dot(vector, vector)) for name, vector in vectors.items()}
    if len(vectors) != 2 or not all(norms.values()):
        return norms, None
    first, second = vectors.values()
    return norms, dot(first, second) / math.prod(norms.values())


def dot(first: torch.Tensor, second: torch.Tensor) -> float:
    """The inner product, summed in double precision."""
    doubles = torch.empty(2, TILE, dtype=torch.float64)  # reused: new pages are the costly part

    def product(a: torch.Tensor, b: torch.Tensor) -> float:
        left = doubles[0, : len(a)].copy_(a)
        right = left if first is second else doubles[1, : len(b)].copy_(b)
        return float(torch.dot(left, right))

    return math.fsum(map(product, torch.split(first, TILE), torch.split(second, TILE)))
