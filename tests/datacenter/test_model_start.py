"""Ranks that start from files, in every layout, against the same values in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

from isthmus.job import with_changes
from isthmus.start.files import StartFiles
from isthmus.task.scoring import build_model

LAYOUTS = [
    {"zero_stage": 0},
    {"zero_stage": 3},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
]


@pytest.fixture
def start_setup(make_setup: Any, tmp_path: Path) -> Any:
    """A job that starts from a file with the values of another seed, and these values."""

    def start_setup(**section: Any) -> tuple[Any, torch.Tensor]:
        prepared = make_setup("Language", **section)
        model = build_model(prepared.task, 99)
        path = tmp_path / "start.safetensors"
        save_model(model, str(path))  # of tied weights one
        digest = StartFiles.find(path).digest()
        changes = {"model.start": str(path), "model.sha256": digest}
        setup = type(prepared)(with_changes(prepared.job, changes))
        return setup, setup.layout.gather(model)

    return start_setup


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_first_step_begins_with_the_values_of_the_file(
    layout: dict[str, int], start_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    prepared, values = start_setup(**layout)
    target = tmp_path / "target"
    target.write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
    on_ranks(2, "store_initial", prepared.open_command(), str(target))
    assert prepared.layout.decode(bytearray(target.read_bytes())).equal(values)


def test_files_that_differ_on_a_node_are_refused_on_all_ranks(
    start_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    prepared, _ = start_setup(zero_stage=3)
    path = tmp_path / "start.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    messages = on_ranks(2, "refusals", [prepared.open_command()], str(tmp_path / "state"))
    for (message,) in messages:
        assert "has the digest" in message
        assert f"and the job is for {prepared.job.model.sha256}" in message
