"""The plain PyTorch loop that ranks are compared with: one process, the same global batches."""

from __future__ import annotations

from typing import Any

import torch
from tests.datacenter.conftest import JobSetup
from torch import nn

from isthmus.task import Participant, Task
from isthmus.task.scoring import build_model
from isthmus_datacenter.training.data import ExampleOrder


def train_plainly(setup: JobSetup, steps: int) -> nn.Module:
    """The model after some steps, with the job's limit of the gradient's norm."""
    section = setup.job.datacenter
    model = build_model(setup.task, setup.job.seed)
    participant = Participant(name="test", regime="datacenter")
    data: Any = setup.task.local_data(participant)
    optimizer: Any = setup.task.optimizer(_trained(model), participant)
    order = ExampleOrder(
        examples=len(data),
        replicas=1,
        batch_size=section.replicas(section.ranks) * section.batch_size,
        seed=setup.job.seed,
    )
    for step in range(steps):
        rows = [data[index] for index in order.indices(step, step + 1, 0)]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        values: Any = setup.task.loss(setup.task.forward(model, inputs), target)
        values.mean().backward()
        if section.clip_norm is not None:
            nn.utils.clip_grad_norm_(_trained(model), section.clip_norm)
        optimizer.step()
    return model


def largest_difference(setup: JobSetup, blob: bytes, model: nn.Module) -> float:
    """Between the parameters in a model file and those of a model."""
    stored = setup.layout.decode(bytearray(blob))
    return float((stored - setup.layout.gather(model)).abs().max())


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


__all__ = ["Task", "largest_difference", "train_plainly"]
