"""Tasks whose examples differ in shape, or are not finite, for tests of differential privacy."""

from typing import Any

import torch
from tests.datacenter.tasks import CLASSES, Table
from torch import nn
from torch.utils.data import Dataset


class MeanOverTime(nn.Module):
    """Sequences (batch, time, width) to their means (batch, width)."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(1)


class Ragged(Table):
    """Sequences of two lengths; those of examples 7 and 8 have an infinite number."""

    def model(self) -> nn.Module:
        dropout = nn.Dropout(self.settings.get("dropout", 0.0))
        return nn.Sequential(
            nn.Sequential(nn.Linear(6, 11), nn.Tanh(), dropout),
            nn.Sequential(MeanOverTime(), nn.LayerNorm(11), nn.Linear(11, CLASSES)),
        )

    def rows(self, count: int, seed: int) -> Any:
        return _Sequences(count, seed)


class _Sequences(Dataset[Any]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 5, 6, generator=generator)
        if count > 8:
            self.inputs[7:9, 1, 3] = torch.inf

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs = self.inputs[index, : 3 + 2 * (index % 2)]
        return inputs, index % CLASSES
