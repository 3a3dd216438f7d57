"""A task with adapters (LoRA) in its model, to plan what they would take."""

from __future__ import annotations

import copy

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.task import Task


class AdaptedLinear(nn.Module):
    """A frozen linear layer, to which the product of two trained factors is added."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.zeros(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.in_features = base.in_features
        self.out_features = base.out_features

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the frozen layer, for code that reads it."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias of the frozen layer, for code that reads it."""
        return self.base.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's outputs."""
        factors = nn.functional.linear(inputs, self.lora_a)
        added = nn.functional.linear(factors, self.lora_b)
        outputs: torch.Tensor = self.base(inputs)
        return outputs + added


def adapted_task(task: Task, rank: int) -> Task:
    """A copy of a task whose model has adapters at its linear layers, and is frozen but for them.

    Its `model()` raises a `TaskError` for a model without linear layers.
    """
    adapted = copy.copy(task)

    def model() -> nn.Module:
        whole = task.model()
        layers = [name for name, each in whole.named_modules() if type(each) is nn.Linear]
        if not layers or "" in layers:
            raise TaskError("the model has no linear layers in it that could have adapters")
        whole.requires_grad_(False)
        for name in layers:
            parent, _, child = name.rpartition(".")
            layer = whole.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            setattr(whole.get_submodule(parent), child, AdaptedLinear(layer, rank))
        return whole

    vars(adapted)["model"] = model
    return adapted
