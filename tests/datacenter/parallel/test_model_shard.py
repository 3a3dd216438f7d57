"""Gradients are summed over the ranks of which each has a part of them."""

from __future__ import annotations

from typing import Any


def test_all_reduce_sums_the_gradients_of_replicas(on_ranks: Any) -> None:
    """In one message or several, also where only one replica uses a parameter."""
    for sums, gradients in on_ranks(2, "sum_gradients"):
        assert sums == [[3.0] * 6, [6.0] * 4, [9.0] * 4, [12.0] * 20, [15.0] * 2]
        assert gradients == {"both": [3.0], "one": [2.0], "none": None}


def test_ranks_with_other_positions_sum_the_gradients_of_layers_that_one_of_them_calls(
    on_ranks: Any,
) -> None:
    """The two have as many elements: added up in order, one would get the gradient of the other."""
    for gradients in on_ranks(2, "sum_partial_gradients"):
        assert gradients == {
            "both": [3.0, 3.0],
            "first": [1.0, 1.0],
            "second": [2.0, 2.0],
            "none": None,
            "mean": [3.0, 3.0],
        }
