"""A task that computes nothing: one parameter of configurable size, and one example.

It only records the time of each evaluation of the model, which happens once per round. A round
therefore lasts from one evaluation to the next, as in the Flower app in `flower_stock/`.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from isthmus import Task
from isthmus.task import Participant


class Null(Task):
    def model(self) -> nn.Module:
        return _Vector(int(self.settings["parameters"]))

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        return output - target

    def metrics(self, output: Any, target: Any) -> dict[str, torch.Tensor]:
        if timestamps := self.settings.get("timestamps"):
            with Path(timestamps).open("a") as file:
                file.write(json.dumps({"time": time.monotonic()}) + "\n")
        return {}

    def local_data(self, participant: Participant) -> Dataset[Any]:
        return TensorDataset(torch.zeros(1), torch.zeros(1))

    def eval_data(self) -> Dataset[Any]:
        return TensorDataset(torch.zeros(1), torch.zeros(1))

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)


class _Vector(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.vector[0]
