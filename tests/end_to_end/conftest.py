"""A small complete job, and real `isthmus run` processes that tests can watch and kill."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests import forked

from isthmus_server.cli.run import report

collect_ignore = ["flower_quickstarts"]
"""Modules with the names of packages that they stand in for."""

TASK = '''
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus


class Table(isthmus.Task):
    """Rows of eight numbers in three classes.

    In training, the participant `block` blocks forever, and `hold` until its gate is opened.
    """

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant):
        self.participant = participant
        return self.rows(participant.shard[0] if participant.shard else 50, 64)

    def eval_data(self):
        return self.rows(99, 256)

    def optimizer(self, parameters, participant):
        self.trains = True  # before that, a forward pass only tries the model
        return torch.optim.SGD(parameters, lr=0.2)

    def forward(self, model, inputs):
        trains = model.training and getattr(self, "trains", False)
        if trains and self.me() == self.settings.get("block"):
            marker = Path(self.settings["marker"])
            if marker.is_fifo():
                marker.write_text(str(os.getpid()))
                while True:
                    os.read(os.pipe()[0], 1)  # until this process is killed
        if model.training and self.me() == self.settings.get("hold"):
            gate = Path(self.settings["gate"])
            if gate.is_fifo():
                gate.read_text()  # until the test opens the other end
        return model(inputs)

    def me(self):
        if self.participant.regime == "datacenter":
            return "rank-" + os.environ["RANK"]
        return self.participant.name

    def rows(self, seed, count):
        draw = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, 8, generator=draw)
        truth = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, (inputs @ truth).argmax(-1))
'''

JOB = """
name = "table"
seed = 3
rounds = 6

[task]
source = "task.py:Table"

[strategy]
policy = "schedule"
schedule = [
    { regime = "datacenter", rounds = 2 },
    { regime = "hybrid", rounds = 2 },
    { regime = "federated", rounds = 1 },
    { regime = "datacenter", rounds = 1 },
]
server_optimizer = { name = "SGD", options = { lr = 0.9, momentum = 0.5 } }

[federated]
clients = 4
cohort = 4
quorum = 3

[datacenter]
ranks = 2
steps = 8

[time]
join_seconds = 300
round_seconds = 300
lease_seconds = 60
"""


class RunProcess:
    """One process of `isthmus run`, or of another command that trains on this machine."""

    def __init__(self, *arguments: str, cwd: Path, command: str = "run") -> None:
        environment = {**os.environ, "COLUMNS": "400"}
        self.process, pipe = forked.start((command, *arguments), cwd, environment)
        self.stdout = os.fdopen(os.dup(pipe.fileno()), encoding="utf-8")
        pipe.close()
        self.output = ""

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """Read the output until a line matches; fails if it ends before that."""
        for line in self.stdout:
            self.output += line
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the output ended without {pattern!r}:\n{self.output}")

    def wait_for_blocked(self, marker: Path) -> int:
        """Wait for the participant that blocks on the FIFO `marker`, and return its process id."""
        reader = os.open(marker, os.O_RDONLY | os.O_NONBLOCK)
        process_end = self.process.sentinel
        try:
            ready, _, _ = select.select([reader, process_end], [], [])
            assert reader in ready, self.stdout.read()
            marker.unlink()
            return int(os.read(reader, 32))
        finally:
            os.close(reader)

    def wait_for_opens(self, log: Path, times: int) -> None:
        """Wait until a device's log shows that it has opened the run `times` times."""
        while log.read_text().count("opened ") < times:
            assert self.process.is_alive(), self.stdout.read()
            time.sleep(0.02)  # a log file can only be polled

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def interrupt(self) -> None:
        """Send Ctrl-C."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)

    def finish(self) -> int | None:
        """Read the output to its end; returns the exit status."""
        self.output += self.stdout.read()
        self.process.join()
        return self.process.exitcode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the small job."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Any]:
    """Start `isthmus run` processes, which are killed at the end of the test."""
    started: list[RunProcess] = []

    def start_run(*arguments: str, command: str = "run") -> RunProcess:
        started.append(RunProcess(*arguments, cwd=folder, command=command))
        return started[-1]

    yield start_run
    for run in started:
        run.kill()
        run.stdout.close()


@pytest.fixture
def report_of(folder: Path) -> Any:
    """Read a run with `isthmus report --json`."""

    def read(name: str) -> Any:
        result = CliRunner().invoke(report, [str(folder / name), "--json"], catch_exceptions=False)
        return json.loads(result.output)

    return read
