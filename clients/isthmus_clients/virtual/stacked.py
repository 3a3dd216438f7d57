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
from isthmus.task import Task, user_code
from isthmus.task.scoring import batches, losses
from isthmus_clients.training.local_run import CPU

aten = torch.ops.aten

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
                self._recorded[key] = _simplified(record(parameters, inputs, target, weights))
        with user_code("the loss of many devices at once (torch.vmap)"), torch.no_grad():
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


_NOTHING = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
"""Do nothing to a tensor that has the shape already."""
_TIMES_ONE = (aten.mul.Scalar, aten.div.Scalar)


def _simplified(recorded: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same without operations that change no bit: for small models they are a third of a step.

    They come from vmap (every view of a batch) and from addmm's factors of one.
    """
    nodes = [node for node in recorded.graph.nodes if node.op == "call_function"]
    if any(node.target._schema.is_mutable for node in nodes if hasattr(node.target, "_schema")):
        return recorded  # a copy may be needed, even one of the same values
    for node in nodes:
        if node.target in _NOTHING or (node.target in _TIMES_ONE and node.args[1] == 1):
            before = node.args[0]
            if _lies_as(before) == _lies_as(node):
                node.replace_all_uses_with(before)
                recorded.graph.erase_node(node)
    recorded.recompile()
    return recorded


def _lies_as(node: torch.fx.Node) -> tuple[object, ...]:
    """Shape, strides and type of a node's tensor."""
    tensor = node.meta["tensor_meta"]
    return tensor.shape, tensor.stride, tensor.dtype


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
    lengths = torch.zeros(most, len(datasets), 1)
    for k, (dataset, steps) in enumerate(zip(datasets, indices, strict=True)):
        flat = []
        for step in steps:
            flat += step + [0] * (batch_size - len(step))
        lengths[: len(steps), k, 0] = torch.tensor([float(len(step)) for step in steps])
        flat += [0] * (batch_size * most - len(flat))
        x, y = next(batches(dataset, flat, len(flat), CPU))
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            raise TaskError(
                "virtual devices need examples of two tensors (input, target), not "
                f"{type(x).__name__} and {type(y).__name__}"
            )
        inputs.append(x.reshape(most, batch_size, *x.shape[1:]))
        targets.append(y.reshape(most, batch_size, *y.shape[1:]))
    present = torch.arange(batch_size) < lengths
    return torch.stack(inputs, 1), torch.stack(targets, 1), present.float()
