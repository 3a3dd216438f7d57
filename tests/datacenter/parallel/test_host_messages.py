"""Messages between processors keep less than PyTorch's own, and carry the same numbers."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_the_same_and_take_less_memory(ranks: int, on_ranks: Any) -> None:
    unit = 4 * 45 * 46
    for equal, (overlapping, alone) in on_ranks(ranks, "messages_of_processors"):
        assert equal
        # The unit that is gathered ahead, and the gradients that were sent.
        assert alone <= overlapping - 1.5 * unit


def test_a_unit_may_have_nothing_to_gather(on_ranks: Any) -> None:
    assert on_ranks(2, "unit_without_elements") == [True, True]
