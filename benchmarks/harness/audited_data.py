"""Digits, images of MNIST and letters on ten devices, for audits of jobs with real data."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from regime_simulation import readers
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from isthmus import Task
from isthmus.task import Participant

EXAMPLES = 100
"""Examples of each device; the test rows are as many as those of ten devices at most."""
SIZES = {"digits": (64, 10), "mnist": (196, 10), "letters": (16, 26)}
"""Inputs and classes."""
HIDDEN = 64


class Classified(Task):
    """A model with one hidden layer, on one of the data sets."""

    def model(self) -> nn.Module:
        """The setting `rows` names the data set."""
        inputs, classes = SIZES[self.settings["rows"]]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)
        )

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Cross-entropy (batch,)."""
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output: Any, target: Any) -> dict[str, torch.Tensor]:
        """Whether each example is classified right (batch,)."""
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """Every device has as many rows, in the order of a permutation."""
        train, _ = rows_of(self.settings["rows"], self.data)
        assert participant.shard is not None
        index, _ = participant.shard
        order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0))
        own = order[index * EXAMPLES : (index + 1) * EXAMPLES]
        return TensorDataset(train[0][own], train[1][own])

    def eval_data(self) -> Dataset[Any]:
        """The test rows."""
        _, (inputs, target) = rows_of(self.settings["rows"], self.data)
        return TensorDataset(inputs[: 10 * EXAMPLES], target[: 10 * EXAMPLES])

    def optimizer(self, parameters: Any, participant: Participant) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(parameters, lr=0.2)


@functools.cache
def rows_of(name: str, folder: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """The inputs and classes of the train and test rows."""
    if name != "digits":
        sides = readers.mnist(folder) if name == "mnist" else readers.letters(folder)
        return tuple((side.inputs, side.target) for side in sides)
    from sklearn.datasets import load_digits

    images, target = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32) / 16
    classes = torch.tensor(target)
    return (inputs[:1400], classes[:1400]), (inputs[1400:], classes[1400:])
