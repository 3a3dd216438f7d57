"""Directions of canaries: orthogonal to each other, so that each is seen by itself.

>>> directions = Directions.drawn({"weight": 6, "bias": 2}, count=4, seed=1)
>>> directions.vector(2).tolist().count(0.0), round(float(directions.vector(2).norm()), 6)
(6, 1.0)
>>> [round(x, 6) for x in directions.of_all(3 * directions.vector(2)).tolist()]
[0.0, 0.0, 3.0, 0.0]
>>> spread = SpreadDirections.drawn(100, count=40, seed=1)
>>> round(float(spread.vector(7).abs().max()), 3), round(float(spread.vector(7).norm()), 6)
(0.177, 1.0)
>>> spread.of_all(3 * spread.vector(7)).nonzero().tolist()
[[7]]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Self

import torch


@dataclasses.dataclass(frozen=True)
class Directions:
    """Orthonormal vectors (N) of the gradients of examples: each has elements of its own.

    They are at random places and have random signs, so that what others contribute has a small part
    in each. A part of the elements has orthogonal directions too, where others are not trained.
    """

    count: int
    owner: torch.Tensor
    """The number of the direction that has each element, int64 (N)."""
    signs: torch.Tensor
    """1 or -1, float32 (N)."""
    lengths: torch.Tensor
    """The norm of the signs of each, float64 (count)."""
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


WIDTH = 32
"""Directions that share their elements; none of these is above 1 / sqrt(32)."""


@dataclasses.dataclass(frozen=True)
class SpreadDirections:
    """Orthonormal vectors (N) of the updates of devices, without a large element.

    A server refuses an update with an element above the clipping bound. So that a device which does
    not clip is found by what it sends, canaries have to be longer than the bound without one: each
    of `WIDTH` of them has the signs of a row of a Hadamard matrix, on the same elements.
    """

    count: int
    column: torch.Tensor
    """The group of each element x `WIDTH`, plus its column of the matrix, int64 (N)."""
    signs: torch.Tensor
    """Random, 1 or -1; 0 for elements of no group, float32 (N)."""
    tiles: int
    """Elements with the same group and column."""

    @classmethod
    def most(cls, size: int) -> int:
        """How many there are of vectors of a size."""
        return size // WIDTH * WIDTH

    @classmethod
    def drawn(cls, size: int, count: int, seed: int) -> Self:
        """Draw directions of vectors (N); at most `most` of them."""
        generator = torch.Generator().manual_seed(seed)
        columns = -(-count // WIDTH) * WIDTH
        tiles = size // columns
        order = torch.randperm(size, generator=generator)
        column = torch.empty(size, dtype=torch.int64)
        column[order] = torch.arange(size) % columns
        signs = (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).float()
        signs[order[tiles * columns :]] = 0.0
        return cls(count, column, signs, tiles)

    def vector(self, number: int) -> torch.Tensor:
        """One of them, float32 (N)."""
        group, row = divmod(number, WIDTH)
        own = self.column // WIDTH == group
        chosen = torch.where(own, self.signs * _HADAMARD[row, self.column % WIDTH], 0.0)
        return chosen / math.sqrt(WIDTH * self.tiles)

    def of_all(self, vector: torch.Tensor) -> torch.Tensor:
        """The part of a vector (N) in each direction, float64 (count)."""
        columns = -(-self.count // WIDTH) * WIDTH
        folded = torch.zeros(columns, dtype=torch.float64)
        folded.index_add_(0, self.column, vector.double() * self.signs)
        parts = folded.view(-1, WIDTH) @ _HADAMARD.double()
        return parts.flatten()[: self.count] / math.sqrt(WIDTH * self.tiles)


_HADAMARD = torch.tensor(
    [[(-1.0) ** (row & column).bit_count() for column in range(WIDTH)] for row in range(WIDTH)]
)
"""Symmetric, with orthogonal rows."""
