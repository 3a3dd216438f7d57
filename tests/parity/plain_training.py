"""Plain PyTorch loops in one process, with which trained models are compared.

They have nothing of the product but the initial model and the order of the examples. `train` is
what a datacenter should compute: the mean loss over the scored units of the batches of all replicas
together. `average` is what devices should: FedAvg (McMahan et al. 2017), weighted by examples.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.parity.tasks import DEVICES
from torch import nn

from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.task import Participant, Task, load_task
from isthmus.task.scoring import build_model
from isthmus.task.scoring.order import EpochOrder
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_clients.training.example_order import local_seed, step_indices
from isthmus_datacenter.training.data import ExampleOrder

HERE = Path(__file__).parent
State = dict[str, torch.Tensor]
"""Parameters and running statistics by name."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a model is trained, by any layout."""

    optimizer: str
    """Of torch.optim."""
    options: Mapping[str, Any]
    clip_norm: float | None = None
    cosine: tuple[int, int] | None = None
    """Steps of the warm-up, and of all, of a rate that then falls by a cosine to zero."""
    accumulate: int = 1
    """Parts of a batch."""

    def rate_factor(self, step: int) -> float:
        """Of the learning rate in a step, from 0.

        >>> [round(Setting("SGD", {}, cosine=(1, 3)).rate_factor(step), 3) for step in range(4)]
        [0.5, 1.0, 0.5, 0.0]
        """
        if self.cosine is None:
            return 1.0
        warmup, total = self.cosine
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup)))) / 2


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model that one process trained."""

    layout: TensorLayout
    start: State
    end: State


def train(job: Job, setting: Setting, replicas: int, steps: int) -> Trained:
    """Train as a datacenter with so many replicas."""
    task, model, layout = _begun(job)
    start = _state(model, layout)
    participant = Participant(name="test", regime="datacenter")
    optimizer = task.optimizer(model.parameters(), participant)
    data: Any = task.local_data(participant)
    statistics = _changing(model, data)
    size = job.datacenter.batch_size
    order = ExampleOrder(examples=len(data), replicas=replicas, batch_size=size, seed=job.seed)
    for step in range(steps):
        batches = [
            [data[index] for index in order.indices(step, step + 1, replica)]
            for replica in range(replicas)
        ]
        part = size // job.datacenter.accumulate
        _step(task, model, statistics, optimizer, setting, batches, part, step)
    return Trained(layout, start, _state(model, layout))


def average(job: Job, setting: Setting) -> Trained:
    """Train on devices in turn, and average their models after each round."""
    task, built, layout = _begun(job)
    start = _state(built, layout)
    part = job.federated.batch_size // job.federated.accumulate
    now = start
    for round_ in range(1, job.rounds + 1):
        total = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in start.items()}
        examples = 0
        for name in DEVICES:
            participant = Participant(name=name, regime="federated", round=round_)
            data: Any = task.local_data(participant)
            # What is not exchanged begins as it was built.
            model = copy.deepcopy(built)
            _load(model, now)
            statistics = _changing(model, data)
            optimizer = task.optimizer(model.parameters(), participant)
            before = (round_ - 1) * (job.federated.local_steps or 0)
            for step, rows in enumerate(_rows(task, data, job, round_, name)):
                _step(task, model, statistics, optimizer, setting, [rows], part, before + step)
            for key, each in _state(model, layout).items():
                total[key] += len(data) * each.double()
            examples += len(data)
        now = {key: (each / examples).float() for key, each in total.items()}
    return Trained(layout, start, now)


def _begun(job: Job) -> tuple[Task, nn.Module, TensorLayout]:
    task = load_task(job.task.source, job.task.settings, base=HERE)
    model = build_model(task, job.seed)
    model.train()
    return task, model, TensorLayout.of(model)


def _rows(task: Task, data: Any, job: Job, round_: int, name: str) -> Iterator[list[Any]]:
    """The examples of each local step."""
    settings: FederatedSection = job.federated
    order = EpochOrder(task, data, len(data), settings.batch_size)
    for indices in step_indices(local_seed(job.seed, round_, name), order, settings):
        yield [data[index] for index in indices]


def _step(
    task: Task,
    model: nn.Module,
    statistics: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    setting: Setting,
    batches: Sequence[list[Any]],
    part: int,
    step: int,
) -> None:
    """One optimizer step for the batches of all replicas, of which each trains `part` at a time.

    `statistics` are the buffers that a call changes; they become the mean of the replicas.
    """
    if not statistics:
        # Nothing depends on how the examples are divided.
        batches = [[row for batch in batches for row in batch]]
        part = len(batches[0])
    before = [each.clone() for each in statistics]
    after = [torch.zeros_like(each) for each in statistics]
    count = 0.0
    for batch in batches:
        _copy(before, statistics)
        for first in range(0, len(batch), part):
            rows = batch[first : first + part]
            inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
            loss = task.loss(model(inputs), target)
            values, mask = loss if isinstance(loss, tuple) else (loss, torch.ones_like(loss))
            (values * mask).sum().backward()
            count += float(mask.sum())
        for buffer, mean in zip(statistics, after, strict=True):
            mean += buffer / len(batches)
    _copy(after, statistics)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= count
    if setting.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), setting.clip_norm)
    for group in optimizer.param_groups:
        group.setdefault("first_lr", group["lr"])
        group["lr"] = group["first_lr"] * setting.rate_factor(step)
    optimizer.step()
    optimizer.zero_grad()


def _copy(values: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)


def _changing(model: nn.Module, data: Any) -> list[torch.Tensor]:
    """The buffers that a call changes, such as running statistics."""
    buffers = [each for each in model.buffers() if each.is_floating_point()]
    before = [each.clone() for each in buffers]
    inputs = torch.stack([data[0][0], data[-1][0]])
    model(inputs)
    changing = [i for i, each in enumerate(buffers) if not torch.equal(each, before[i])]
    _copy(before, buffers)
    return [buffers[i] for i in changing]


def _state(model: nn.Module, layout: TensorLayout) -> State:
    """A copy of what is exchanged."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return {
        name: tensors[name].detach().clone()
        for name, _ in layout.parts(torch.empty(layout.size))
        if name in tensors
    }


def _load(model: nn.Module, state: State) -> None:
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        for name, value in state.items():
            tensors[name].copy_(value)
