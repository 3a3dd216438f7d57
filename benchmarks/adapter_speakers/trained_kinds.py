"""Train adapters in each way, and compute the perplexity of each speaker.

Runs are those of `isthmus simulate`: the coordinator, the policy, the device's code and the sums of
the product, without a network. What they are compared with, training of each device by itself and
of all lines on one machine, are plain loops of PyTorch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch
from adapter_speakers.speakers_task import HELD_OUT, ON_DEVICES, Speakers
from torch import nn
from torch.utils.data import TensorDataset

from isthmus.job import load_job
from isthmus.task import load_task
from isthmus.task.scoring import build_start_model
from isthmus_server.python.saved_model import load_model
from isthmus_simulation.run import Simulation
from isthmus_simulation.virtual_time import VirtualTimeLoop

HERE = Path(__file__).parent
JOB = "speakers_job.toml"
BATCH = 16
"""Windows in a step of all kinds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """A size of the trainings of adapters."""

    steps: int
    """Local steps of a device in a round."""
    rounds: int
    """Rounds that the budget pays for if all are of devices alone; as many steps as these have are
    those of all kinds, but for a device that trains by itself, which makes an eighth of them."""
    lr: float = 3e-3
    rank: int = 8
    length: int = 64
    processes: int = 2

    @property
    def budget(self) -> int:
        """Steps of a kind, of devices and of the datacenter."""
        return self.steps * self.rounds * len(ON_DEVICES)


KINDS: Mapping[str, tuple[str, ...]] = {
    "federated": ("strategy.policy=federated",),
    "bfloat16": ("strategy.policy=federated", "federated.frozen_dtype=bfloat16"),
    "int8": ("strategy.policy=federated", "federated.frozen_dtype=int8"),
    "datacenter": ("strategy.policy=datacenter",),
    "alternate": ("strategy.policy=alternate",),
    "hybrid": ("strategy.policy=hybrid",),
    "adaptive": ("strategy.policy=adaptive",),
}
"""Runs, by what of the job they change. The last three are of both lands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Perplexities of a character, each the mean over speakers."""

    held_out: float
    """Mean of speakers that are in nobody's data."""
    own: float
    """Mean of the last lines of the speakers on devices."""
    steps: float
    """Steps that were paid for."""


class Comparison:
    """All kinds over one base."""

    def __init__(self, folder: Path, data: Path, sizes: Sizes) -> None:
        """`folder` has the base, and gets the runs; `data` is the text."""
        for name in (JOB, "speakers_task.py"):
            (folder / name).write_text((HERE / name).read_text(encoding="utf-8"))
        self._folder = folder
        self._sizes = sizes
        self._changes = (
            f"task.data={data.resolve()}",
            f"task.settings.length={sizes.length}",
            f"task.settings.rank={sizes.rank}",
            f"task.settings.lr={sizes.lr}",
            f"federated.local_steps={sizes.steps}",
            f"prices.client_update={float(sizes.steps)}",
            # A step of the datacenter is one step of all of it.
            f"datacenter.steps={sizes.steps * len(ON_DEVICES)}",
            f"budget={sizes.budget}",
            f"simulation.processes={sizes.processes}",
        )

    def base(self, seed: int) -> Measured:
        """The base without adapters."""
        task, model = self._start(seed)
        return self._measured(task, [model] * len(ON_DEVICES), 0)

    def local(self, seed: int) -> Measured:
        """Each device by itself; held-out speakers by each of these models."""
        models = []
        task, _ = self._start(seed)
        steps = self._sizes.steps * self._sizes.rounds
        for speaker in ON_DEVICES:
            _, model = self._start(seed)
            self._train(task, model, task.training(speaker), steps, seed)
            models.append(model)
        return self._measured(task, models, steps * len(ON_DEVICES))

    def central(self, seed: int) -> Measured:
        """All lines of the devices on one machine."""
        task, model = self._start(seed)
        self._train(task, model, task.training(*ON_DEVICES), self._sizes.budget, seed)
        return self._measured(task, [model] * len(ON_DEVICES), self._sizes.budget)

    def run(self, kind: str, seed: int) -> Measured:
        """A run of one of `KINDS`."""
        job = load_job(self._folder / JOB, [f"seed={seed}", *self._changes, *KINDS[kind]])
        directory = self._folder / f"{kind}-{seed}"
        threads = torch.get_num_threads()
        try:
            with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                simulation = Simulation.new(job, self._folder, directory)
                runner.run(simulation.run())
        finally:
            torch.set_num_threads(threads)
        task, _ = self._start(seed)
        model = load_model(directory)
        return self._measured(task, [model] * len(ON_DEVICES), simulation.state.spent)

    def _start(self, seed: int) -> tuple[Speakers, nn.Module]:
        """A new task, and the model that all kinds begin with."""
        job = load_job(self._folder / JOB, [f"seed={seed}", *self._changes])
        table = job.task
        data = table.data_in(self._folder)
        task = load_task(table.source, table.settings, base=self._folder, data=data)
        model = build_start_model(task, job, self._folder)
        return task, model  # type: ignore[return-value]  # the class is loaded by its path

    def _train(
        self, task: Speakers, model: nn.Module, data: TensorDataset, steps: int, seed: int
    ) -> None:
        """A plain loop over random windows."""
        inputs, targets = data.tensors
        generator = torch.Generator().manual_seed(seed)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self._sizes.lr, weight_decay=0.0)
        model.train()
        for _ in range(steps):
            drawn = torch.randint(len(inputs), (BATCH,), generator=generator)
            loss = task.loss(task.forward(model, inputs[drawn]), targets[drawn]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()

    def _measured(self, task: Speakers, models: list[nn.Module], steps: float) -> Measured:
        """The figures of models, one for each device, which may be one model."""
        different = list(dict.fromkeys(models))
        held_out = [
            perplexity(task, model, task.of([speaker]))
            for model in different
            for speaker in HELD_OUT
        ]
        own = [
            perplexity(task, model, task.own(speaker))
            for model, speaker in zip(models, ON_DEVICES, strict=True)
        ]
        return Measured(held_out=statistics.mean(held_out), own=statistics.mean(own), steps=steps)


@torch.no_grad()
def perplexity(task: Speakers, model: nn.Module, data: TensorDataset) -> float:
    """The perplexity of a character, over all windows."""
    losses = [
        task.loss(task.forward(model, inputs), targets)
        for inputs, targets in zip(*(each.split(64) for each in data.tensors), strict=True)
    ]
    return math.exp(torch.cat(losses).mean().item())
