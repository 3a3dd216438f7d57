"""The tasks of the comparisons: a small model by its name, and updates of a given range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tests.parity.small_models import CLASSES, PICTURE, SOUND, TOKENS, WORDS, build, input_of
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from isthmus import Participant, Task

EXAMPLES = 40
DEVICES = {"client-0": range(6), "client-1": range(6, 15), "client-2": range(15, 27)}
DEVICES["client-3"] = range(27, EXAMPLES)
"""The examples of each device, by its name."""
WIDTH = 16
"""Inputs of the model of `Scaled`."""


class Small(Task):
    """Settings: `model` of small_models, `optimizer` of torch.optim, its `options`."""

    def model(self) -> nn.Module:
        return build(self.settings["model"])

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        if output.ndim == 2:
            return nn.functional.cross_entropy(output, target, reduction="none")
        # Examples have different numbers of scored words, so replicas have, too.
        values = nn.functional.cross_entropy(
            output.transpose(1, 2), target.clamp(min=0), reduction="none"
        )
        return values, target >= 0

    def local_data(self, participant: Participant) -> TensorDataset:
        whole = self._examples()
        if participant.regime == "datacenter":
            return whole
        return TensorDataset(*whole[list(DEVICES[participant.name])])

    def eval_data(self) -> TensorDataset:
        return self._examples()

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.settings.get("optimizer", "SGD"))
        options = self.settings.get("options", {"lr": 0.1, "momentum": 0.9})
        optimizer: torch.optim.Optimizer = kind(parameters, **options)
        return optimizer

    def _examples(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        kind = input_of(self.settings["model"])
        if kind != "words":
            shapes = {"pictures": (3, PICTURE, PICTURE), "sounds": (SOUND,)}
            if kind in shapes:
                inputs = torch.randn(EXAMPLES, *shapes[kind], generator=generator)
            else:
                inputs = torch.randint(WORDS, (EXAMPLES, TOKENS), generator=generator)
            return TensorDataset(inputs, torch.randint(CLASSES, (EXAMPLES,), generator=generator))
        words = torch.randint(1, WORDS, (EXAMPLES, TOKENS), generator=generator)
        target = words.roll(-1, 1)
        lengths = torch.randint(2, TOKENS, (EXAMPLES, 1), generator=generator)
        target[torch.arange(TOKENS).expand(EXAMPLES, TOKENS) >= lengths] = -1
        return TensorDataset(words, target)


class Scaled(Task):
    """Updates whose length is about a number, of devices with any number of rows.

    Settings: `scale`, and `rows` of each device. The model begins as zero, so that it has the
    update exactly, and its loss is linear: what its sum loses is not hidden by how a model trains.
    """

    def model(self) -> nn.Module:
        model = nn.Linear(WIDTH, CLASSES)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * target).mean(1)

    def local_data(self, participant: Participant) -> Dataset[Any]:
        number = list(DEVICES).index(participant.name)
        return Rows(self.settings["rows"][number], number)

    def eval_data(self) -> Dataset[Any]:
        return Rows(1, 0)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.settings["scale"])


class Rows(Dataset[Any]):
    """So many rows, which are made when they are read."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Sequence[torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 10_000_000 + index)
        return torch.randn(WIDTH + CLASSES, generator=generator).split([WIDTH, CLASSES])
