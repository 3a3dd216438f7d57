"""A complete job whose datacenter shards the model, with device rounds in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TASK = """
import isthmus
from task import Table


class Plain(Table):
    forward = isthmus.Task.forward  # pipeline stages support only the default
"""
LAYOUTS = {
    "single": {"ranks": 1},
    "composed": {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
}


def test_a_composed_layout_learns_the_same_model_as_one_rank(
    folder: Path, start: Any, report_of: Any
) -> None:
    (folder / "plain.py").write_text(TASK)
    reports = {}
    for name, layout in LAYOUTS.items():
        changes = {
            "task.source": '"plain.py:Plain"',
            **{f"datacenter.{k}": v for k, v in layout.items()},
        }
        sets = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
        run = start("job.toml", "--run-dir", name, *sets)
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
