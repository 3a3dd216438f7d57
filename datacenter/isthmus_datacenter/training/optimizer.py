"""The optimizer over one rank's share: steps, the norm of the whole gradient, the scale of fp16.

A task makes its optimizer from a list of parameters and knows nothing of meshes. Here its groups
are parted by mesh, because PyTorch's fused and foreach kernels take one at a time; files keep the
groups as the task made them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from isthmus.errors import TaskError
from isthmus.task import user_code
from isthmus.task.scoring import check_optimizer
from isthmus_datacenter.parallel.model_shard import ModelShard, local

FIRST_SCALE = 65536.0
_GROW_AFTER = 2000
"""Steps without an overflow after which the scale is doubled, as `torch.amp.GradScaler` does."""

Make = Callable[[Iterable[nn.Parameter]], Any]


class Updater:
    """Turns gradients into a step of the task's optimizer."""

    def __init__(self, share: ModelShard, make: Make, clip_norm: float | None, fp16: bool) -> None:
        """`make` is the task's `optimizer()`.

        Raises:
            TaskError: it raised, or made something else.
        """
        self.share = share
        self.clip_norm = clip_norm
        trainable = [each for each in share.parameters().values() if each.requires_grad]
        # A stage whose parameters are all frozen still needs an optimizer to talk to.
        given = trainable or [nn.Parameter(torch.zeros(1))]
        with user_code("optimizer()"):
            made = make(given)
        made = check_optimizer(made, given)
        closure = inspect.signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TaskError(
                f"optimizer() returned {type(made).__name__}, whose step() computes losses itself "
                "(it wants a closure); choose another"
            )
        self.optimizer = made
        self._origin = _part_by_mesh(made)
        self.scale = FIRST_SCALE if fp16 else 1.0
        """What the loss is multiplied by; above 1 only where gradients are fp16."""
        self._fp16 = fp16
        self._calm = 0

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The optimizer's parameters in its own order, with their names in the model."""
        names = {id(parameter): name for name, parameter in self.share.parameters().items()}
        return [
            (names[id(parameter)], parameter)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in names
        ]

    def step(self, factor: float) -> None:
        """Multiply all gradients by `factor`, clip them, step, and forget them."""
        gradients = self.share.gradients()
        self.share.add_up(gradients)
        self.share.agree_on_whole(gradients)
        if self._fp16:
            factor /= self.scale
        clipped: float | torch.Tensor = factor
        good = True
        if self.clip_norm is not None or self._fp16:
            norm = self._norm(gradients) * factor
            if self._fp16:
                good = bool(torch.isfinite(norm))
            if self.clip_norm is not None:
                clipped = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if good:
            if gradients and (isinstance(clipped, torch.Tensor) or clipped != 1.0):
                torch._foreach_mul_([local(each) for each in gradients.values()], clipped)
            self._use(gradients)
        self._rescale(good)
        self.optimizer.zero_grad(set_to_none=True)

    def _use(self, gradients: Mapping[str, torch.Tensor]) -> None:
        with user_code("the optimizer's step"):
            self.optimizer.step()

    def groups(self) -> list[dict[str, Any]]:
        """The options of the groups as the task made them."""
        found: dict[int, dict[str, Any]] = {}
        for origin, group in zip(self._origin, self.optimizer.param_groups, strict=True):
            found[origin] = {key: value for key, value in group.items() if key != "params"}
        return [found[origin] for origin in sorted(found)]

    def scaler(self) -> dict[str, float]:
        """The state of the fp16 scale."""
        return {"scale": self.scale, "calm": self._calm}

    def install(
        self,
        groups: list[dict[str, Any]],
        state: Mapping[str, dict[str, Any]],
        scaler: Mapping[str, float] | None,
    ) -> None:
        """Hand loaded state to the optimizer by its own front door, which knows about devices."""
        table = self.optimizer.state_dict()
        for origin, group in zip(self._origin, table["param_groups"], strict=True):
            group.update(groups[origin])
        order = [id(each) for group in self.optimizer.param_groups for each in group["params"]]
        found = {
            order.index(id(parameter)): state[name]
            for name, parameter in self.named()
            if name in state
        }
        self.optimizer.load_state_dict({"state": found, "param_groups": table["param_groups"]})
        if self._fp16 and scaler is not None:
            self.scale, self._calm = float(scaler["scale"]), int(scaler["calm"])

    def _norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The 2-norm of the whole gradient, over all ranks: each element counted once."""
        layout = self.share.layout
        squares = [torch.zeros((), dtype=torch.float32, device=self._device())]
        for name, gradient in gradients.items():
            parts = 1
            if isinstance(gradient, DTensor):
                for size, placement in zip(
                    gradient.device_mesh.shape, gradient.placements, strict=True
                ):
                    parts *= 1 if placement.is_replicate() else size
            copies = layout.data * layout.tensor * self.share.holders.get(name, 1) / parts
            squares.append(local(gradient).float().square().sum() / copies)
        total = torch.stack(squares).sum()
        if layout.ranks > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def _device(self) -> torch.device:
        return next((local(each).device for _, each in self.named()), torch.device("cpu"))

    def _rescale(self, good: bool) -> None:
        if not self._fp16:
            return
        self._calm = self._calm + 1 if good else 0
        if not good:
            self.scale = max(self.scale / 2, 1.0)
        elif self._calm == _GROW_AFTER:
            self.scale, self._calm = self.scale * 2, 0


def _part_by_mesh(optimizer: torch.optim.Optimizer) -> list[int]:
    """Part each group so that all its parameters are on one mesh; of each part, whose it was."""
    parted: list[dict[str, Any]] = []
    origin: list[int] = []
    for index, group in enumerate(optimizer.param_groups):
        meshes: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            meshes.setdefault(mesh, []).append(parameter)
        for members in meshes.values() or [[]]:
            parted.append({**group, "params": members})
            origin.append(index)
    if len(parted) > len(optimizer.param_groups):
        optimizer.param_groups[:] = parted
    return origin
