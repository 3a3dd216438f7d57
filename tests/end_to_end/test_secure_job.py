"""Secure aggregation is the default, and it does not change the result."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def test_a_killed_device_leaves_the_plain_weighted_mean_of_the_survivors(
    folder: Path, start: Any, report_of: Any
) -> None:
    """One device is killed during the round, once with secure aggregation and once without."""
    models = {}
    for mode, settings in (("secure", ()), ("plain", ("federated.secure_aggregation=false",))):
        marker = folder / f"marker-{mode}"
        os.mkfifo(marker)
        changes = (
            *("strategy.policy=federated", "rounds=1", "datacenter.ranks=0"),
            *("strategy.server_optimizer.options={lr=1.0}", "task.settings.block=client-1"),
            *(f"task.settings.marker={marker}", *settings),
        )
        arguments = [part for change in changes for part in ("--set", change)]
        run = start("job.toml", "--run-dir", mode, *arguments)
        os.kill(run.wait_for_blocked(marker), signal.SIGKILL)
        assert run.finish() == 0, run.output
        report = report_of(mode)
        (row,) = report["rounds"]
        assert {receipt["participant"]: receipt["status"] for receipt in row["receipts"]} == {
            "client-0": "accepted",
            "client-1": "dropped",
            "client-2": "accepted",
            "client-3": "accepted",
        }
        models[mode] = load_file(report["final"]["model_path"])
    assert report_of("secure")["job"]["federated"]["secure_aggregation"] is True
    for name, parameter in models["plain"].items():
        assert torch.allclose(models["secure"][name], parameter, atol=1e-6)
        assert not torch.equal(models["secure"][name], torch.zeros_like(parameter))
