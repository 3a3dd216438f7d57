"""What parameters that stay on devices are worth, on two splits of handwritten digits.

Eight devices have 30 images each (scikit-learn's digits) and are evaluated on others of their own.
In the split `feature` all have the same digits, and each has another contrast, brightness and
background. In the split `label` each device has three of the ten digits. The devices' hosts, their
stored states, the division of the model and the server's step are those of the product, in one
process and without a network.

Rules: `average` exchanges everything; `local` keeps the normalisation layers on devices
(`exchange.buffers = "local"`, FedBN); `head` keeps the last layer (`exchange.personal`, FedPer);
`tuned` is
`average`, with 30 local steps before the evaluation (`federated.fine_tune_steps`);
`alone` exchanges nothing: each device trains by itself, for as many steps.

Figures: `accuracy/<rule>/<split>`, of the devices' pooled validation data, mean over seeds; and
`gain/<rule>/<split>` of two rules, the smallest difference to that of average over the seeds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import command_line, figures
from harness.figures import Target
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import isthmus
from isthmus.job import parse_job
from isthmus.task import Participant, load_task
from isthmus.task.measurements.evaluation import EvaluationVector
from isthmus.wire import link_pb2
from isthmus_clients.device.task_host import InProcessHost
from isthmus_clients.training.personal_state import PersonalStates
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes.opening import opening_of

RULES = {
    "average": [],
    "local": ["exchange.buffers='local'"],
    "head": ["exchange.personal=['head.*']"],
    "tuned": ["federated.fine_tune_steps=30"],
    "alone": [],
}
SPLITS = ("feature", "label")
DEVICES = 8
TRAINING = 30
"""Images that a device trains on; it is evaluated on twice as many."""
SEEDS = (0, 1, 2, 3, 4)
ROUNDS = 30
QUICK_ROUNDS = 12
TARGETS = {"gain/*": Target(at_least=0)}


class Shifted(isthmus.Task):
    """Digits of devices that differ, by `split` and `seed` of the settings."""

    def model(self) -> nn.Module:
        """Two convolutions with batch normalisation, and a linear head."""
        body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
        )
        return nn.Sequential(OrderedDict(body=body, head=nn.Linear(128, 10)))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross-entropy (batch,)."""
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Whether each image is recognised (batch,)."""
        return {"accuracy": (output.argmax(-1) == target).float()}

    def device_metrics(self) -> dict[str, Any]:
        """The accuracy."""
        return {"accuracy": isthmus.Mean()}

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """The first images of a device."""
        return self._data(participant, slice(0, TRAINING))

    def validation_data(self, participant: Participant) -> Dataset[Any]:
        """Images of the same device that it does not train on."""
        return self._data(participant, slice(TRAINING, 3 * TRAINING))

    def optimizer(self, parameters: Any, participant: Participant) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(parameters, lr=0.05)

    def _data(self, participant: Participant, part: slice) -> Dataset[Any]:
        assert participant.shard is not None
        device, seed = participant.shard[0], self.settings["seed"]
        images, target = _digits()
        rng = torch.Generator().manual_seed(1000 * seed + device)
        order = torch.randperm(len(images), generator=rng)
        if self.settings["split"] == "label":
            own = torch.randperm(10, generator=rng)[:3]
            order = order[torch.isin(target[order], own)]
            return TensorDataset(images[order[part]], target[order[part]])
        contrast = torch.empty(()).uniform_(0.4, 1.6, generator=rng)
        brightness, slope = torch.empty(2).uniform_(-1, 1, generator=rng)
        sign = 1 if device % 2 else -1  # half of the devices have black on white
        background = brightness + slope * torch.linspace(-1, 1, 8)
        return TensorDataset(
            sign * contrast * images[order[part]] + background, target[order[part]]
        )


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All images (1797, 1, 8, 8) from 0 to 1, and their digits (1797,)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target)


def accuracy(rule: str, split: str, seed: int, rounds: int, devices: int = DEVICES) -> float:
    """Train by a rule; returns the accuracy on the devices' pooled validation data."""
    job = parse_job(
        f'name = "personal"\n[task]\nsource = "{Path(__file__).name}:Shifted"',
        [
            *(f"seed={seed}", f"task.settings.seed={seed}", f"task.settings.split='{split}'"),
            *("federated.secure_aggregation=false", f"evaluation.devices={devices}"),
            *("federated.local_steps=6", "federated.batch_size=20", *RULES[rule]),
        ],
    )
    base = Path(__file__).parent
    task = load_task(job.task.source, job.task.settings, base=base)
    model = GlobalModel(task, job.seed, job.strategy.server_optimizer, exchange=job.exchange)
    opening = opening_of("run", job, base, model)
    memory_disk = Path("/dev/shm")  # exists on Linux; the disk is not measured
    scratch = memory_disk if memory_disk.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="personal-", dir=scratch) as folder:
        hosts = []
        for index in range(devices):
            name = f"client-{index}"
            who = Participant(name=name, regime="federated", shard=(index, devices))
            states = PersonalStates(Path(folder) / name)
            hosts.append(InProcessHost(who, None, None, 1, states=states))
            hosts[-1].open(opening)
        own = [model.vector.clone() for _ in hosts]
        """Models of the hosts, for the rule `alone`."""
        for round_ in range(1, rounds + 1):
            work = link_pb2.TrainLocal(run_id="run", round=round_, attempt=1)
            total = torch.zeros(model.layout.size)
            for vector, host in zip(own, hosts, strict=True):
                start = vector if rule == "alone" else model.vector
                payload = host.buffer(model.layout.nbytes)
                payload[:] = model.layout.encode(start)
                _, result = host.train("", work, payload, lambda progress: None)
                update = model.layout.decode(memoryview(result))
                vector.sub_(update)
                total.add_(update, alpha=1 / devices)
                host.release("")
            if rule != "alone":
                model.step(total)
        measured = EvaluationVector(task)
        counts = torch.zeros(measured.size, dtype=torch.int64)
        for vector, host in zip(own, hosts, strict=True):
            end = model.layout.encode(vector if rule == "alone" else model.vector)
            asked = link_pb2.Evaluate(run_id="run", round=rounds)
            counts += torch.tensor(host.evaluate("", asked, end).counts)
    return measured.figures(counts)["devices_accuracy"]


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv)
    command_line.needs("sklearn", "scikit-learn")
    seeds, rounds, devices = command_line.of_size(
        options,
        full=(SEEDS, ROUNDS, DEVICES),
        quick=(SEEDS[:2], QUICK_ROUNDS, DEVICES),
        smoke=(SEEDS[:1], 1, 2),
    )
    results: dict[str, float] = {}
    rows = []
    measured: dict[tuple[str, str], list[float]] = {}
    for rule in RULES:
        cells = [rule]
        for split in SPLITS:
            values = [accuracy(rule, split, seed, rounds, devices) for seed in seeds]
            measured[rule, split] = values
            results[f"accuracy/{rule}/{split}"] = statistics.mean(values)
            cells.append(f"{statistics.mean(values):.1%} [{min(values):.1%}..{max(values):.1%}]")
        rows.append(tuple(cells))
    for rule, split in (("local", "feature"), ("head", "label")):
        pairs = zip(measured[rule, split], measured["average", split], strict=True)
        results[f"gain/{rule}/{split}"] = min(a - b for a, b in pairs)
    print(figures.table(("rule", *SPLITS), rows))
    figures.write(options.json, "personal", figures.machine("scikit-learn"), results, TARGETS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
