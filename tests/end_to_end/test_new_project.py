"""A new project, edited, trains on this machine, and then unchanged on a fleet."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.test_commands import BACKGROUND, Terminal, listening
from tests.forked_commands import ForkedCommands

DEVICES = range(3)
FLEET = [
    "isthmus server init fleet --host localhost",
    "umask 077; isthmus server token create fleet --name op --kind operator > op.token",
    "isthmus task key author.key > author.pub",
    "isthmus task pack mine --key author.key --output mine.task",
    'isthmus task install mine.task --author "$(cat author.pub)" --tasks fleet/tasks',
    BACKGROUND + "isthmus server start fleet --address 127.0.0.1:9522",
    "isthmus operator join localhost:9523 --token-file op.token --state op",
]
DEVICE = [
    "umask 077; isthmus server token create fleet --name device-{n} > device-{n}.token",
    "isthmus client join localhost:9523 --token-file device-{n}.token --state device-{n}",
    'isthmus task install mine.task --author "$(cat author.pub)" --tasks device-{n}/tasks',
    "echo 'privacy.clients_min = 2' >> device-{n}/policy.toml",
    BACKGROUND + "isthmus client start --state device-{n} --shard {n}/3",
]
JOB = "mine/job.toml --set federated.clients={} --set federated.cohort=3 --set rounds=2"
INSTALLED = "--set task.source=mine/task.py:Rows"


def test_a_new_project_trains_here_and_on_a_fleet(
    tmp_path: Path, forked_commands: ForkedCommands
) -> None:
    terminal = Terminal(tmp_path, forked_commands.environment())
    try:
        terminal.type("isthmus new mine")
        task = tmp_path / "mine/task.py"
        task.write_text(
            task.read_text()
            .replace("nn.Linear(inputs, 32)", "nn.Linear(inputs, 24)")
            .replace("nn.Linear(32,", "nn.Linear(24,")
        )
        terminal.type(f"isthmus run {JOB.format(3)} --run-dir here")
        for line in FLEET:
            terminal.type(line)
            if line.startswith(BACKGROUND):
                terminal.until(lambda: listening(9523))
        for n in DEVICES:
            for line in DEVICE:
                terminal.type(line.replace("{n}", str(n)))
        terminal.type(f"isthmus submit {JOB.format(0)} {INSTALLED} --state op")
        terminal.read("isthmus logs mine-1 --follow --state op")
    finally:
        terminal.close()
    for run in ("here", "fleet/runs/mine-1"):
        report = json.loads(terminal.read(f"isthmus report {run} --json"))
        assert report["status"] == "finished"
        assert [row["participants"]["accepted"] for row in report["rounds"]] == [3, 3]
        assert report["rounds"][-1]["metrics"]["loss"] < report["rounds"][0]["metrics"]["loss"]
