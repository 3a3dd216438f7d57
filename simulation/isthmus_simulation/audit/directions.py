"""Directions of canaries: each changes elements of the update that no other canary changes.

>>> directions = Directions.drawn({"weight": 6, "bias": 2}, count=4, seed=1)
>>> directions.vector(2).tolist().count(0.0), round(float(directions.vector(2).norm()), 6)
(6, 1.0)
>>> [round(x, 6) for x in directions.of_all(3 * directions.vector(2)).tolist()]
[0.0, 0.0, 3.0, 0.0]
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Self

import torch


@dataclasses.dataclass(frozen=True)
class Directions:
    """Orthonormal vectors (N), with random elements of random signs.

    What devices and examples that are no canaries contribute has a small part in each of them.
    """

    count: int
    owner: torch.Tensor
    """The number of the direction that has each element, int64 (N)."""
    signs: torch.Tensor
    """1 or -1, float32 (N)."""
    lengths: torch.Tensor
    """The norm of the signs of each direction, float64 (count)."""
    places: Mapping[str, slice]
    """Where the elements of each named part are."""

    @classmethod
    def drawn(cls, sizes: Mapping[str, int], count: int, seed: int) -> Self:
        """Draw directions of vectors whose parts have some names and numbers of elements.

        Args:
            sizes: of the parts, in order.
            count: of the directions, at most the elements.
            seed: decides them.
        """
        size = sum(sizes.values())
        generator = torch.Generator().manual_seed(seed)
        owner = torch.empty(size, dtype=torch.int64)
        owner[torch.randperm(size, generator=generator)] = torch.arange(size) % count
        signs = (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).float()
        ends = list(itertools.accumulate(sizes.values()))
        starts = [0, *ends[:-1]]
        places = {
            name: slice(start, end) for name, start, end in zip(sizes, starts, ends, strict=True)
        }
        return cls(count, owner, signs, _lengths(owner, count), places)

    def of_parts(self, names: Collection[str]) -> Directions:
        """Their parts with some names, in this order, scaled to norm 1 again."""
        owner = torch.cat([self.owner[self.places[name]] for name in names])
        signs = torch.cat([self.signs[self.places[name]] for name in names])
        return Directions(self.count, owner, signs, _lengths(owner, self.count), {})

    def vector(self, number: int) -> torch.Tensor:
        """One of them, float32 (N)."""
        chosen = torch.where(self.owner == number, self.signs, 0.0)
        return chosen / self.lengths[number].float()

    def of_all(self, vector: torch.Tensor) -> torch.Tensor:
        """The part of a vector (N) in each direction, float64 (count)."""
        signed = vector.double() * self.signs
        total = torch.zeros(self.count, dtype=torch.float64)
        return total.index_add_(0, self.owner, signed) / self.lengths


def _lengths(owner: torch.Tensor, count: int) -> torch.Tensor:
    """The root of the number of elements of each; a direction without any has a part of 0."""
    return torch.bincount(owner, minlength=count).clamp(min=1).double().sqrt()
