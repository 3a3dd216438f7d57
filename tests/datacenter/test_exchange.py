"""The model crosses between the ranks and one flat file, each rank its own slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_crosses_bit_for_bit(
    stage: int, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    made = make_setup("Table", zero_stage=stage)
    source, target = tmp_path / "source", tmp_path / "target"
    sent = torch.randn(made.layout.size, generator=torch.Generator().manual_seed(0))
    source.write_bytes(made.layout.encode(sent))
    target.write_bytes(made.layout.header + bytes(4 * made.layout.size))
    held = on_ranks(4, "round_trip", made.open_command(), str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    assert sum(map(sum, held)) == made.layout.size * (4 if stage == 0 else 1)
