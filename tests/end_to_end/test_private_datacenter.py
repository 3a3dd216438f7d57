"""A datacenter of two ranks trains with DP-SGD until its privacy budget is used up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from isthmus_server.cli.privacy import privacy

JOB = """
name = "private"
rounds = 9

[task]
source = "task.py:Table"

[strategy]
policy = "datacenter"

[datacenter]
ranks = 2
zero_stage = STAGE
batch_size = 8
steps = 10

[datacenter.privacy]
epsilon = 2.8
delta = 1e-3
examples = 64
clip = 1.0
noise = 2.0
clipping = "CLIPPING"
"""


@pytest.mark.parametrize(("clipping", "stage"), [("per_example", 0), ("ghost", 3)])
def test_it_stops_at_its_budget_and_has_learned(
    clipping: str, stage: int, folder: Path, start: Any, report_of: Any
) -> None:
    job = JOB.replace("CLIPPING", clipping).replace("STAGE", str(stage))
    (folder / "private.toml").write_text(job)
    run = start("private.toml", "--run-dir", "private")
    assert run.finish() == 0, run.output
    report = report_of("private")
    rounds = len(report["rounds"])
    assert 0 < rounds < 9
    assert "privacy budget of the datacenter's examples is used up" in report["reason"]
    assert report["examples_privacy"]["epsilon"] <= 2.8
    assert report["examples_privacy"]["steps"] == 10 * rounds
    first, last = (report["rounds"][at]["metrics"]["loss"] for at in (0, -1))
    # The noise has no seed: after four rounds the loss is 0.60, and deviates by 0.05.
    assert last < max(first, 1.0)
    assert all("loss" not in row["training"].get("datacenter", {}) for row in report["rounds"])
    ledger = CliRunner().invoke(
        privacy, ["ledger", str(folder / "private")], catch_exceptions=False
    )
    assert "for one example of the datacenter (add-or-remove)" in ledger.output
