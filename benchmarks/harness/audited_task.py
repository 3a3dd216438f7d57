"""A small task whose job is audited: which of four numbers is the largest, 515 parameters."""

from __future__ import annotations

from typing import Any

from harness.small_task import Small, rows
from torch import nn
from torch.utils.data import Dataset

from isthmus.task import Participant

EXAMPLES = 200
"""Examples of each device."""


class Audited(Small):
    """A model with one hidden layer."""

    def model(self) -> nn.Module:
        """Four inputs, three outputs."""
        return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """Examples that depend on the device's name."""
        return rows(EXAMPLES, seed=sum(participant.name.encode()))
