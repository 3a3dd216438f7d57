"""A job survives faults and crashes in a whole deployment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.end_to_end.test_mirror import LARGE


def chaos(folder: Path, *arguments: str, devices: int = 3) -> Any:
    """Run `isthmus chaos` with some devices and return its report."""
    command = ["chaos", "job.toml", "--clients", str(devices), "--json", *arguments]
    for change in (
        *("strategy.policy=federated", "datacenter.ranks=0"),
        *(f"federated.cohort={devices}", f"federated.quorum={devices}"),
    ):
        command += ["--set", change]
    process, pipe = forked.start(command, folder, os.environ)
    with os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") as output:
        printed = output.read()
    process.join()
    report = json.loads(printed)
    assert report["violations"] == []
    assert process.exitcode == 0
    return report


def test_a_short_plan_of_faults_violates_nothing(folder: Path) -> None:
    report = chaos(folder, "--seed", "2", "--minutes", "0.15", "--set", "rounds=8")
    assert report["faults"]
    assert report["jobs"] >= 1


def test_crashes_at_some_durable_steps_do_not_change_the_model(folder: Path) -> None:
    """`make crash-sweep` tries all steps."""
    report = chaos(folder, "--crash-sweep", "--sample", "2", "--set", "rounds=1")
    assert report["points"] + report["not_reached"] == 2
    assert report["same_models"] == 2


# Without `--sample` all faults are tried, in rounds of every kind. The seed draws the one.
@pytest.mark.parametrize(("seed", "target"), [("47", "sums-1"), ("72", "server")])
def test_the_loss_of_an_aggregator_or_server_in_a_round_changes_no_model(
    folder: Path, seed: str, target: str
) -> None:
    (folder / "task.py").write_text(LARGE)
    longer = ("--set", "federated.local_epochs=20", "--set", "rounds=4")
    report = chaos(folder, "--network", "--seed", seed, "--sample", "1", *longer, devices=4)
    (fault,) = report["faults"]
    assert (fault["kind"], fault["what"], fault["target"]) == ("plain", "kill", target)
    assert report["same_models"] == 1
    assert report["models_from_mirror"] > 0
    assert ("taken_over" in fault) == (target == "server")
