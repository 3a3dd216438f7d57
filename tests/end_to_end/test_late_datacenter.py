"""A job whose datacenter connects late ends like one whose datacenter was there at the start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import RunProcess
from tests.end_to_end.loopback_fleet import DATACENTER, LoopbackFleet

ROOT = Path(__file__).parents[2]

GATED = '''

class Gated(Digits):
    """The first device waits in one round until the test has opened the gate, a FIFO."""

    def optimizer(self, parameters, participant):
        import os

        if participant.name == "phone-0" and participant.round == self.settings.get("gate_round"):
            os.close(os.open(self.settings["gate"], os.O_RDONLY))
        return super().optimizer(parameters, participant)
'''

COMMON = (
    "task.source=task.py:Gated",
    f"task.settings.fleet_share={[0.5] * 10}",
    "task.settings.client_lr=0.02",
    "strategy.policy=adaptive",
    "strategy.schedule=[]",
    "strategy.settings={warm_test=2,warm_length=0.5,warm_share=0.3}",
    "federated.cohort=3",
    "federated.quorum=3",
    "federated.local_epochs=1",
    "prices.datacenter_step=0.0016",
    "time.round_seconds=300",
    "budget=18",  # six rounds with devices, and half as many in the datacenter for next to nothing
    "rounds=30",
)


def write_job(folder: Path) -> None:
    """The job of the digits and its task, whose devices the test can hold."""
    shutil.copy(ROOT / "examples/digits/job.toml", folder)
    (folder / "tasks").mkdir()
    task = (ROOT / "examples/digits/task.py").read_text() + GATED
    (folder / "tasks/task.py").write_text(task)
    (folder / "task.py").write_text(task)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LoopbackFleet]:
    write_job(tmp_path)
    with LoopbackFleet(tmp_path, devices=3) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The report of the same job in `isthmus run`, whose datacenter is there from the start."""
    folder = tmp_path_factory.mktemp("there")
    write_job(folder)
    changes = (*COMMON, "federated.clients=3", "datacenter.ranks=1")
    sets = [part for change in changes for part in ("--set", change)]
    trained = RunProcess("job.toml", "--run-dir", "here", *sets, cwd=folder)
    with trained.stdout:
        assert trained.finish() == 0, trained.output
    told = RunProcess("here", "--json", cwd=folder, command="report")
    with told.stdout:
        assert told.finish() == 0, told.output
    return json.loads(told.output)


def rounds_of(report: Any) -> str:
    return "".join(row["regime"][0] for row in report["rounds"])


def cost_of(report: Any, regime: str) -> float:
    rows = [row for row in report["rounds"] if row["regime"] == regime]
    return sum(float(row["cost"]["price"]) for row in rows)


@pytest.mark.parametrize("gate_round", [0, 1, 2], ids=["before", "first round", "second round"])
def test_a_datacenter_is_used_alike_whenever_it_connects(
    gate_round: int, fleet: LoopbackFleet, there: Any
) -> None:
    """Devices alone would have a loss that is five times as high for the same budget.

    It connects before the job is submitted, or while the devices are held in round `gate_round`.
    """
    gate = fleet.folder / "tasks/gate"
    os.mkfifo(gate)
    if not gate_round:
        fleet.start_datacenter()
        fleet.until(lambda: "linked to" in fleet.log(DATACENTER))
    job = fleet.submit(
        "job.toml",
        *COMMON,
        *("federated.clients=0", "datacenter.ranks=0", "time.lease_seconds=10"),
        *(f"task.settings.gate='{gate}'", f"task.settings.gate_round={gate_round}"),
    )
    if gate_round:
        fleet.until(lambda: fleet.committed(job) == gate_round - 1)
        fleet.start_datacenter()
        fleet.until(lambda: fleet.datacenter_is_ready(job))
    # Held open, so that it waits for no device.
    with os.fdopen(os.open(gate, os.O_RDWR)):
        fleet.run("logs", job, "--follow", "--state", "alice")
    late = json.loads(fleet.run("report", str(fleet.directory(job)), "--json"))

    assert rounds_of(there).startswith("dddfff")
    reasons = [row["reason"] for row in late["rounds"]]
    assert rounds_of(late).startswith("f" * gate_round + "dddf"), reasons
    assert rounds_of(late).count("f") in {rounds_of(there).count("f") + more for more in (-1, 0)}
    assert cost_of(late, "datacenter") == cost_of(there, "datacenter")
    first, second = (each["rounds"][-1]["metrics"]["loss"] for each in (late, there))
    assert first < 1.2 * second
    if not gate_round:
        return
    assert "no datacenter is available" in late["rounds"][gate_round - 1]["reason"]
    assert late["rounds"][gate_round]["reason"].startswith("a datacenter has come: warm round 1")
    run = str(fleet.directory(job))
    why = " ".join(fleet.run("why", run, str(gate_round + 1)).split())
    assert "no datacenter was there for a warm start; it begins once one is" in why
