"""Devices behind aggregators: the same models as without them, and what the loss of one costs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import JOB, TASK
from tests.end_to_end.loopback_fleet import LoopbackFleet

CHANGES = (
    *("federated.clients=0", "datacenter.ranks=0", "federated.cohort=4", "federated.quorum=3"),
    *("strategy.policy=federated", "strategy.schedule=[]"),
    "time.lease_seconds=10",
)
NAMES = ("127.0.0.1", "127.0.0.1_2")


@contextlib.contextmanager
def running(folder: Path, *, aggregators: int) -> Iterator[LoopbackFleet]:
    """A server with aggregators, and four devices that are divided among them."""
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks/task.py").write_text(TASK)
    (folder / "job.toml").write_text(JOB)
    owners = "clients_min = 2\nsecure_aggregation = false"
    with LoopbackFleet(folder, 4, privacy=owners, aggregators=NAMES[:aggregators]) as fleet:
        yield fleet


def finished(fleet: LoopbackFleet, job: str, rounds: int) -> list[dict[str, Any]]:
    """The committed rounds of a job that has run to its end."""
    fleet.until(lambda: fleet.committed(job) == rounds)
    report = json.loads(fleet.run("report", str(fleet.directory(job)), "--json"))
    return [row for row in report["rounds"] if row["model_sha256"]]


@pytest.mark.parametrize("secure", [False, True])
def test_the_model_is_that_without_aggregators(tmp_path: Path, secure: bool) -> None:
    changes = (*CHANGES, f"federated.secure_aggregation={str(secure).lower()}", "rounds=2")
    models: list[list[str]] = []
    losses: list[list[float]] = []
    for aggregators in (0, 2):
        with running(tmp_path / str(aggregators), aggregators=aggregators) as fleet:
            rows = finished(fleet, fleet.submit("job.toml", *changes), 2)
            for row in rows:
                assert [each["status"] for each in row["receipts"]] == ["accepted"] * 4
            models.append([row["model_sha256"] for row in rows])
            losses.append([row["metrics"]["loss"] for row in rows])
            for name in NAMES[:aggregators]:
                assert fleet.log(name).count("hands over the sum of 2 vectors") >= 2
    if not secure:  # secure sums are rounded at random
        assert models[0] == models[1]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_rounds_go_on_after_kill_9_of_an_aggregator(tmp_path: Path) -> None:
    plain = (*CHANGES, "federated.secure_aggregation=false", "federated.local_epochs=40")
    with running(tmp_path / "fleet", aggregators=2) as fleet:
        job = fleet.submit("job.toml", *plain, "federated.quorum=2", "rounds=4")
        fleet.until(lambda: fleet.committed(job) >= 1)
        fleet.kill(NAMES[0])
        rows = finished(fleet, job, 4)
        assert len(rows) == 4
        # Its devices are at the other one, or at the server.
        assert [each["status"] for each in rows[-1]["receipts"]] == ["accepted"] * 4
