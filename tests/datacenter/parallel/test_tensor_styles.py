"""Ranks receive the outputs of their heads from a fused layer."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("ranks", [2, 4])
def test_fused_outputs_are_exchanged_by_heads(ranks: int, on_ranks: Any) -> None:
    assert on_ranks(ranks, "exchange_fused_outputs", 3) == [True] * ranks
