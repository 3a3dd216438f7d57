"""What ranks of a large model have freed goes back to the kernel, also between blocks that stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

IN_STEPS = "isthmus_datacenter.parallel.host_messages"
AFTER_THEM = "isthmus_datacenter.training.engine"


@pytest.mark.parametrize("without", [IN_STEPS, AFTER_THEM])
@pytest.mark.parametrize("large", [True, False])
def test_only_a_large_model_returns_small_blocks(
    large: bool, without: str, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    setup = make_setup("Masked", {}, zero_stage=3)
    command = {"op": "train_steps", "run_id": "run", "until_step": 2}
    operation = (setup.open_command(), command, str(tmp_path / "state"))
    for before, after in on_ranks(2, "memory_returned", operation, large, without):
        assert before < 0.2
        assert after > 0.8 if large else after < 0.2
