"""The mean gradient at a model over some batches, without an optimizer step, for devices to use.

One-way gradient transfer of Mixed FL (Augenstein et al. 2022): each device adds it to the gradient
of each of its own steps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase

from isthmus_datacenter.checkpointing.model_file import load_shards, store_shards
from isthmus_datacenter.messages import Command, ControlSignal, ReadSignal
from isthmus_datacenter.parallel.model_shard import ModelShard, local
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer
from isthmus_datacenter.training.consensus import (
    ConsensusError,
    StoppedError,
)
from isthmus_datacenter.training.engine import Engine
from isthmus_datacenter.training.forward_backward import ForwardBackward


def mean_gradient(engine: Engine, command: Command, read_signal: ReadSignal) -> dict[str, object]:
    """Write the mean gradient at a model, over the batches of some steps, into a file.

    The parameters are overwritten; the engine restores the state of training from its checkpoint
    when it is needed again. All ranks call this together.

    Raises:
        ConsensusError: a loss is not finite, the gradient is not wanted any more, or the job
            protects its examples.
        TaskError: the task raised on this rank, maybe on this one only.
    """
    assert command.model is not None
    assert command.result is not None
    if engine.private:
        what = "running statistics" if command.statistics else "a mean gradient"
        raise ConsensusError(
            f"the job protects the datacenter's examples (datacenter.privacy), and {what} would "
            "get no noise; use a policy that does not ask for it"
        )
    # Before the parameters are touched: after a failure in between, the engine restores its
    # checkpoint.
    engine.invalidate_state()
    load_shards(Path(command.model), engine.layout, engine.shard)
    averager = GradientAverager(engine.shard, engine.job.datacenter.precision == "fp16")
    engine.seed_generators(command.from_step)
    engine.go_to_step(command.from_step, trains=False)
    batches = engine.batch_source.batches(command.from_step, command.until_step)
    with _recomputing(engine.shard) if command.statistics else contextlib.nullcontext():
        # The task's optimizers say whose parameters each loss is for; none of them steps.
        loss = accumulate(averager, engine.forward_backward, batches, read_signal, engine.optimizer)
    averager.store_in_parameters()
    if command.statistics:
        engine.shard.average_statistics(engine.layout.statistics)
    else:
        for name in engine.layout.statistics:
            # The file has the form of a model; in the place of statistics a gradient has nothing.
            engine.shard.buffers()[name].zero_()
    store_shards(Path(command.result), engine.layout, engine.shard)
    steps = command.until_step - command.from_step
    return {
        "steps": steps,
        "examples": steps * engine.order.replicas * engine.order.batch_size,
        "training": {"loss": loss},
    }


@contextlib.contextmanager
def _recomputing(shard: ModelShard) -> Iterator[None]:
    """Have running statistics become the plain means over the batches of the block.

    As `torch.optim.swa_utils.update_bn` does (Izmailov et al. 2018).
    """
    modules = [module for stage in shard.stages.values() for module in stage.modules()]
    layers = [module for module in modules if isinstance(module, _NormBase)]
    before = [layer.momentum for layer in layers]
    for layer in layers:
        if layer.training:  # others are frozen
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative mean
    try:
        yield
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum


class GradientAverager(ShardedOptimizer):
    """Averages the gradients of several batches where a `ShardedOptimizer` would apply them."""

    def __init__(self, shard: ModelShard, fp16: bool) -> None:
        # Without a limit on the norm: devices get the gradient as it is. The optimizer is never
        # stepped.
        super().__init__(shard, torch.optim.SGD, None, fp16)
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: Counter[str | None] = Counter()
        """Batches by the name of the optimizer whose loss it was."""

    def apply(self, gradients: Mapping[str, torch.Tensor], only: str | None = None) -> None:
        """Add gradients to the sums."""
        self._counts[only] += 1
        for name, gradient in gradients.items():
            part = local(gradient)
            if name in self._sums:
                self._sums[name].add_(part)
            else:
                self._sums[name] = part.clone()

    @torch.no_grad()
    def store_in_parameters(self) -> None:
        """Overwrite the parameters by the mean gradient, zero where there was no gradient."""
        for name, parameter in self.shard.parameters().items():
            if not parameter.requires_grad:
                continue
            values = local(parameter)
            if name in self._sums:
                values.copy_(self._sums[name].div_(max(self._counts.values())))
            else:
                values.zero_()


def accumulate(
    averager: GradientAverager,
    forward_backward: ForwardBackward,
    batches: Iterable[Any],
    read_signal: ReadSignal,
    optimizer: ShardedOptimizer,
) -> float:
    """Add the gradients of all batches to the average; return the mean loss over all units.

    With several optimizers in `optimizer`, the gradient of each one's parameters is that of its own
    loss.

    Raises:
        ConsensusError: the loss is not finite, or the gradient is not wanted any more.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=forward_backward.device)
    units = 0.0
    averager.zero_grad()
    for batch, name in itertools.product(batches, optimizer.names):
        with optimizer.alone(name):
            result = forward_backward.run(batch, averager.loss_scale, read_signal, optimizer=name)
        if result.signal is ControlSignal.CANCEL:
            raise StoppedError("stopped because the gradient is not wanted")
        averager.step(result.gradient_factor, name)
        loss_sum += result.loss_sum
        units += result.global_units
    summed = (loss_sum * forward_backward.counts_losses).cpu()
    if forward_backward.dims.ranks > 1:
        dist.all_reduce(summed)
    loss = float(summed) / (units or 1)
    if not math.isfinite(loss):
        raise ConsensusError(
            f"the loss is not finite ({loss}) at the round's model; lower the learning rates or "
            "check the data"
        )
    return loss
