"""The learning rate of every step is PyTorch's own, whatever happens to a run."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from tests.free_ports import free_ports

TASK = '''
import os
from pathlib import Path

import torch
from task import Table


def schedule(optimizer):
    """A warm-up of six steps, then a cosine."""
    warming = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, 0.001)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warming, cosine], [6])


class Logged(torch.optim.SGD):
    def step(self, closure=None):
        with self.log.open("a") as log:
            log.write(repr(self.param_groups[0]["lr"]) + " ")
        return super().step(closure)


class Scheduled(Table):
    """Logs the rates of each optimizer; a device waits in round 4 until its gate is opened."""

    def optimizer(self, parameters, participant):
        self.round = participant.round
        optimizer = Logged(parameters, lr=0.3)
        name = f"{participant.name} {participant.round} {os.getpid()} {os.environ.get('RANK', 0)}"
        optimizer.log = Path(self.settings["logs"]) / name
        return optimizer, schedule(optimizer)

    def forward(self, model, inputs):
        gate = Path(self.settings["gate"])
        if model.training and self.me() == "client-0" and self.round == 4 and gate.is_fifo():
            gate.read_text()
        return model(inputs)
'''

JOB = """
name = "scheduled"
rounds = 6

[task]
source = "scheduled.py:Scheduled"

[strategy]
policy = "schedule"
schedule = [
    { regime = "datacenter", rounds = 1 },
    { regime = "federated", rounds = 1 },
    { regime = "hybrid", rounds = 1 },
    { regime = "federated", rounds = 1 },
    { regime = "datacenter" },
]

[federated]
clients = 3
cohort = 3
local_steps = 5
batch_size = 16
secure_aggregation = false

[datacenter]
steps = 8
log_steps = 2

[time]
join_seconds = 300
round_seconds = 300
lease_seconds = 60
"""

STARTS = {1: 0, 2: 8, 3: 13, 4: 21, 5: 26, 6: 34}
"""By round: optimizer steps before it, 8 of a round with the datacenter and 5 of another."""


def test_rates_over_regimes_a_kill_and_another_number_of_ranks(
    folder: Path, start: Any, report_of: Any
) -> None:
    logs, gate, state = folder / "logs", folder / "gate", str(folder / "state")
    logs.mkdir()
    os.mkfifo(gate)
    (folder / "scheduled.py").write_text(TASK)
    (folder / "job.toml").write_text(JOB)
    address = f"127.0.0.1:{free_ports(1)}"

    def datacenter(ranks: int) -> Any:
        where = ("--server", address, "--state", state, "--name", "dc")
        return start(
            *("launch", "--scheduler", "local", "--ranks", str(ranks), *where), command="datacenter"
        )

    settings = {"logs": logs, "gate": gate}
    keys = [f"task.settings.{key}={value}" for key, value in settings.items()]
    sets = [word for key in keys for word in ("--set", key)]
    run = start("job.toml", "--run-dir", "run", "--address", address, *sets)
    ranks = datacenter(1)
    with gate.open("w"):  # as soon as client-0 waits in round 4
        gate.unlink()
        run.kill()
        ranks.kill()
    run = start("--resume", "--run-dir", "run", "--address", address)
    datacenter(2)
    assert run.finish() == 0, run.output

    expected = pytorchs_own()
    devices: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    ranks_of: dict[str, list[float]] = defaultdict(list)
    for path in sorted(logs.iterdir(), key=lambda path: int(path.name.split()[1])):
        name, round_, *process = path.name.split()
        rates = [float(word) for word in path.read_text().split()]
        if name == "dc":
            ranks_of[" ".join(process)] += rates
        else:
            devices[name, int(round_)].append(rates)
    one, both = expected[0:8] + expected[13:21], expected[26:42]
    # Where ranks share parameters, the optimizer is tried first, without its schedule: three steps
    # of whole parameters and three of sharded ones.
    tried = expected[:1] * 6
    assert sorted(ranks_of.values()) == sorted([one, tried + both, tried + both])
    assert {round_ for _, round_ in devices} == {2, 3, 4}
    for (_, round_), attempts in devices.items():
        at = STARTS[round_]
        ahead = [0, 1, 3, 4, 6] if round_ == 3 else range(5)  # of 8 steps, in five
        whole = [expected[at + step] for step in ahead]
        assert whole in attempts
        assert all(attempt == whole[: len(attempt)] for attempt in attempts)
    rows = [row for row in report_of("run")["rounds"] if "datacenter" in row["training"]]
    rates_of_rounds = {row["round"]: row["training"]["datacenter"]["learning_rate"] for row in rows}
    figures = {row["round"]: row["step_figures"]["dc"] for row in rows}
    assert {
        round_: [each["learning_rate"] for each in steps] for round_, steps in figures.items()
    } == {round_: expected[STARTS[round_] : STARTS[round_] + 8][1::2] for round_ in figures}
    for step in figures[6]:
        assert f"dc: step {step['step']}: loss {step['loss']:.4g}, gradient norm " in run.output
    assert rates_of_rounds == {round_: expected[STARTS[round_]] for round_ in (1, 3, 5, 6)}


def pytorchs_own() -> list[float]:
    """The rates of 42 steps of an uninterrupted loop in plain PyTorch."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    warming = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, 0.001)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warming, cosine], [6])
    rates = []
    for _ in range(42):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates
