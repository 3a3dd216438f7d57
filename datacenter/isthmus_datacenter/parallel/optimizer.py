"""The task's optimizer on one rank's shard: clipping by the global norm, fp16 loss scaling, state.

A task builds its optimizer from a list of parameters and knows nothing of meshes. Here its
parameter groups are split by mesh, because PyTorch's fused and foreach kernels take one mesh at a
time; checkpoints keep the groups as the task made them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from isthmus.errors import TaskError
from isthmus.task import user_code
from isthmus.task.definition import Parameters
from isthmus.task.optimizers import MakeSchedule, ScheduleState, TaskOptimizers
from isthmus_datacenter.parallel.kept_moments import KeptMoments
from isthmus_datacenter.parallel.model_shard import ModelShard, local
from isthmus_datacenter.parallel.optimizer_check import (
    ELEMENTWISE,
    check_on_shards,
    check_on_stages,
    refuse_on_shards,
)
from isthmus_datacenter.parallel.parallel_dims import ParallelDims

INITIAL_LOSS_SCALE = 65536.0
_GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale is doubled, as `torch.amp.GradScaler` does."""

OptimizerFactory = Callable[[Parameters], Any]


class ShardedOptimizer:
    """Applies gradients to a model shard by the task's optimizer."""

    def __init__(
        self,
        shard: ModelShard,
        factory: OptimizerFactory,
        clip_norm: float | None,
        fp16: bool,
        job_schedule: MakeSchedule | None = None,
        earlier: Mapping[str, ScheduleState] | None = None,
        *,
        rounded_moments: bool = False,
        moments_on_host: bool = False,
    ) -> None:
        """Build the task's optimizer.

        Args:
            shard: its trainable parameters are given to the factory.
            factory: the task's `optimizer()`.
            clip_norm: maximum 2-norm of the whole gradient.
            fp16: whether gradients are in fp16, so that losses must be scaled.
            job_schedule: the job's schedule of the learning rate; None if it has none.
            earlier: `schedules` of the optimizer before; saves time.
            rounded_moments: keep the optimizer's moments in bfloat16 between steps.
            moments_on_host: keep them in the host's memory between steps.

        Raises:
            TaskError: the factory raised, or returned something else, or what cannot be kept so.
        """
        self.shard = shard
        self._factory = factory
        self.clip_norm = clip_norm
        named = [each for each in shard.parameters().items() if each[1].requires_grad]
        # A stage whose parameters are all frozen still needs an optimizer.
        parameters = Parameters(named or [("", nn.Parameter(torch.zeros(1)))])
        with user_code("optimizer()"):
            made = factory(parameters)
        self._optimizers = TaskOptimizers(made, parameters, job_schedule, earlier)
        self._task_groups: dict[str, list[int]] = {}
        """For each parameter group of an optimizer, the index of the task's group it is part of."""
        for name, inner in self._optimizers.named.items():
            closure = inspect.signature(inner.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise TaskError(
                    f"optimizer() returned {type(inner).__name__}, whose step() computes losses "
                    "itself (it wants a closure); choose another"
                )
            # After the task has made its groups, so that its options stay with the parameters.
            self._task_groups[name] = _split_groups_by_mesh(inner)
            self._optimizers.groups_split(name, self._task_groups[name])
        self._kept_moments: KeptMoments | None = None
        if rounded_moments or moments_on_host:
            ids = {id(each): name for name, each in parameters.named.items()}
            self._kept_moments = KeptMoments(ids, rounded=rounded_moments, on_host=moments_on_host)
            for inner in self._optimizers.named.values():
                self._kept_moments.check(inner)
                # Adagrad has some before its first step. Rounded at once, they are what they are
                # after a restart, also of parameters that have had no gradient yet.
                self._kept_moments.keep_all(inner)
        self.loss_scale = INITIAL_LOSS_SCALE if fp16 else 1.0
        """Factor of the loss; above 1 only where gradients are fp16."""
        self._fp16 = fp16
        self._steps_without_overflow = 0

    def check(self) -> None:
        """Refuse an optimizer that computes something else from a rank's part than from the model.

        All ranks call this together. A rank that fails may leave the others waiting: it must end.

        Raises:
            TaskError: it does.
        """
        check_on_stages(self.shard, self.inner, self._factory)
        check_on_shards(self.shard, self.inner, self._factory, _split_groups_by_mesh)

    def check_for(self, dims: ParallelDims) -> None:
        """Refuse optimizers of PyTorch that are known not to work in another layout.

        Raises:
            TaskError: there is one.
        """
        sharded = dims.tensor > 1 or (dims.zero_stage > 0 and dims.data > 1)
        for each in self._optimizers.named.values():
            known = getattr(torch.optim, type(each).__name__, None) is type(each)
            if sharded and known and type(each) not in ELEMENTWISE:
                raise refuse_on_shards([each], "does not work on shards of the parameters")

    @property
    def schedules(self) -> Mapping[str, ScheduleState]:
        """The state of the schedules, for an optimizer that is made later."""
        return self._optimizers.schedules

    @property
    def scheduled_rate(self) -> float | None:
        """The learning rate of the first group; None without a schedule."""
        return self._optimizers.scheduled_rate

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the first group of parameters now; None if it has none."""
        first = next(iter(self._optimizers.named.values()))
        rate = first.param_groups[0].get("lr")
        return None if rate is None else float(rate)

    def go_to(self, position: int) -> None:
        """Set the rates of a position of the run.

        Raises:
            TaskError: the task's LRScheduler raised.
        """
        self._optimizers.go_to(position)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The optimizer's parameters in its own order, with their names in the model."""
        names = {id(parameter): name for name, parameter in self.shard.parameters().items()}
        return [
            (names[id(parameter)], parameter)
            for inner in self._optimizers.named.values()
            for group in inner.param_groups
            for parameter in group["params"]
            if id(parameter) in names
        ]

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The task's optimizers."""
        return list(self._optimizers.named.values())

    @property
    def names(self) -> list[str]:
        """The names of the optimizers; a single one has the empty name."""
        return list(self._optimizers.named)

    def alone(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Within it only the parameters of one optimizer require gradients."""
        return self._optimizers.alone(name)

    def zero_grad(self) -> None:
        """Delete all gradients."""
        self._optimizers.zero_grad()
        self.shard.forget_gradients()

    def state_of(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        """What the optimizers keep of a parameter."""
        states = (inner.state for inner in self._optimizers.named.values())
        return next((state[parameter] for state in states if parameter in state), {})

    def step(
        self, factor: float, only: str | None = None, *, measures_norm: bool = False
    ) -> torch.Tensor | None:
        """Multiply all gradients by `factor`, clip them, apply them, and delete them.

        Args:
            factor: gives the gradients of the mean loss.
            only: the name of the one optimizer to step; None for all.
            measures_norm: whether the norm is wanted, also where nothing is clipped.

        Returns:
            The 2-norm of the whole gradient before it is clipped, a scalar; None if not measured.
        """
        gradients = self.shard.gradients()
        # In this order: the sum over replicas is of the gradients as they are, and after the
        # reduction over tensor-parallel ranks all copies of a parameter have the same bits.
        self.shard.sum_over_replicas(gradients)
        self.shard.reduce_replicated(gradients)
        if self._fp16:
            factor /= self.loss_scale
        clipped_factor: float | torch.Tensor = factor
        finite = True
        norm: torch.Tensor | None = None
        if self.clip_norm is not None or self._fp16 or measures_norm:
            # The norm of the gradients of the mean loss, which is what the limit is about; also one
            # pass fewer over them than scaling first.
            norm = self.global_norm(gradients) * factor
            if self._fp16:
                finite = bool(torch.isfinite(norm))
            if self.clip_norm is not None:
                clipped_factor = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        # With an overflow, the step is left out on all ranks: the norm is the same on all.
        if finite:
            if gradients and (isinstance(clipped_factor, torch.Tensor) or clipped_factor != 1.0):
                torch._foreach_mul_([local(each) for each in gradients.values()], clipped_factor)
            self.apply(gradients, only)
        self._update_loss_scale(finite)
        self.zero_grad()
        return norm

    def apply(self, gradients: Mapping[str, torch.Tensor], only: str | None = None) -> None:
        """Use the scaled and clipped gradients, which are also in the parameters' `grad`."""
        kept = self._kept_moments
        self._optimizers.step(None if kept is None else kept.step, only)

    # -- state ----------------------------------------------------------------------------------

    def group_options(self) -> list[dict[str, Any]]:
        """The options of the parameter groups as the task made them."""
        listed: list[dict[str, Any]] = []
        for name, inner in self._optimizers.named.items():
            options: dict[int, dict[str, Any]] = {}
            for index, group in zip(self._task_groups[name], inner.param_groups, strict=True):
                options[index] = {key: value for key, value in group.items() if key != "params"}
            listed += [options[index] for index in sorted(options)]
        return listed

    def scaler_state(self) -> dict[str, float]:
        """The state of the fp16 loss scale."""
        return {"scale": self.loss_scale, "steps": self._steps_without_overflow}

    def load_state(
        self,
        group_options: list[dict[str, Any]],
        state: Mapping[str, dict[str, Any]],
        scaler_state: Mapping[str, float] | None,
    ) -> None:
        """Restore what `group_options`, the inner optimizer's state and `scaler_state` were.

        `state` is by parameter name. It goes through `load_state_dict`, which moves tensors to the
        right devices.
        """
        first = 0
        for optimizer, inner in self._optimizers.named.items():
            groups = self._task_groups[optimizer]
            # Its structure is kept and its values are replaced: PyTorch checks the groups against
            # it.
            state_dict = inner.state_dict()
            for index, group in zip(groups, state_dict["param_groups"], strict=True):
                group.update(group_options[first + index])
            first += max(groups) + 1
            order = [id(each) for group in inner.param_groups for each in group["params"]]
            by_index = {
                order.index(id(parameter)): state[name]
                for name, parameter in self.named_parameters()
                if name in state and id(parameter) in order
            }
            inner.load_state_dict({"state": by_index, "param_groups": state_dict["param_groups"]})
            if self._kept_moments is not None:
                self._kept_moments.keep_all(inner)
        # The restored options have the rates of then; the schedules set those of now.
        self._optimizers.restored()
        if self._fp16 and scaler_state is not None:
            self.loss_scale = float(scaler_state["scale"])
            self._steps_without_overflow = int(scaler_state["steps"])

    # -- norm and scale -------------------------------------------------------------------------

    def global_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The 2-norm of the whole gradient, over all ranks: each element counted once."""
        dims = self.shard.dims
        squares = [torch.zeros((), dtype=torch.float32, device=self._device())]
        for name, gradient in gradients.items():
            parts = 1
            if isinstance(gradient, DTensor):
                for size, placement in zip(
                    gradient.device_mesh.shape, gradient.placements, strict=True
                ):
                    parts *= 1 if placement.is_replicate() else size
            stage_count = self.shard.tied.stage_counts.get(name, 1)
            # The sum over all ranks counts an element once for each rank that has it.
            copies = dims.data * dims.tensor * stage_count / parts
            squares.append(local(gradient).float().square().sum() / copies)
        total = torch.stack(squares).sum()
        if dims.ranks > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def _device(self) -> torch.device:
        parameters = (parameter for _, parameter in self.named_parameters())
        return next((local(each).device for each in parameters), torch.device("cpu"))

    def _update_loss_scale(self, finite: bool) -> None:
        if not self._fp16:
            return
        self._steps_without_overflow = self._steps_without_overflow + 1 if finite else 0
        if not finite:
            self.loss_scale = max(self.loss_scale / 2, 1.0)
        elif self._steps_without_overflow == _GROWTH_INTERVAL:
            self.loss_scale *= 2
            self._steps_without_overflow = 0


def _split_groups_by_mesh(optimizer: torch.optim.Optimizer) -> list[int]:
    """Split each parameter group so that all its parameters are on one mesh.

    Returns:
        For each new group, the index of the group it is a part of.
    """
    groups: list[dict[str, Any]] = []
    indices: list[int] = []
    # An empty group stays: each of the task's groups has options, which checkpoints keep.
    for index, group in enumerate(optimizer.param_groups):
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
        for members in by_mesh.values() or [[]]:
            groups.append({**group, "params": members})
            indices.append(index)
    if len(groups) > len(optimizer.param_groups):
        optimizer.param_groups[:] = groups
    return indices
