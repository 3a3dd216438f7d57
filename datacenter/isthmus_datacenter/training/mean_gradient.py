"""The mean gradient at a model over some batches, without a step: what devices take along.

One-way gradient transfer of Mixed FL (Augenstein et al. 2022): each device adds it to the gradient
of each of its own steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isthmus_datacenter.checkpointing.model_file import load_shards, store_shards
from isthmus_datacenter.parallel.model_shard import ModelShard, local
from isthmus_datacenter.service.messages import Command, ControlSignal, ReadSignal
from isthmus_datacenter.training.agreement import AgreedError, StoppedError
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.optimizer import Updater
from isthmus_datacenter.training.rng import seed_all

if TYPE_CHECKING:
    from isthmus_datacenter.training.engine import Engine


def mean_gradient(engine: Engine, command: Command, read_signal: ReadSignal) -> dict[str, object]:
    """Write the mean gradient at a model, over the batches of some steps, into a file.

    The parameters are used for it; the state of training is read from its checkpoint when it is
    needed again. All ranks call this together.

    Raises:
        AgreedError: a loss is not finite, or the gradient is not wanted any more.
        TaskError: the task raised on this rank, maybe on this one only.
    """
    assert command.model is not None
    assert command.result is not None
    engine.at = None
    load_shards(Path(command.model), engine.layout, engine.share)
    mean = GradientMean(engine.share, engine.job.datacenter.precision == "fp16")
    place = engine.here.data + engine.ranks.data * engine.here.pipeline
    seed_all(engine.job.seed, command.from_step, place)
    stream = engine.feed.batches(command.from_step, command.until_step)
    loss = accumulate(mean, engine.passes, stream, read_signal)
    mean.into_parameters()
    store_shards(Path(command.result), engine.layout, engine.share)
    steps = command.until_step - command.from_step
    return {
        "steps": steps,
        "examples": steps * engine.order.ranks * engine.order.batch_size,
        "training": {"loss": loss},
    }


class GradientMean(Updater):
    """Takes an updater's place where the gradient is wanted and no step: it averages them."""

    def __init__(self, share: ModelShard, fp16: bool) -> None:
        super().__init__(share, torch.optim.SGD, None, fp16)
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0

    def _use(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self._count += 1
        for name, gradient in gradients.items():
            part = local(gradient)
            if name in self._sums:
                self._sums[name].add_(part)
            else:
                self._sums[name] = part.clone()

    @torch.no_grad()
    def into_parameters(self) -> None:
        """Have the mean in the place of the parameters, zero where there was no gradient."""
        for name, parameter in self.share.parameters().items():
            if not parameter.requires_grad:
                continue
            shard = local(parameter)
            if name in self._sums:
                shard.copy_(self._sums[name].div_(self._count))
            else:
                shard.zero_()


def accumulate(
    mean: GradientMean,
    passes: ForwardBackward,
    stream: Iterable[tuple[Any, Any]],
    read_signal: ReadSignal,
) -> float:
    """Take the gradients of all batches into the mean; the mean loss over all units.

    Raises:
        AgreedError: the loss is not finite, or the gradient is not wanted any more.
    """
    total = torch.zeros((), dtype=torch.float64, device=passes.device)
    units = 0
    mean.optimizer.zero_grad(set_to_none=True)
    for inputs, target in stream:
        done = passes.run(inputs, target, mean.scale, read_signal)
        if done.signal is ControlSignal.CANCEL:
            raise StoppedError("stopped because the gradient is not wanted")
        mean.step(done.factor)
        total += done.summed
        units += done.everyones
    summed = (total * passes.scores).cpu()
    if passes.layout.ranks > 1:
        dist.all_reduce(summed)
    loss = float(summed) / max(units, 1)
    if not math.isfinite(loss):
        raise AgreedError(
            f"the loss is not finite ({loss}) at the round's model; lower the learning rates or "
            "check the data"
        )
    return loss
