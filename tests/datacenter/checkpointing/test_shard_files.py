"""Checkpoints are those of `torch.distributed.checkpoint`, whose own messages are not used."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

FILES = Path(__file__).parents[1]


def metadata_of(directory: Path) -> Any:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.storage_meta = None  # of this writer: its path and a random id
    return metadata


@pytest.mark.parametrize(
    "section",
    [{"zero_stage": 3}, {"zero_stage": 0}, {"pipeline_parallel": 2, "zero_stage": 0}],
    ids=str,
)
def test_files_and_metadata_are_those_of_pytorch(
    section: dict[str, Any], on_ranks: Any, make_setup: Any, tmp_path: Path
) -> None:
    """And each reads what the other has written."""
    command = make_setup("Table", **section).open_command()
    assert on_ranks(2, "write_both", command, str(tmp_path)) == [[], []]
    own = tmp_path / "own"
    reference = tmp_path / "reference"
    names = {path.name for path in reference.iterdir()}
    assert {path.name for path in own.iterdir()} == names
    data = [name for name in names if name.endswith(".distcp")]
    assert len(data) == 2
    for name in data:
        assert (own / name).read_bytes() == (reference / name).read_bytes()
    assert metadata_of(own) == metadata_of(reference)
    assert list(metadata_of(own).state_dict_metadata) == list(
        metadata_of(reference).state_dict_metadata
    )
