"""Finite values, also where their sum is not."""

import pytest
import torch

from isthmus.tensors.finite import is_finite

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("others", [0.0, LARGEST])
def test_one_value_that_is_not_finite_is_found(value, others):
    values = torch.full((1000,), others)
    values[777] = value
    assert not is_finite(values)


def test_infinite_values_that_cancel_are_found():
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


@pytest.mark.parametrize("values", [torch.full((9,), LARGEST), torch.empty(0), torch.ones(2, 3)])
def test_finite_values_may_have_any_sum(values):
    assert is_finite(values)
