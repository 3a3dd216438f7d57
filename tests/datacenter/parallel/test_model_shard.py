"""Gradients are summed over replicas that hold whole parameters."""

from __future__ import annotations

from typing import Any


def test_all_reduce_sums_the_gradients_of_replicas(on_ranks: Any) -> None:
    """In one message or several, also where only one replica uses a parameter."""
    for sums, gradients in on_ranks(2, "sum_gradients"):
        assert sums == [[3.0] * 6, [6.0] * 4, [9.0] * 4, [12.0] * 20, [15.0] * 2]
        assert gradients == {"both": [3.0], "one": [2.0], "none": None}
