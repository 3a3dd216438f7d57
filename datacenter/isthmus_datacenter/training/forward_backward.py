"""Forward and backward of one batch on one rank, whole, in pieces, or through a pipeline.

Shape legend: one *unit* is whatever the task scores (an example, a token); a step's loss is the
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
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.pipeline import Pipeline
from isthmus_datacenter.service.messages import ControlSignal, ReadSignal
from isthmus_datacenter.training.agreement import ask_for_units
from isthmus_datacenter.training.profile import FORWARD_AND_BACKWARD, count_flops


@dataclasses.dataclass(frozen=True)
class Done:
    """What became of one batch; its gradients are where gradients are."""

    summed: torch.Tensor
    """The sum of the losses of this rank's units, a scalar; zero where nothing is scored."""
    mine: int
    """Units in it."""
    everyones: int
    """Units of all replicas."""
    signal: ControlSignal
    """The strongest of all ranks."""
    factor: float
    """What the gradients must be multiplied by to be those of the mean loss."""


class ForwardBackward:
    """Makes gradients."""

    def __init__(
        self, task: Task, share: ModelShard, rank: int, device: torch.device, batch_size: int
    ) -> None:
        """`batch_size` is a replica's, in examples."""
        self.task = task
        self.share = share
        self.layout = share.layout
        self.device = device
        self.batch_size = batch_size
        self.scores = self.layout.scores(rank)
        """Whether the losses that this rank sees count."""
        self.pipeline = None if self.layout.pipeline == 1 else Pipeline(share, device)
        self.model = share.stages[0] if self.pipeline is None else self.pipeline.chain
        """What runs a batch without training on it."""
        self.has_output = self.layout.stages - 1 in share.stages
        """Whether it gives an output here."""

    def run(self, inputs: Any, target: Any, scale: float, read_signal: ReadSignal) -> Done:
        """One batch.

        The number of all units is known only afterwards, or would have to be waited for: until then
        that of a replica's examples stands for it, which is the same on all ranks and in every
        repetition. In fp16, whose range is small, a batch in one piece does wait.

        Args:
            inputs: batch of the task's inputs.
            target: batch of its targets.
            scale: what the losses are multiplied by, for fp16; undone by whoever set it.
            read_signal: asked once, when this rank's units are known.
        """
        pieces = self.layout.accumulate
        if pieces > 1 or self.pipeline is not None:
            _refuse_ragged(target)
        summed = torch.zeros((), device=self.device)
        mine, guess = 0, float(self.batch_size)
        # fully_shard averages gradients over the replicas; undone, the sum over all units is
        # divided by their number, also where ranks scored different numbers of them.
        averaged = 1 if self.share.replicas is not None else self.layout.data

        def add(values: torch.Tensor) -> torch.Tensor:
            nonlocal summed, mine
            total = values.sum()
            summed = summed + total.detach()
            mine += values.numel()
            return total

        def score(values: torch.Tensor) -> torch.Tensor:
            return add(values) * (scale / self.batch_size)

        def ask() -> Callable[[], tuple[int, ControlSignal]]:
            return ask_for_units(mine if self.scores else 0, read_signal(), self.layout.ranks)

        for at in range(pieces):
            part, goal = _piece(inputs, at, pieces), _piece(target, at, pieces)
            self._sync_gradients(at == pieces - 1)
            if self.pipeline is not None:
                self.pipeline.run(part, functools.partial(self._score, goal, score))
                continue
            total = add(losses(self.task, self.model, part, goal)[1])
            if at == pieces - 1:
                answer = ask()  # the other ranks answer while this one goes backward
                if pieces == 1 and (self.layout.ranks == 1 or self.layout.precision == "fp16"):
                    guess = max(answer()[0], 1) / averaged
            if not total.requires_grad:
                raise TaskError(
                    "loss() does not depend on what is trained; is something detached, or in NumPy?"
                )
            with user_code("the backward pass"):
                torch.autograd.backward(total * (scale / guess))
        if self.pipeline is not None:
            answer = ask()
            self.pipeline.sync_tied()
        everyones, signal = answer()
        return Done(summed, mine, everyones, signal, guess * averaged / max(everyones, 1))

    def step_flops(self, inputs: Any, samples: float) -> float:
        """Operations of one step on this rank, where something knows them or can use them; or 0.

        Args:
            inputs: a replica's batch.
            samples: how many times the sample that was counted it is.
        """
        if self.share.sample_flops:
            # Each rank has its part of what the whole model does with its replica's batch.
            whole = FORWARD_AND_BACKWARD * self.share.sample_flops * samples
            return whole / (self.layout.tensor * self.layout.pipeline)
        if self.device.type != "cuda":
            return 0
        flops = count_flops(self.model, lambda: self.task.forward(self.model, inputs))
        self.share.at_rest()
        return flops

    def _score(
        self, target: Any, score: Callable[[torch.Tensor], torch.Tensor], output: Any, number: int
    ) -> torch.Tensor:
        """What to run backward from in one micro-batch of a pipeline."""
        goal = _piece(target, number, self.layout.microbatches)
        return score(losses_of(self.task, output, goal))

    def _sync_gradients(self, last: bool) -> None:
        """Stages 0 and 1 add up whole gradients, and reduce them with the last piece."""
        if self.layout.zero_stage > 1 or self.layout.accumulate == 1 or self.pipeline is not None:
            return
        for stage in self.share.stages.values():
            if isinstance(stage, FSDPModule):
                stage.set_is_last_backward(last)
                stage.set_requires_gradient_sync(last)
                stage.set_reshard_after_backward(last)


def _refuse_ragged(batch: Any) -> None:
    sizes = {len(each) for each in tree_leaves(batch) if isinstance(each, torch.Tensor)}
    if len(sizes) != 1:
        raise TaskError(
            "to train a batch in pieces, every tensor of its targets must have one row per example"
        )


def _piece(batch: Any, at: int, pieces: int) -> Any:
    """One of equally many rows of every tensor of a batch."""

    def cut(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or pieces == 1:
            return each
        if each.ndim == 0 or each.shape[0] % pieces:
            raise TaskError(
                f"a batch with a tensor of shape {tuple(each.shape)} cannot be cut into {pieces} "
                "equal pieces along its first dimension"
            )
        rows = each.shape[0] // pieces
        return each[at * rows : (at + 1) * rows]

    with user_code("cutting a batch"):
        return tree_map(cut, batch)
