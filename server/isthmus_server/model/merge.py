"""From the updates of both regimes to one pseudo-gradient.

Every vector here is a pseudo-gradient, the model before minus the model after (Reddi et al. 2021),
float32 (N); each function uses up its arguments' memory.

>>> import torch
>>> fleet, theirs = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
>>> round(geometry({"federated": fleet, "datacenter": theirs})[1], 6)
-0.707107
>>> project(theirs, fleet)
tensor([0., 1.])
>>> weigh(fleet, theirs, share=0.25)
tensor([0.7500, 0.2500])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

TILE = 1 << 17
"""Elements of a vector that are looked at in double precision at a time."""


def weigh(fleet: torch.Tensor, theirs: torch.Tensor, *, share: float) -> torch.Tensor:
    """The weighted mean, in the fleet's memory; `share` is the datacenter's part of 1."""
    return fleet.mul_(1 - share).add_(theirs, alpha=share)


def project(theirs: torch.Tensor, fleet: torch.Tensor) -> torch.Tensor:
    """The datacenter's without what points against the fleet's, in place (Yu et al. 2020)."""
    product, square = dot(theirs, fleet), dot(fleet, fleet)
    if product < 0 < square:
        theirs.sub_(fleet, alpha=product / square)
    return theirs


def mean(parts: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """The mean of several datacenters' by their examples, in the first one's memory."""
    total = sum(examples for _, examples in parts)
    shares = [examples / total if total else 1 / len(parts) for _, examples in parts]
    merged = parts[0][0].mul_(shares[0])
    for (vector, _), share in zip(parts[1:], shares[1:], strict=True):
        merged.add_(vector, alpha=share)
    return merged


def geometry(vectors: Mapping[str, torch.Tensor]) -> tuple[dict[str, float], float | None]:
    """The 2-norm of each, and the cosine between them where there are two that are not zero."""
    norms = {name: math.sqrt(dot(vector, vector)) for name, vector in vectors.items()}
    if len(vectors) != 2 or not all(norms.values()):
        return norms, None
    one, other = vectors.values()
    return norms, dot(one, other) / math.prod(norms.values())


def dot(one: torch.Tensor, other: torch.Tensor) -> float:
    """The inner product, summed in double precision."""
    doubles = torch.empty(2, TILE, dtype=torch.float64)  # one for all: fresh pages cost the most

    def product(a: torch.Tensor, b: torch.Tensor) -> float:
        left = doubles[0, : len(a)].copy_(a)
        return float(torch.dot(left, left if one is other else doubles[1, : len(b)].copy_(b)))

    return math.fsum(map(product, torch.split(one, TILE), torch.split(other, TILE)))
