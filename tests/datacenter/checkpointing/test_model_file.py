"""Each rank loads and stores its own slices of one flat model file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.parametrize(("stage", "groups", "copies"), [(0, 1, 4), (3, 1, 1), (3, 2, 2)])
def test_round_trip_is_exact(
    stage: int, groups: int, copies: int, make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """The model is as often on all ranks together as there are groups that shard it."""
    prepared = make_setup("Table", zero_stage=stage, shard_groups=groups)
    source, target = tmp_path / "source", tmp_path / "target"
    vector = torch.randn(prepared.layout.size, generator=torch.Generator().manual_seed(0))
    source.write_bytes(prepared.layout.encode(vector))
    target.write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
    shard_sizes = on_ranks(4, "round_trip", prepared.open_command(), str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    assert sum(map(sum, shard_sizes)) == prepared.layout.size * copies
