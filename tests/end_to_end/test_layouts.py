"""A complete job whose datacenter shards the model, with device rounds in between."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from isthmus_server.storage.store import Store

TASK = """
import isthmus
from task import Table


class Plain(Table):
    forward = isthmus.Task.forward  # pipeline stages support only the default
"""
EXAMPLES = 480
"""As many as 30 steps of 16 take, so that a run is one pass over them."""
NUMBERED = (
    TASK
    + f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Numbered(Plain):
    # The gradient of an example moves its own column of the first weight, and no other.
    def model(self):
        first = nn.Linear({EXAMPLES}, 16)
        with torch.no_grad():
            first.weight.fill_(0.1)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(16, 3))

    def local_data(self, participant):
        return TensorDataset(torch.eye({EXAMPLES}), torch.arange({EXAMPLES}) % 3)

    def eval_data(self):
        return self.local_data(None)
"""
)
LAYOUTS = {
    "single": {"ranks": 1},
    "composed": {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
}
STEPWISE = {
    "task.source": '"plain.py:Numbered"',
    "strategy.policy": '"datacenter"',
    "strategy.schedule": "[]",
    "federated.clients": "0",
    "datacenter.zero_stage": "0",
    "datacenter.global_batch": "16",
    "datacenter.ranks": "2",
    "datacenter.steps": "1",
    "rounds": "30",  # so that none ends before it is killed
}
AFTER_KILLS = [
    {"datacenter.ranks": "4", "datacenter.zero_stage": "3"},
    {
        "datacenter.zero_stage": "0",
        "datacenter.tensor_parallel": "2",
        "datacenter.pipeline_parallel": "2",
    },
]


def test_a_composed_layout_learns_the_same_model_as_one_rank(
    folder: Path, start: Any, report_of: Any
) -> None:
    (folder / "plain.py").write_text(TASK)
    reports = {}
    for name, layout in LAYOUTS.items():
        changes = {
            "task.source": '"plain.py:Plain"',
            **{f"datacenter.{k}": str(v) for k, v in layout.items()},
        }
        run = start("job.toml", "--run-dir", name, *_sets(changes))
        assert run.finish() == 0, run.output
        reports[name] = report_of(name)
    single, composed = (reports[name] for name in LAYOUTS)
    # Between datacenter rounds the model went to the devices and back, twice.
    regimes = [row["regime"] for row in composed["rounds"]]
    assert regimes == ["datacenter"] * 2 + ["hybrid"] * 2 + ["federated", "datacenter"]
    models = [load_file(report["final"]["model_path"]) for report in (single, composed)]
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        assert torch.allclose(tensor, models[1][name], atol=1e-3), name
    assert abs(single["final"]["metrics"]["loss"] - composed["final"]["metrics"]["loss"]) < 1e-3


def test_a_run_that_is_killed_and_goes_on_in_other_layouts_sees_all_once_and_ends_the_same(
    folder: Path, start: Any, report_of: Any
) -> None:
    """From whole models on two ranks to shards on four, and then to tensors in a pipeline."""
    (folder / "plain.py").write_text(NUMBERED)
    sets = _sets(STEPWISE)
    stays = start("job.toml", "--run-dir", "stays", *sets)
    assert stays.finish() == 0, stays.output
    moves = start("job.toml", "--run-dir", "moves", *sets)
    for number, changes in enumerate(AFTER_KILLS):
        moves.wait_for_line(rf"round +{2 * number + 1} ")
        moves.kill()
        moves = start("--resume", "--run-dir", "moves", *_sets(changes))
    assert moves.finish() == 0, moves.output
    models = [load_file(folder / name / "model.safetensors") for name in ("stays", "moves")]
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-5, atol=1e-6)
    # The steps have room for each example once, so that none was twice if none is missing.
    moved = (models[1]["0.weight"] - 0.1).abs().amax(0)
    assert len(moved) == EXAMPLES
    assert moved.min() > 1e-4
    report = report_of("moves")
    assert [row["regime"] for row in report["rounds"]] == ["datacenter"] * 30
    changed = [event for event in report["events"] if event["kind"] == "layout"]
    assert [event["changes"]["datacenter.zero_stage"] for event in changed] == [3, 0]
    # What devices have agreed to, and what is compared with it, is the job as it was.
    assert report["job"]["datacenter"]["ranks"] == 2
    # Another resume keeps the layout, and needs no option for it.
    with contextlib.closing(Store.open(folder / "moves")) as store:
        assert store.ranks_job.datacenter.pipeline_parallel == 2


def _sets(changes: dict[str, str]) -> list[str]:
    return [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
