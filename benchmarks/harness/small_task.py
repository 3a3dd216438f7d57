"""A small classifier: four numbers, and three classes of which is the largest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from isthmus import Task
from isthmus.task import Participant

EXAMPLES = 20
"""Examples of each device."""


class Small(Task):
    """A linear model of 15 parameters."""

    def model(self) -> nn.Module:
        """Four inputs, three outputs."""
        return nn.Linear(4, 3)

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Cross-entropy (batch,)."""
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output: Any, target: Any) -> dict[str, torch.Tensor]:
        """Whether each example is classified right (batch,)."""
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """Examples that depend on the device's name."""
        return rows(EXAMPLES, seed=sum(participant.name.encode()))

    def eval_data(self) -> Dataset[Any]:
        """Other examples."""
        return rows(EXAMPLES, seed=0)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(parameters, lr=0.1)


def rows(count: int, seed: int) -> Dataset[Any]:
    """So many examples."""
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.argmax(1).clamp(max=2))
