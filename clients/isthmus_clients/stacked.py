"""Gradients of many devices' models at once: stacked, in one pass of `torch.vmap`.

Shape legend: K = devices of the batch, S = steps, B = examples of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import Dataset

from isthmus.errors import TaskError
from isthmus.scoring import batches, losses
from isthmus.task import Task, user_code
from isthmus_clients.training import CPU

Stacked = dict[str, torch.Tensor]
"""Parameters by name, each (K, *shape)."""


class Gradients:
    """Gradients of all devices' losses, recorded once as plain operations for each shape."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._scored = _Scored(task, model)
        self._recorded: dict[tuple[object, ...], Callable[..., Any]] = {}

    def __call__(
        self, stacked: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Stacked, torch.Tensor]:
        """Gradients (K, *shape) of each device's weighted loss, and the loss of each example.

        `inputs` and `target` are (K, B, ...), `weights` (K, B).
        """
        parameters = {f"model.{name}": part.detach() for name, part in stacked.items()}
        key = (inputs.shape, inputs.dtype, target.shape, target.dtype)
        if key not in self._recorded:
            with user_code("the loss of many devices at once (torch.vmap)"):
                record = make_fx(lambda *tensors: self._all(*tensors))  # it counts arguments
                self._recorded[key] = record(parameters, inputs, target, weights)
        with user_code("the loss of many devices at once (torch.vmap)"):
            gradients, examples = self._recorded[key](parameters, inputs, target, weights)
        return {name.removeprefix("model."): part for name, part in gradients.items()}, examples

    def _all(
        self, parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Stacked, torch.Tensor]:
        """The sum over devices has each device's gradient in its own rows."""

        def loss(parameters: Stacked) -> tuple[torch.Tensor, torch.Tensor]:
            examples = torch.vmap(self._one, randomness="different")(parameters, inputs, target)
            return (examples * weights).sum(), examples

        gradients, examples = torch.func.grad(loss, has_aux=True)(parameters)
        # Fused optimizers take it for granted that a gradient lies as its parameter does.
        return {name: part.contiguous() for name, part in gradients.items()}, examples

    def _one(self, parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scored: torch.Tensor = torch.func.functional_call(
            self._scored, parameters, (inputs, target)
        )
        return scored


class _Scored(nn.Module):
    """Task and model as one module: examples in, the mean loss of each one's units (B) out."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model.train()

    def forward(self, inputs: Any, target: Any) -> torch.Tensor:
        _, values = losses(self.task, self.model, inputs, target)
        return values.reshape(len(inputs), -1).mean(1)


def stacked_batches(
    datasets: Sequence[Dataset[Any]],
    indices: Sequence[Sequence[list[int]]],
    most: int,
    batch_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and targets (S, K, B, ...), and which examples are real (S, K, B).

    A device with fewer steps or a short last batch is filled up with its first example.
    """
    inputs, targets = [], []
    present = torch.zeros(most, len(datasets), batch_size)
    for k, (dataset, steps) in enumerate(zip(datasets, indices, strict=True)):
        flat = []
        for s, step in enumerate(steps):
            flat += step + [0] * (batch_size - len(step))
            present[s, k, : len(step)] = 1.0
        flat += [0] * (batch_size * most - len(flat))
        x, y = next(batches(dataset, flat, len(flat), CPU))
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            raise TaskError(
                "virtual devices need examples of two tensors (input, target), not "
                f"{type(x).__name__} and {type(y).__name__}"
            )
        inputs.append(x.reshape(most, batch_size, *x.shape[1:]))
        targets.append(y.reshape(most, batch_size, *y.shape[1:]))
    return torch.stack(inputs, 1), torch.stack(targets, 1), present
