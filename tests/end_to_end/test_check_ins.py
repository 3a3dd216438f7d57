"""Devices that a server does not need hang up, and come back when a job waits for them."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.conftest import JOB, TASK
from tests.end_to_end.loopback_fleet import LoopbackFleet

from isthmus_server.fleet.presence import read_snapshot

PRELUDE = """
from isthmus_server.fleet import members
from isthmus_server.transport import check_ins
check_ins.SHORTEST_SECONDS = 4.0
check_ins.STAY_SECONDS = 0.0
members._COUNT_SECONDS = 0.2
"""
CHANGES = (
    *("federated.clients=0", "datacenter.ranks=0", "federated.cohort=4", "federated.quorum=4"),
    *("strategy.policy=federated", "strategy.schedule=[]", "rounds=2", "time.lease_seconds=10"),
)


def test_a_job_waits_for_devices_that_have_hung_up(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/task.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB)
    serving = ("--address", "127.0.0.1:0", "--connected", "2")
    stays = {"phone-0": "hang_up = false\n"}
    with LoopbackFleet(
        tmp_path, devices=4, policies=stays, serving=serving, prelude=PRELUDE
    ) as fleet:
        others = [f"phone-{number}" for number in range(1, 4)]
        away = "is not needed now, and checks in again at "
        fleet.until(lambda: sum(away in fleet.log(name) for name in others) >= 2)

        def called_back() -> bool:
            snapshot = read_snapshot(tmp_path / "state")
            return snapshot is not None and any(
                seen.checks_in_at and not seen.online for seen in snapshot.participants.values()
            )

        fleet.until(called_back)
        job = fleet.submit("job.toml", *CHANGES)
        fleet.until(lambda: fleet.committed(job) == 2)  # with all four
        assert away not in fleet.log("phone-0")
