"""A job survives faults and crashes in a whole deployment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests import forked


def chaos(folder: Path, *arguments: str) -> Any:
    """Run `isthmus chaos` with three devices and return its report."""
    command = ["chaos", "job.toml", "--clients", "3", "--json", *arguments]
    for change in (
        *("strategy.policy=federated", "datacenter.ranks=0"),
        *("federated.cohort=3", "federated.quorum=3"),
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
