"""A model in stages on several ranks: the schedules that train it and the chain that runs it.

Training goes through `torch.distributed.pipelining`, whose stages know the shapes of one kind of
batch; each kind has a schedule of its own, over the same modules. Everything else, evaluation above
all, goes through the chain, where each batch brings its own shape: a short last batch needs no
padding, and nothing about it can spoil a schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from isthmus.errors import TaskError
from isthmus.task import user_code
from isthmus_datacenter.parallel.model_shard import ModelShard, local

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""What can be handed from stage to stage."""
_HEADER = 64
"""Numbers in front of what is handed on: how many tensors; of each, type, dimensions, sizes."""

Score = Callable[[Any, int], torch.Tensor]
"""The loss to run backward from, given the output and the number of one micro-batch."""


class Chain(nn.Module):
    """The whole model as one call that all ranks of a pipeline make together.

    Only the last stage's rank gets an output; the others get None.
    """

    def __init__(self, share: ModelShard, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(at): stage for at, stage in share.stages.items()})
        self.count = share.layout.stages
        self.group = group
        self.device = device
        self.seen: dict[int, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}
        """What went into each stage here and came out, of the last call."""

    def forward(self, inputs: Any) -> Any:
        """Run one batch; only the first stage looks at it."""
        width = self.group.size()
        output: Any = None
        for name, stage in self.stages.items():
            at = int(name)
            given = (inputs,) if at == 0 else self._receive((at - 1) % width)
            output = stage(*given)
            if at < self.count - 1:
                sent = output if isinstance(output, tuple) else (output,)
                self._send(sent, (at + 1) % width)
                self.seen[at] = (given, sent)
                output = None
            else:
                self.seen[at] = (given, output if isinstance(output, tuple) else (output,))
        return output

    def _send(self, tensors: tuple[Any, ...], to: int) -> None:
        header = [len(tensors)]
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
                raise TaskError(
                    "a pipeline stage must hand on a tensor or a tuple of tensors, not "
                    f"{getattr(tensor, 'dtype', type(tensor).__name__)}"
                )
            header += [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        if len(header) > _HEADER:
            raise TaskError(f"a pipeline stage hands on {len(tensors)} tensors, which is too many")
        header += [0] * (_HEADER - len(header))
        dist.send(torch.tensor(header), group=self.group, group_dst=to)
        for tensor in tensors:
            dist.send(tensor.detach().contiguous(), group=self.group, group_dst=to)

    def _receive(self, source: int) -> tuple[torch.Tensor, ...]:
        header = torch.empty(_HEADER, dtype=torch.int64)
        dist.recv(header, group=self.group, group_src=source)
        count, *rest = header.tolist()
        received = []
        for _ in range(count):
            kind, dimensions, *rest = rest
            shape, rest = rest[:dimensions], rest[dimensions:]
            tensor = torch.empty(shape, dtype=_DTYPES[kind], device=self.device)
            dist.recv(tensor, group=self.group, group_src=source)
            received.append(tensor)
        return tuple(received)


class Pipeline:
    """Trains the stages of a share, one batch of any shape at a time."""

    def __init__(self, share: ModelShard, device: torch.device) -> None:
        assert share.mesh is not None
        self.share = share
        self.device = device
        self.group = share.mesh.get_group("pipeline")
        self.chain = Chain(share, self.group, device)
        self._schedules: dict[Any, Any] = {}
        self._score: Score | None = None

    def run(self, inputs: Any, score: Score) -> None:
        """Forward and backward of one batch; `score` is called where the last stage is."""
        if not isinstance(inputs, torch.Tensor):
            raise TaskError(
                f"a pipeline takes a batch of inputs as one tensor, not {type(inputs).__name__}; "
                "set pipeline_parallel = 1"
            )
        layout = self.share.layout
        kind = (tuple(inputs.shape), inputs.dtype)
        if kind not in self._schedules:
            self._schedules[kind] = self._schedule(inputs)
        self._score = score
        first, last = 0 in self.share.stages, layout.stages - 1 in self.share.stages
        # The target is the number of each micro-batch; the task's own may be any structure.
        numbers = torch.arange(layout.microbatches) if last else None
        with user_code("a pass through the pipeline"):
            try:
                self._schedules[kind].step(
                    *((inputs,) if first else ()), target=numbers, return_outputs=False
                )
            except RuntimeError as error:
                if error.__cause__ is None:
                    raise
                # A stage tells of all its tensors, and keeps back what happened.
                raise error.__cause__ from error.__cause__.__cause__
        self._score = None

    def _schedule(self, inputs: torch.Tensor) -> Any:
        """A schedule for batches like this one."""
        layout = self.share.layout
        piece = inputs[: inputs.shape[0] // layout.microbatches]
        # Run once to see the shapes between stages; drawn numbers must not move by it, since a
        # rank that was restarted does this at another step.
        with torch.no_grad(), torch.random.fork_rng():
            self.chain(piece)
        self.share.at_rest()
        stages: list[Any] = []
        for at, module in self.share.stages.items():
            given, made = self.chain.seen[at]
            stages.append(
                PipelineStage(
                    module,
                    at,
                    layout.stages,
                    self.device,
                    input_args=tuple(_like(each, at > 0) for each in given),
                    output_args=tuple(_like(each, True) for each in made),
                    group=self.group,
                )
            )
        self.chain.seen = {}
        if layout.schedule in ("gpipe", "1f1b"):
            kind = ScheduleGPipe if layout.schedule == "gpipe" else Schedule1F1B
            return kind(stages[0], layout.microbatches, loss_fn=self._loss, scale_grads=False)
        looped = (
            ScheduleInterleaved1F1B
            if layout.schedule == "interleaved"
            else ScheduleInterleavedZeroBubble
        )
        return looped(stages, layout.microbatches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        assert self._score is not None
        return self._score(output, int(number))

    def sync_tied(self) -> None:
        """Add up the gradients of parameters that several stages use."""
        parameters, gradients = self.share.parameters(), self.share.gradients()
        for name, group in sorted(self.share.tied.items()):
            if not parameters[name].requires_grad:
                continue
            if name not in gradients:
                raise TaskError(
                    f"parameter {name!r} is used in several pipeline stages and has no gradient in "
                    "one of them; untie it or set pipeline_parallel = 1"
                )
            dist.all_reduce(local(gradients[name]), group=group)


def _like(tensor: Any, trains: bool) -> Any:
    """An empty tensor of the same kind, as the schedules want to see it."""
    empty = torch.empty_like(tensor.detach())
    return empty.requires_grad_(trains and empty.is_floating_point())
