"""A device and a datacenter take the first model from a folder, as their owners say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.free_ports import free_ports

from isthmus.job import load_job
from isthmus.task import load_task
from isthmus_server.model.global_model import GlobalModel

JOB = """
name = "sources"
rounds = 2
[task]
source = "task.py:Learn"
[strategy]
policy = "federated"
[federated]
cohort = 1
quorum = 1
secure_aggregation = false
[datacenter]
steps = 1
"""


@pytest.mark.parametrize("role", ["client", "datacenter"])
def test_what_is_in_the_folder_is_not_sent(
    folder: Path, start: Any, report_of: Any, write_task: Any, role: str
) -> None:
    write_task()
    (folder / "job.toml").write_text(JOB)
    blobs = folder / "blobs"
    blobs.mkdir()
    job = load_job(folder / "job.toml")
    model = GlobalModel.of(job, load_task(job.task.source, {}, base=folder), folder)
    (blobs / model.sha256).write_bytes(model.payload)
    address = f"127.0.0.1:{free_ports(1)}"
    policy = "federated" if role == "client" else "datacenter"
    changes = ("--set", f"strategy.policy={policy}")
    run = start("job.toml", "--run-dir", "run", "--address", address, *changes)
    words = ("start",) if role == "client" else ("launch", "--ranks", "1")
    where = ("--server", address, "--name", "here", "--state", str(folder / "state"))
    participant = start(*words, *where, "--blobs", f"file:{blobs}", command=role)
    assert run.finish() == 0, run.output
    participant.kill()
    received = [row["receipts"][0]["bytes_out"] for row in report_of("run")["rounds"]]
    # The first model was in the folder; a datacenter goes on from its own.
    assert received == [0, len(model.payload) if role == "client" else 0]
