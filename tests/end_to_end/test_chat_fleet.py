"""The project for dialogues on a fleet: packed, installed, and with a base that nobody packs.

The server and the datacenter have the folder of the base. Devices have its tokenizer, and get the
weights by their digest, over mutual TLS.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.chat_projects import new_chat_project
from tests.end_to_end.loopback_fleet import LoopbackFleet

DEVICES = 3
FEWER = (
    "rounds=2",
    f"federated.cohort={DEVICES}",
    "federated.local_epochs=1",
    "datacenter.steps=2",
    "task.settings.lora={r=2, lora_alpha=4}",
    f"evaluation.devices={DEVICES}",
)


def test_a_packed_project_learns_on_a_fleet_over_weights_that_come_by_their_digest(
    tmp_path: Path,
) -> None:
    project = tmp_path / "ferry"
    new_chat_project(project)
    (project / "base").rename(tmp_path / "base")
    shutil.copytree(project / "data", tmp_path / "data")
    shutil.move(project / "job.toml", tmp_path / "job.toml")
    weights = (tmp_path / "base/model.safetensors").stat().st_size
    for place in ("tasks", "devices"):
        shutil.copytree(tmp_path / "base", tmp_path / place / "models/base")
    (tmp_path / "devices/models/base/model.safetensors").unlink()
    (tmp_path / "models").symlink_to("tasks/models")
    policies = {f"phone-{index}": "weights_mb = 20\n" for index in range(DEVICES)}
    with LoopbackFleet(tmp_path, DEVICES, policies, device_tasks="devices", data="data") as fleet:
        author = fleet.run("task", "key", "author.key")
        fleet.run("task", "pack", "ferry", "--key", "author.key", "--output", "ferry.task")
        for place in ("tasks", "devices"):
            fleet.run("task", "install", "ferry.task", "--author", author, "--tasks", place)
        fleet.start_datacenter()
        places = (
            "task.source=ferry/task.py:Chat",
            "model.start=models/base",
            "task.data=ferry/data",
            "federated.clients=0",
            "datacenter.ranks=0",
        )
        job = fleet.submit("job.toml", *places, *FEWER)
        fleet.until(lambda: fleet.committed(job) == 2)
        logs = [fleet.log(f"phone-{index}") for index in range(DEVICES)]
        fleet.run("fetch", job, "--state", "alice", "--output", "result")
    report = json.loads((tmp_path / "result/report.json").read_text())
    assert all("the server: model.safetensors" in log for log in logs), logs
    assert report["job"]["federated"]["secure_aggregation"]
    for row in report["rounds"]:
        receipts = [each for each in row["receipts"] if each["regime"] == "federated"]
        assert [each["status"] for each in receipts] == ["accepted"] * DEVICES
        # No byte of the base is in a round.
        assert max(each["bytes_out"] + each["bytes_in"] for each in receipts) < weights / 4
        assert row["metrics"].keys() >= {"devices_loss", "public_loss"}
    losses = [row["metrics"]["devices_loss"] for row in report["rounds"]]
    assert losses[1] < losses[0]
