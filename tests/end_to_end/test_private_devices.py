"""Devices train with noise for their own examples until their budgets are used up."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from isthmus_clients.training.examples_account import spent_of
from isthmus_server.cli.privacy import privacy

JOB = """
name = "private"
rounds = 6

[task]
source = "task.py:Table"

[strategy]
policy = "federated"
server_optimizer = { name = "SGD", options = { lr = 1.0 } }

[federated]
clients = 4
cohort = 4
quorum = 3
local_steps = 10
batch_size = 16

[federated.privacy]
epsilon = 20.0
delta = 1e-3
participations = 3

[time]
join_seconds = 300
round_seconds = 300
lease_seconds = 60
"""


def spent(run: Path, name: str) -> tuple[int, float]:
    """Participations of a device in its only run, and their epsilon."""
    ((_, found),) = spent_of(run / "devices" / name / "examples" / name, 1e-3)[1].items()
    return found


def test_they_stop_at_their_budgets_and_have_learned(
    folder: Path, start: Any, report_of: Any
) -> None:
    (folder / "private.toml").write_text(JOB)
    run = start("private.toml", "--run-dir", "private")
    assert run.finish() == 0, run.output
    report = report_of("private")
    assert report["job"]["federated"]["secure_aggregation"] is True
    assert len(report["rounds"]) == 3
    assert "at their limit" in report["reason"]
    assert "federated.privacy" in report["reason"]
    assert report["failed_attempts"] == []
    first, last = (report["rounds"][at]["metrics"]["loss"] for at in (0, -1))
    assert last < first < 1.1
    assert all("loss" not in row["training"].get("federated", {}) for row in report["rounds"])
    for number in range(4):
        count, epsilon = spent(folder / "private", f"client-{number}")
        assert count == 3
        assert 19.9 < epsilon <= 20
    ledger = CliRunner().invoke(
        privacy, ["ledger", str(folder / "private")], catch_exceptions=False
    )
    assert "at most 20 at delta 0.001 for one example of one device (zero-out)" in ledger.output


def test_a_device_that_is_killed_while_it_trains_has_paid(
    folder: Path, start: Any, report_of: Any
) -> None:
    marker = folder / "marker"
    os.mkfifo(marker)
    (folder / "private.toml").write_text(JOB)
    changes = ("rounds=1", "task.settings.block=client-1", f"task.settings.marker={marker}")
    sets = [word for change in changes for word in ("--set", change)]
    run = start("private.toml", "--run-dir", "killed", *sets)
    os.kill(run.wait_for_blocked(marker), signal.SIGKILL)
    assert run.finish() == 0, run.output
    ((row),) = report_of("killed")["rounds"]
    assert row["participants"]["accepted"] == 3
    assert spent(folder / "killed", "client-1")[0] == 1
    assert spent(folder / "killed", "client-0")[0] == 1
