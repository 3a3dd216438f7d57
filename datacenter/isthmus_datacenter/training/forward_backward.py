"""Forward and backward pass of one batch on one rank: whole, accumulated, or through a pipeline.

Shape legend: one *unit* is what the task scores (an example, a token); a step's loss is the
mean over the units of all replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map

from isthmus.errors import TaskError
from isthmus.task import Task, user_code
from isthmus.task.scoring import losses, losses_of
from isthmus_datacenter.messages import ControlSignal, ReadSignal
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.pipeline import Pipeline
from isthmus_datacenter.training.consensus import start_units_all_reduce
from isthmus_datacenter.training.profile import FORWARD_AND_BACKWARD, count_flops


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Losses and units of one batch; its gradients are in the parameters' `grad`."""

    loss_sum: torch.Tensor
    """Sum of the losses of this rank's units, a scalar; zero on ranks without the output."""
    local_units: int
    """Units in `loss_sum`."""
    global_units: int
    """Units of all replicas."""
    signal: ControlSignal
    """The strongest signal of all ranks."""
    gradient_factor: float
    """Multiply the gradients by this to get those of the mean loss."""


class ForwardBackward:
    """Computes the gradients of one batch at a time."""

    def __init__(
        self, task: Task, shard: ModelShard, rank: int, device: torch.device, batch_size: int
    ) -> None:
        """`batch_size` is the number of examples of one replica in a step."""
        self.task = task
        self.shard = shard
        self.dims = shard.dims
        self.device = device
        self.batch_size = batch_size
        self.counts_losses = self.dims.counts_losses(rank)
        """Whether this rank contributes its replica's losses."""
        self.pipeline = None if self.dims.pipeline == 1 else Pipeline(shard, device)
        self.model = shard.stages[0] if self.pipeline is None else self.pipeline.chain
        """Runs a batch forward, without training."""
        self.has_output = self.dims.stages - 1 in shard.stages
        """Whether `model` returns an output on this rank."""

    def run(
        self, inputs: Any, target: Any, loss_scale: float, read_signal: ReadSignal
    ) -> StepResult:
        """Run one batch forward and backward.

        The number of units of all replicas is known only after the forward pass, and waiting for it
        would delay the backward pass. Until then the losses are divided by a replica's number of
        examples instead, which is the same on all ranks and in every repetition; the result has
        the factor that corrects it. In fp16, whose range is small, a batch that is not accumulated
        does wait.

        Args:
            inputs: batch of the task's inputs.
            target: batch of its targets.
            loss_scale: factor of the losses, for fp16; the caller divides the gradients by it.
            read_signal: called once, when this rank's units are known.

        Raises:
            TaskError: the task's code failed, or the batch cannot be split.
        """
        parts = self.dims.accumulate
        if parts > 1 or self.pipeline is not None:
            _check_splittable(target)
        loss_sum = torch.zeros((), device=self.device)
        local_units, divisor = 0, float(self.batch_size)
        # fully_shard averages gradients over the replicas. This is undone and the sum over all
        # units is divided by their number, because replicas may have different numbers of units.
        averaged_over = 1 if self.shard.all_reduce is not None else self.dims.data

        def add_losses(values: torch.Tensor) -> torch.Tensor:
            nonlocal loss_sum, local_units
            total = values.sum()
            loss_sum = loss_sum + total.detach()
            local_units += values.numel()
            return total

        def scaled_loss(values: torch.Tensor) -> torch.Tensor:
            return add_losses(values) * (loss_scale / self.batch_size)

        def start_all_reduce() -> Callable[[], tuple[int, ControlSignal]]:
            units = local_units if self.counts_losses else 0
            return start_units_all_reduce(units, read_signal(), self.dims.ranks)

        for index in range(parts):
            part_inputs = _part_of_batch(inputs, index, parts)
            part_target = _part_of_batch(target, index, parts)
            self._set_gradient_sync(index == parts - 1)
            if self.pipeline is not None:
                loss = functools.partial(self._microbatch_loss, part_target, scaled_loss)
                self.pipeline.run(part_inputs, loss)
                continue
            total = add_losses(losses(self.task, self.model, part_inputs, part_target)[1])
            if index == parts - 1:
                wait = start_all_reduce()  # overlaps with the backward pass
                if parts == 1 and (self.dims.ranks == 1 or self.dims.precision == "fp16"):
                    divisor = max(wait()[0], 1) / averaged_over
            if not total.requires_grad:
                raise TaskError(
                    "loss() does not depend on what is trained; is something detached, or in NumPy?"
                )
            with user_code("the backward pass"):
                torch.autograd.backward(total * (loss_scale / divisor))
        if self.pipeline is not None:
            wait = start_all_reduce()
            self.pipeline.sync_tied()
        global_units, signal = wait()
        factor = divisor * averaged_over / max(global_units, 1)
        return StepResult(loss_sum, local_units, global_units, signal, factor)

    def step_flops(self, inputs: Any, samples: float) -> float:
        """Count the operations of one step on this rank; 0 if they are unknown or not needed.

        Args:
            inputs: a replica's batch.
            samples: size of the batch as a multiple of the sample whose operations were counted.
        """
        if self.shard.sample_flops:
            # Each rank has its part of what the whole model computes for its replica's batch.
            whole = FORWARD_AND_BACKWARD * self.shard.sample_flops * samples
            return whole / (self.dims.tensor * self.dims.pipeline)
        if self.device.type != "cuda":
            return 0
        flops = count_flops(self.model, lambda: self.task.forward(self.model, inputs))
        self.shard.reshard()
        return flops

    def _microbatch_loss(
        self,
        target: Any,
        scaled_loss: Callable[[torch.Tensor], torch.Tensor],
        output: Any,
        number: int,
    ) -> torch.Tensor:
        """Loss of one micro-batch of a pipeline, as a scalar."""
        part = _part_of_batch(target, number, self.dims.microbatches)
        return scaled_loss(losses_of(self.task, output, part))

    def _set_gradient_sync(self, last: bool) -> None:
        """Accumulate unsharded gradients in stages 0 and 1, and reduce them with the last part."""
        if self.dims.zero_stage > 1 or self.dims.accumulate == 1 or self.pipeline is not None:
            return
        for stage in self.shard.stages.values():
            if isinstance(stage, FSDPModule):
                stage.set_is_last_backward(last)
                stage.set_requires_gradient_sync(last)
                stage.set_reshard_after_backward(last)


def _check_splittable(batch: Any) -> None:
    sizes = {len(each) for each in tree_leaves(batch) if isinstance(each, torch.Tensor)}
    if len(sizes) != 1:
        raise TaskError(
            "to accumulate gradients or to use a pipeline, every tensor of a batch's targets must "
            "have one row per example"
        )


def _part_of_batch(batch: Any, index: int, parts: int) -> Any:
    """One of `parts` equal groups of rows of every tensor of a batch."""

    def rows_of_part(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or parts == 1:
            return each
        if each.ndim == 0 or each.shape[0] % parts:
            raise TaskError(
                f"a batch with a tensor of shape {tuple(each.shape)} cannot be split into {parts} "
                "equal parts along its first dimension"
            )
        rows = each.shape[0] // parts
        return each[index * rows : (index + 1) * rows]

    with user_code("splitting a batch"):
        return tree_map(rows_of_part, batch)
