"""A whole job whose datacenter cuts the model, with rounds on devices between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TASK = """
import isthmus
from task import Table


class Plain(Table):
    forward = isthmus.Task.forward  # a pipeline's stages go through no other
"""
LAYOUTS = {
    "one": {"ranks": 1},
    "composed": {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
}


def test_a_job_on_a_composed_layout_learns_what_it_does_on_one_rank(
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
    one, composed = (reports[name] for name in LAYOUTS)
    # The model went out to the devices and came back between datacenter rounds, twice.
    regimes = [row["regime"] for row in composed["rounds"]]
    assert regimes == ["datacenter"] * 2 + ["hybrid"] * 2 + ["federated", "datacenter"]
    models = [load_file(report["final"]["model_path"]) for report in (one, composed)]
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        assert torch.allclose(tensor, models[1][name], atol=1e-3), name
    assert abs(one["final"]["metrics"]["loss"] - composed["final"]["metrics"]["loss"]) < 1e-3
