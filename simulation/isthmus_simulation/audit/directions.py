"""Directions of canaries: orthogonal to each other, so that each is seen by itself.

>>> directions = Directions.drawn(8, count=4, seed=1)
>>> directions.vector(2).tolist().count(0.0), round(float(directions.vector(2).norm()), 6)
(6, 1.0)
>>> [round(x, 6) for x in directions.of_all(3 * directions.vector(2)).tolist()]
[0.0, 0.0, 3.0, 0.0]
>>> spread = SpreadDirections.drawn(100, count=40, seed=1)
>>> round(float(spread.vector(7).abs().max()), 3), round(float(spread.vector(7).norm()), 6)
(0.177, 1.0)
>>> spread.of_all(3 * spread.vector(7)).nonzero().tolist()
[[7]]
>>> tiny = SpreadDirections.drawn(3, count=2, seed=1)
>>> SpreadDirections.most(3), [len(tiny.vector(number).nonzero()) for number in range(2)]
(2, [2, 2])
"""

from __future__ import annotations

import dataclasses
import math
from typing import Self

import torch


@dataclasses.dataclass(frozen=True)
class Directions:
    """Orthonormal vectors (N) of the gradients of examples: each has elements of its own.

    They are at random places and have random signs, so that what others contribute has a small part
    in each.
    """

    count: int
    owner: torch.Tensor
    """The number of the direction that has each element, int64 (N)."""
    signs: torch.Tensor
    """1 or -1, float32 (N)."""
    lengths: torch.Tensor
    """The norm of the signs of each, float64 (count)."""

    @classmethod
    def drawn(cls, size: int, count: int, seed: int) -> Self:
        """Draw directions of vectors (N).

        Args:
            size: N.
            count: of the directions, at most N.
            seed: decides them.
        """
        generator = torch.Generator().manual_seed(seed)
        owner = torch.empty(size, dtype=torch.int64)
        owner[torch.randperm(size, generator=generator)] = torch.arange(size) % count
        signs = (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).float()
        lengths = torch.bincount(owner, minlength=count).double().sqrt()
        return cls(count, owner, signs, lengths)

    def vector(self, number: int) -> torch.Tensor:
        """One of them, float32 (N)."""
        chosen = torch.where(self.owner == number, self.signs, 0.0)
        return chosen / self.lengths[number].float()

    def of_all(self, vector: torch.Tensor) -> torch.Tensor:
        """The part of a vector (N) in each direction, float64 (count)."""
        signed = vector.double() * self.signs
        total = torch.zeros(self.count, dtype=torch.float64)
        return total.index_add_(0, self.owner, signed) / self.lengths


WIDTH = 32
"""Directions that share their elements; none of these is above 1 / sqrt(32). A power of two."""


@dataclasses.dataclass(frozen=True)
class SpreadDirections:
    """Orthonormal vectors (N) of the updates of devices, without a large element.

    A server refuses an update with an element above the clipping bound. So that a device which does
    not clip is found by what it sends, canaries have to be longer than the bound without one: each
    of `WIDTH` of them has the signs of a row of a Hadamard matrix, on the same elements; of fewer
    where there are fewer elements.
    """

    count: int
    width: int
    """Directions that share their elements."""
    column: torch.Tensor
    """The group of each element x `width`, plus its column of the matrix, int64 (N)."""
    signs: torch.Tensor
    """Random, 1 or -1; 0 for elements of no group, float32 (N)."""
    tiles: int
    """Elements with the same group and column."""

    @classmethod
    def most(cls, size: int) -> int:
        """How many there are of vectors of a size."""
        width = _width(size)
        return size // width * width

    @property
    def largest(self) -> float:
        """The largest element of each of them, without its sign."""
        return 1 / math.sqrt(self.width * self.tiles)

    @classmethod
    def drawn(cls, size: int, count: int, seed: int) -> Self:
        """Draw directions of vectors (N); at most `most` of them."""
        generator = torch.Generator().manual_seed(seed)
        width = _width(size)
        columns = -(-count // width) * width
        tiles = size // columns
        order = torch.randperm(size, generator=generator)
        column = torch.empty(size, dtype=torch.int64)
        column[order] = torch.arange(size) % columns
        signs = (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).float()
        signs[order[tiles * columns :]] = 0.0
        return cls(count, width, column, signs, tiles)

    def vector(self, number: int) -> torch.Tensor:
        """One of them, float32 (N)."""
        group, row = divmod(number, self.width)
        own = self.column // self.width == group
        chosen = torch.where(own, self.signs * _HADAMARD[row, self.column % self.width], 0.0)
        return chosen * self.largest

    def of_all(self, vector: torch.Tensor) -> torch.Tensor:
        """The part of a vector (N) in each direction, float64 (count)."""
        columns = -(-self.count // self.width) * self.width
        folded = torch.zeros(columns, dtype=torch.float64)
        folded.index_add_(0, self.column, vector.double() * self.signs)
        parts = folded.view(-1, self.width) @ _HADAMARD[: self.width, : self.width].double()
        return parts.flatten()[: self.count] * self.largest


def _width(size: int) -> int:
    """How many directions of vectors of a size share their elements."""
    return WIDTH if size >= WIDTH else 1 << (size.bit_length() - 1)


_HADAMARD = torch.tensor(
    [[(-1.0) ** (row & column).bit_count() for column in range(WIDTH)] for row in range(WIDTH)]
)
"""Symmetric, with orthogonal rows."""
