"""Norms of the gradients of matrices without the gradients (ghost norms).

A linear layer that is applied at T positions of an example has a gradient that is the sum of
g_t x_t^T over t, where x_t is its input and g_t the gradient of its output. The squared norm is the
sum of (g_s . g_t) (x_s . x_t) over s and t: two T x T matrices in place of one of the layer's size
(Goodfellow 2015; Li et al. 2021, "Large language models can be strong differentially private
learners"). Where they would be larger, the gradients are computed, of a few examples at a time (Bu
et al. 2022, "Scalable and efficient training of large convolutional neural networks with
differential privacy"). An embedding is a linear layer whose inputs have a single one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from isthmus_privacy.dp_sgd.gradients import norms_of

MEMORY_ELEMENTS = 1 << 22
"""Elements of all matrices that exist at a time."""


@dataclasses.dataclass(frozen=True)
class OuterProducts:
    """Matrices (R, C) of B examples, each a sum of T outer products."""

    rows: torch.Tensor
    """(B, T, R), or (B, T) whole numbers: the places of a single one in each."""
    columns: torch.Tensor
    """(B, T, C)."""
    shape: torch.Size
    """(R, C)."""

    @property
    def terms(self) -> int:
        """T."""
        return self.columns.shape[1]

    def of_examples(self, some: slice) -> OuterProducts:
        """The matrices of some examples."""
        return OuterProducts(self.rows[some], self.columns[some], self.shape)

    def dense(self) -> torch.Tensor:
        """The matrices: (B, R, C)."""
        if self.rows.is_floating_point():
            return self.rows.mT @ self.columns
        matrices = self.columns.new_zeros(len(self.columns), *self.shape)
        places = self.rows.unsqueeze(-1).expand_as(self.columns)
        return matrices.scatter_add_(1, places, self.columns)

    def dot(self, other: OuterProducts) -> torch.Tensor:
        """Inner products of the matrices of each example with those of another: (B) float64.

        They are summed in float64: the terms of a gradient may cancel, and what float32 loses of
        them would be missing in the norm.
        """
        products: torch.Tensor = self.columns.double() @ other.columns.double().mT
        products *= _row_products(self.rows, other.rows)
        return products.sum((1, 2))


def squared_norms(summands: Sequence[OuterProducts]) -> torch.Tensor:
    """Squared 2-norms of the sums of matrices of each example.

    Args:
        summands: of the same examples and shape; a parameter that is used in several places has
            one for each.

    Returns:
        (B) float64.
    """
    shape = summands[0].shape
    terms = sum(each.terms for each in summands)
    by_products = 2 * terms**2 <= shape.numel()
    elements = 2 * terms * (terms + sum(shape)) if by_products else shape.numel()
    parts = []
    for some in slices(len(summands[0].columns), elements):
        chosen = [each.of_examples(some) for each in summands]
        if by_products:
            parts.append(_by_products(chosen))
        else:
            matrices = chosen[0].dense()
            for each in chosen[1:]:
                matrices += each.dense()
            parts.append(squared(matrices))
    return torch.cat(parts)


def squared(tensors: torch.Tensor) -> torch.Tensor:
    """Squared 2-norms of the tensor of each example: (B, ...) to (B) float64."""
    return norms_of(tensors).square()


def slices(count: int, elements: int) -> Iterator[slice]:
    """The examples in parts whose matrices, of so many elements each, fit the memory."""
    size = max(1, MEMORY_ELEMENTS // max(elements, 1))
    for start in range(0, count, size):
        yield slice(start, start + size)


def _by_products(summands: Sequence[OuterProducts]) -> torch.Tensor:
    dots = [each.dot(each) for each in summands]
    dots += [2 * one.dot(other) for one, other in itertools.combinations(summands, 2)]
    return torch.stack(dots).sum(0).clamp(min=0)  # which keeps NaN


def _row_products(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Inner products of each two rows of an example: (B, T, S)."""
    if rows.is_floating_point() and others.is_floating_point():
        return rows.double() @ others.double().mT
    if rows.is_floating_point():  # (B, T, R) at the places (B, S)
        return rows.gather(2, others.unsqueeze(1).expand(-1, rows.shape[1], -1)).double()
    if others.is_floating_point():
        return _row_products(others, rows).mT
    return (rows.unsqueeze(2) == others.unsqueeze(1)).double()
