"""Norms of sums of outer products, computed from products and from the matrices."""

import itertools

import pytest
import torch

from isthmus_datacenter.training.private import outer_products
from isthmus_datacenter.training.private.outer_products import OuterProducts, squared_norms

EXAMPLES, WIDTH = 5, 7


def summand(kind, rows, terms, generator):
    columns = torch.randn(EXAMPLES, terms, WIDTH, generator=generator)
    shape = torch.Size((rows, WIDTH))
    if kind == "embedding":
        places = torch.randint(min(rows, 3), (EXAMPLES, terms), generator=generator)
        return OuterProducts(places, columns, shape)
    return OuterProducts(torch.randn(EXAMPLES, terms, rows, generator=generator), columns, shape)


def matrices(summands):
    """The sum of all, by its definition."""
    total = torch.zeros(EXAMPLES, *summands[0].shape, dtype=torch.float64)
    for each in summands:
        for example, term in itertools.product(range(EXAMPLES), range(each.terms)):
            row, column = each.rows[example, term], each.columns[example, term].double()
            if row.is_floating_point():
                total[example] += row.double().outer(column)
            else:
                total[example, row] += column
    return total


@pytest.mark.parametrize("rows", [4, 400], ids=["from matrices", "from products"])
@pytest.mark.parametrize("memory", [1, 1 << 22])
@pytest.mark.parametrize(
    "kinds",
    [["linear"], ["embedding"], ["embedding", "linear"], ["linear", "embedding", "embedding"]],
)
def test_norms_are_those_of_the_sum(kinds, memory, rows, monkeypatch):
    monkeypatch.setattr(outer_products, "MEMORY_ELEMENTS", memory)
    generator = torch.Generator().manual_seed(1)
    summands = [summand(kind, rows, 3 + at, generator) for at, kind in enumerate(kinds)]
    expected = matrices(summands).square().sum((1, 2))
    torch.testing.assert_close(squared_norms(summands), expected, rtol=1e-5, atol=0)


def test_terms_that_cancel_are_not_lost():
    """Two terms of norm 1, whose sum has a norm of 1e-4: float32 would find 0."""
    rows = torch.zeros(1, 2, 60)
    rows[0, :, 0] = torch.tensor([1.0, -1.0 + 1e-4])
    columns = torch.zeros(1, 2, 60)
    columns[0, :, 0] = 1.0
    (found,) = squared_norms([OuterProducts(rows, columns, torch.Size((60, 60)))]).sqrt()
    assert float(found) == pytest.approx(1e-4, rel=1e-3)
