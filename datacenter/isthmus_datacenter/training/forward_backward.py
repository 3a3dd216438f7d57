"""Forward and backward pass of one batch on one rank: whole, accumulated, or through a pipeline.

Shape legend: one *unit* is what the task scores (an example, a token); a step's loss is the
mean over the units of all replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from isthmus.errors import TaskError
from isthmus.task import Task, user_code
from isthmus.task.definition import defines
from isthmus.task.scoring import Averages, UnitValues, losses, losses_of, map_tensors, pair_of
from isthmus.task.scoring.inputs import tensors_of
from isthmus.task.scoring.steps import training_step
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
    local_units: float
    """Units in `loss_sum`, or their weight."""
    global_units: float
    """Units of all replicas."""
    signal: ControlSignal
    """The strongest signal of all ranks."""
    gradient_factor: float
    """Multiply the gradients by this to get those of the mean loss."""


class ForwardBackward:
    """Computes the gradients of one batch at a time."""

    def __init__(
        self,
        task: Task,
        shard: ModelShard,
        rank: int,
        device: torch.device,
        batch_size: int,
        *,
        waits_for_masks: bool = False,
    ) -> None:
        """Compute gradients on one rank.

        Args:
            task: has the loss.
            shard: this rank's part of the model.
            rank: this rank.
            device: where the shard is.
            batch_size: number of examples of one replica in a step.
            waits_for_masks: whether the sum of a batch's mask is read before the backward pass, so
                that the loss is divided by it, and not the gradients later. On a GPU, reading it
                would wait for the forward pass.
        """
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
        self._by_step = defines(task, "training_step")
        self._waits_for_masks = waits_for_masks
        self._masked: bool | None = None
        """Whether losses have masks; None before the first."""

    def run(
        self,
        batch: Any,
        loss_scale: float,
        read_signal: ReadSignal,
        averages: Averages | None = None,
        optimizer: str = "",
    ) -> StepResult:
        """Run one batch forward and backward.

        The number of units of all replicas is known only after the forward pass, and waiting for it
        would delay the backward pass. Until then the losses are divided by a replica's number of
        examples instead, which is the same on all ranks and in every repetition; the result has
        the factor that corrects it. In fp16, whose range is small, a batch that is not accumulated
        does wait.

        Args:
            batch: what the loader gave.
            loss_scale: factor of the losses, for fp16; the caller divides the gradients by it.
            read_signal: called once, when this rank's units are known.
            averages: the named parts of `training_step` are added to it.
            optimizer: name of the one that is about to step; empty if there is one only.

        Raises:
            TaskError: the task's code failed, or the batch cannot be split.
        """
        parts = self.dims.accumulate
        inputs, target = (None, None) if self._by_step else pair_of(self.task, batch)
        if parts > 1 or self.pipeline is not None:
            _check_splittable(batch if self._by_step else target)
        loss_sum = torch.zeros((), device=self.device)
        divisor = float(self.batch_size)
        counts: list[float | torch.Tensor] = []
        # fully_shard averages gradients over the replicas. This is undone and the sum over all
        # units is divided by their number, because replicas may have different numbers of units.
        averaged_over = 1 if self.shard.all_reduce is not None else self.dims.data

        def add(total: torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
            nonlocal loss_sum
            loss_sum = loss_sum + total.detach()
            counts.append(count)
            return total

        def scaled_loss(values: UnitValues) -> torch.Tensor:
            return add(values.total(), values.count()) * (loss_scale / self.batch_size)

        def start_all_reduce(units: float) -> Callable[[], tuple[float, ControlSignal]]:
            own = units if self.counts_losses else 0
            return start_units_all_reduce(own, read_signal(), self.dims.ranks)

        for index in range(parts):
            part_inputs = _part_of_batch(inputs, index, parts)
            part_target = _part_of_batch(target, index, parts)
            self.set_gradient_sync(index == parts - 1)
            if self.pipeline is not None:
                loss = functools.partial(self.microbatch_loss, part_target, scaled_loss)
                self.pipeline.run(part_inputs, loss)
                continue
            if self._by_step:
                part = _part_of_batch(batch, index, parts)
                total = add(*self._step_loss(part, averages, optimizer))
            else:
                _, values = losses(self.task, self.model, part_inputs, part_target)
                total = add(values.total(), values.count())
            if index == parts - 1:
                units = _HostSum(counts, self.device)
                self._check_masked(units.on_device)
                is_late = units.on_device and not self._waits_for_masks
            if index == parts - 1 and not is_late:
                wait = start_all_reduce(units.read())  # overlaps with the backward pass
                if parts == 1 and (self.dims.ranks == 1 or self.dims.precision == "fp16"):
                    divisor = (wait()[0] or 1) / averaged_over
            # PyTorch's own error names neither the task nor the method.
            if not total.requires_grad:
                method = "training_step()" if self._by_step else "loss()"
                raise TaskError(
                    f"{method} does not depend on what is trained; is something detached, or in "
                    "NumPy?"
                )
            with user_code("the backward pass"):
                torch.autograd.backward(total * (loss_scale / divisor))
        if self.pipeline is not None:
            units = _HostSum(counts, self.device)
            wait = start_all_reduce(units.read())
            self.pipeline.sync_tied()
        elif is_late:
            # The sum of a mask has arrived here when the forward pass is done; by now the backward
            # pass is in the device's queue.
            wait = start_all_reduce(units.read())
        global_units, signal = wait()
        factor = divisor * averaged_over / (global_units or 1)
        return StepResult(loss_sum, units.read(), global_units, signal, factor)

    def _step_loss(
        self, batch: Any, averages: Averages | None, optimizer: str
    ) -> tuple[torch.Tensor, float]:
        """The loss of a batch as a whole, times its weight, and the weight."""
        step = training_step(self.task, self.model, batch, optimizer)
        assert step.weight is not None
        if averages is not None:
            averages.add_step(step, optimizer)
        return step.loss * step.weight, step.weight

    def _check_masked(self, masked: bool) -> None:
        """Refuse a loss that has a mask at times, for which ranks would wait at different points.

        Raises:
            TaskError: it changed.
        """
        if self._masked not in (None, masked):
            raise TaskError("loss() returns a mask for some batches only; return one for all")
        self._masked = masked

    def step_flops(self, batch: Any, samples: float) -> float:
        """Count the operations of one step on this rank; 0 if they are unknown or not needed.

        Args:
            batch: of a replica.
            samples: size of the batch as a multiple of the sample whose operations were counted.
        """
        if self.shard.sample_flops:
            # Each rank has its part of what the whole model computes for its replica's batch.
            whole = FORWARD_AND_BACKWARD * self.shard.sample_flops * samples
            return whole / (self.dims.tensor * self.dims.pipeline)
        if self.device.type != "cuda" or self._by_step:
            return 0
        inputs, _ = pair_of(self.task, batch)
        flops = count_flops(self.model, lambda: self.task.forward(self.model, inputs))
        self.shard.reshard()
        return flops

    def microbatch_loss(
        self,
        target: Any,
        scaled_loss: Callable[[UnitValues], torch.Tensor],
        output: Any,
        number: int,
    ) -> torch.Tensor:
        """Loss of one micro-batch of a pipeline, as a scalar."""
        part = _part_of_batch(target, number, self.dims.microbatches)
        return scaled_loss(losses_of(self.task, output, part))

    def set_gradient_sync(self, last: bool) -> None:
        """Accumulate unsharded gradients in stages 0 and 1, and reduce them with the last part."""
        if self.dims.zero_stage > 1 or self.dims.accumulate == 1 or self.pipeline is not None:
            return
        for stage in self.shard.stages.values():
            if isinstance(stage, FSDPModule):
                stage.set_is_last_backward(last)
                stage.set_requires_gradient_sync(last)
                stage.set_reshard_after_backward(last)


def _check_splittable(batch: Any) -> None:
    sizes = {len(each) if each.ndim else 0 for each in tensors_of(batch)}
    if len(sizes) != 1:
        raise TaskError(
            "to accumulate gradients or to use a pipeline, every tensor of a batch's targets must "
            "have one row per example"
        )


class _HostSum:
    """A sum of numbers, some of which may be scalars on a device, to be read without delay."""

    def __init__(self, counts: Sequence[float | torch.Tensor], device: torch.device) -> None:
        tensors = [each for each in counts if isinstance(each, torch.Tensor)]
        self.on_device = bool(tensors)
        """Whether there are scalars on a device, so that `read` may wait for it."""
        self._sum: float | torch.Tensor = sum(counts)
        self._copied: torch.Event | None = None
        if tensors and device.type == "cuda":
            pinned = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._sum = pinned.copy_(torch.as_tensor(self._sum), non_blocking=True)
            self._copied = torch.Event("cuda")
            self._copied.record()

    def read(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return self._sum if isinstance(self._sum, int) else float(self._sum)


def _part_of_batch(batch: Any, index: int, parts: int) -> Any:
    """One of `parts` equal groups of rows of every tensor of a batch."""
    if parts == 1:
        return batch

    def rows_of_part(each: torch.Tensor) -> torch.Tensor:
        if each.ndim == 0 or each.shape[0] % parts:
            raise TaskError(
                f"a batch with a tensor of shape {tuple(each.shape)} cannot be split into {parts} "
                "equal parts along its first dimension"
            )
        rows = each.shape[0] // parts
        return each[index * rows : (index + 1) * rows]

    with user_code("splitting a batch"):
        return map_tensors(rows_of_part, batch)
