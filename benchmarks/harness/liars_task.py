"""Data sets in many equal parts, one for each device, with small models; some devices may lie.

`settings`: `data`, the folder; `set`, a name of `SETS`; `devices`; `seed`, of the split; `flipped`,
the numbers of the devices whose labels are flipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from regime_simulation import readers
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import isthmus


class DataSet(NamedTuple):
    """How a data set is read, and what learns it."""

    read: Callable[[Path], tuple[readers.Rows, readers.Rows]]
    classes: int
    width: int
    """Width of the hidden layer; 0 for a linear model."""
    rate: float
    rounds: int


SETS = {
    "letters": DataSet(readers.letters, 26, 32, 1.0, 20),
    "mnist": DataSet(readers.mnist, 10, 24, 0.3, 20),
    "heart": DataSet(readers.heart, 2, 0, 0.1, 20),
}
POOLED = 14
"""Pixels of a side of the images of MNIST."""


class ManyDevices(isthmus.Task):
    """The parts of a data set."""

    def __init__(self, settings: Mapping[str, Any], data: Path | None = None) -> None:
        """Read the data."""
        super().__init__(settings, data)
        self._set = SETS[settings["set"]]
        self._train, self._test = rows_of(settings["set"], settings["data"])
        order = torch.randperm(
            len(self._train.target), generator=torch.Generator().manual_seed(settings["seed"])
        )
        self._each = len(order) // settings["devices"]
        self._order = order

    def model(self) -> nn.Module:
        """One hidden layer, or none."""
        inputs = self._train.inputs.shape[1]
        if not self._set.width:
            return nn.Linear(inputs, self._set.classes)
        return nn.Sequential(
            nn.Linear(inputs, self._set.width),
            nn.ReLU(),
            nn.Linear(self._set.width, self._set.classes),
        )

    def part(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the device with a number."""
        rows = self._train.at(self._order[index * self._each : (index + 1) * self._each])
        target = rows.target
        if index in self.settings.get("flipped", ()):
            target = self._set.classes - 1 - target
        return rows.inputs, target

    def local_data(self, participant: isthmus.Participant) -> Dataset[Any]:
        """The part of a device."""
        assert participant.shard is not None
        index, _ = participant.shard
        return TensorDataset(*self.part(index))

    def eval_data(self) -> Dataset[Any]:
        """The test rows."""
        return TensorDataset(self._test.inputs, self._test.target)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross-entropy (batch,)."""
        return nn.functional.cross_entropy(output, target, reduction="none")

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Whether each row is recognised (batch,)."""
        return {"accuracy": (output.argmax(1) == target).float()}

    def optimizer(self, parameters: Any, participant: isthmus.Participant) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(parameters, lr=self._set.rate)


@functools.cache
def rows_of(name: str, folder: str) -> tuple[readers.Rows, readers.Rows]:
    """Training and test rows, inputs (n, inputs) and target (n)."""
    parts = SETS[name].read(Path(folder))
    return _flat(parts[0]), _flat(parts[1])


def _flat(rows: readers.Rows) -> readers.Rows:
    inputs = rows.inputs
    if inputs.dim() > 2:
        images = inputs.view(len(inputs), 1, inputs.shape[-1], inputs.shape[-1])
        inputs = nn.functional.adaptive_avg_pool2d(images, POOLED).flatten(1)
    return readers.Rows(inputs, rows.target.long(), rows.kind)
