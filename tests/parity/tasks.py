"""The task that trains a small model, by the name of the model and of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tests.parity.small_models import CLASSES, PICTURE, TOKENS, WORDS, build
from torch import nn
from torch.utils.data import TensorDataset

from isthmus import Participant, Task

EXAMPLES = 40


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
        generator = torch.Generator().manual_seed(1)
        if self.settings["model"] == "vit":
            pictures = torch.randn(EXAMPLES, 3, PICTURE, PICTURE, generator=generator)
            classes = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
            return TensorDataset(pictures, classes)
        words = torch.randint(1, WORDS, (EXAMPLES, TOKENS), generator=generator)
        target = words.roll(-1, 1)
        lengths = torch.randint(2, TOKENS, (EXAMPLES, 1), generator=generator)
        target[torch.arange(TOKENS).expand(EXAMPLES, TOKENS) >= lengths] = -1
        return TensorDataset(words, target)

    def eval_data(self) -> TensorDataset:
        return self.local_data(Participant(name="", regime="datacenter"))

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.settings.get("optimizer", "SGD"))
        options = self.settings.get("options", {"lr": 0.1, "momentum": 0.9})
        optimizer: torch.optim.Optimizer = kind(parameters, **options)
        return optimizer
