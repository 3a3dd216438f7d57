"""Federated rounds give the model of a hand-written FedAvg, with plain updates and secure sums.

`benchmarks/parity.py` compares more models, and all ranges of updates.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.parity.comparison import LIMIT, SCALED, Cell, compare, secure_error
from tests.warm_ranks import Ranks

PLAIN: dict[str, Any] = {"secure_aggregation": False}
SECURE: dict[str, Any] = {"secure_aggregation": True}
CELLS = {
    "running statistics": Cell("batch-norm", PLAIN, "SGD, accumulated", "devices"),
    "running statistics in secure sums": Cell("batch-norm", SECURE, "SGD", "devices"),
    "a schedule and clipped gradients": Cell("qwen3", PLAIN, "AdamW, cosine, clipped", "devices"),
    "parts of a batch with ragged masks": Cell("lstm", SECURE, "SGD, accumulated", "devices"),
    "a row that is padding": Cell("padding", SECURE, "AdamW", "devices"),
    "normalised weights": Cell("weight-norm", SECURE, "AdamW", "devices"),
}


@pytest.mark.parametrize("name", CELLS)
def test_devices_train_like_a_plain_loop(
    name: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    (result,) = compare(ranks(1), [CELLS[name]], tmp_path)
    assert result.equal, str(result)


@pytest.mark.parametrize("number", [0, 3, 9])
def test_secure_sums_are_the_mean_whatever_the_scale_and_the_rows(
    number: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    assert secure_error(ranks(1), *SCALED[number], tmp_path / "run") < LIMIT


def test_another_model_than_that_of_the_loop_is_not_equal(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Proximal terms are no part of the loop."""
    cells = [
        Cell("gelu", {**kind, "proximal": 1.0}, "AdamW", "devices") for kind in (PLAIN, SECURE)
    ]
    for result in compare(ranks(1), cells, tmp_path):
        assert not result.refusal
        assert not result.fault
        assert result.error > 10 * LIMIT
        assert not result.equal
