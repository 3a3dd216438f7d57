"""Pipeline parallelism: schedules that train the stages, and a chain that runs them forward.

Training uses the schedules of `torch.distributed.pipelining`, whose stages have fixed shapes; each
shape of a batch has a schedule of its own, over the same modules. Everything else, evaluation above
all, uses `StageChain`, which sends the shapes before the tensors, signed: a short last batch needs
no padding and does not disturb a schedule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils._pytree import tree_map_only

from isthmus.errors import TaskError
from isthmus.task import user_code
from isthmus_datacenter.parallel.device_memory import memory_bytes
from isthmus_datacenter.parallel.model_shard import ModelShard, local
from isthmus_datacenter.rank_messages import RankMessageError, RankMessages

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
"""Types that can be sent from stage to stage; a message has the index."""

_MOST_TENSORS = 64
"""Tensors that a stage may return, and dimensions of one."""


@dataclasses.dataclass(frozen=True)
class _Form:
    """Type and sizes of a tensor: a receiver allocates what they say."""

    kind: Annotated[int, Field(ge=0, lt=len(_DTYPES))]
    shape: Annotated[Sequence[Annotated[int, Field(ge=0)]], Field(max_length=_MOST_TENSORS)]

    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _DTYPES[self.kind].itemsize


_FORMS: RankMessages[list[_Form]] = RankMessages(
    "the outputs of a stage", Annotated[list[_Form], Field(max_length=_MOST_TENSORS)]
)

MicrobatchLoss = Callable[[Any, int], torch.Tensor]
"""Loss of one micro-batch as a scalar, given the model's output and the micro-batch's number."""


class StageChain(nn.Module):
    """Forward pass through all stages, which all ranks of a pipeline call together.

    Only the rank of the last stage returns an output; the others return None.
    """

    def __init__(self, shard: ModelShard, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): stage for index, stage in shard.stages.items()})
        self.count = shard.dims.stages
        self.group = group
        self.device = device
        self.last_traces: dict[int, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}
        """Inputs and outputs of each stage on this rank, of the last call."""
        self.assumed: Mapping[int, tuple[torch.Tensor, ...]] | None = None
        """What each stage would receive, where no other rank is there; None where they are."""

    def forward(self, inputs: Any) -> Any:
        """Run one batch; only the first stage reads `inputs`."""
        ranks = self.group.size()
        output: Any = None
        for name, stage in self.stages.items():
            index = int(name)
            stage_inputs: tuple[Any, ...]
            if index == 0:
                stage_inputs = (inputs,)
            elif self.assumed is not None:
                stage_inputs = self.assumed[index]
            else:
                stage_inputs = self._receive((index - 1) % ranks)
            output = stage(*stage_inputs)
            outputs = output if isinstance(output, tuple) else (output,)
            self.last_traces[index] = (stage_inputs, outputs)
            if index < self.count - 1:
                if self.assumed is None:
                    self._send(outputs, (index + 1) % ranks)
                output = None
        return output

    def _send(self, tensors: tuple[Any, ...], destination: int) -> None:
        forms = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
                raise TaskError(
                    "a pipeline stage must return a tensor or a tuple of tensors, not "
                    f"{getattr(tensor, 'dtype', type(tensor).__name__)}"
                )
            forms.append(_Form(_DTYPES.index(tensor.dtype), tuple(tensor.shape)))
        if len(forms) > _MOST_TENSORS:
            raise TaskError(
                f"a pipeline stage returns {len(tensors)} tensors, and can send {_MOST_TENSORS}; "
                "have it return fewer, or set pipeline_parallel = 1"
            )
        _FORMS.send(forms, destination, self.group)
        for tensor in tensors:
            # In the order of the forms, as messages between two ranks keep theirs.
            dist.send(tensor.detach().contiguous(), group=self.group, group_dst=destination)

    def _receive(self, source: int) -> tuple[torch.Tensor, ...]:
        forms = _FORMS.receive(source, self.group)
        size = sum(form.size() for form in forms)
        most = memory_bytes(self.device)
        if size > most:
            raise TaskError(
                f"a pipeline stage returns {size} bytes, and the next one has a memory of {most}; "
                "lower batch_size"
            )
        received = []
        for form in forms:
            tensor = torch.empty(form.shape, dtype=_DTYPES[form.kind], device=self.device)
            dist.recv(tensor, group=self.group, group_src=source)
            received.append(tensor)
        return tuple(received)


class Pipeline:
    """Trains the stages of a model shard, one batch of any shape at a time."""

    def __init__(self, shard: ModelShard, device: torch.device) -> None:
        assert shard.mesh is not None
        self.shard = shard
        self.device = device
        self.group = shard.mesh.get_group("pipeline")
        self.chain = StageChain(shard, self.group, device)
        self._schedules: dict[Any, Any] = {}
        self._stages: list[PipelineStage] = []
        """The stages of all schedules."""
        self._loss: MicrobatchLoss | None = None
        """Loss of the batch that is running."""

    def run(self, inputs: Any, loss: MicrobatchLoss) -> None:
        """Run forward and backward of one batch; `loss` is called on the rank of the last stage."""
        if not isinstance(inputs, torch.Tensor):
            raise TaskError(
                f"a pipeline takes a batch of inputs as one tensor, not {type(inputs).__name__}; "
                "set pipeline_parallel = 1"
            )
        dims = self.shard.dims
        key = (tuple(inputs.shape), inputs.dtype)
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(inputs)
        self._loss = loss
        has_first = 0 in self.shard.stages
        has_last = dims.stages - 1 in self.shard.stages
        # The schedule's target is the number of each micro-batch; the task's target may be any
        # structure, which the schedule could not split.
        numbers = torch.arange(dims.microbatches) if has_last else None
        with user_code("a pass through the pipeline"):
            try:
                self._schedules[key].step(
                    *((inputs,) if has_first else ()), target=numbers, return_outputs=False
                )
            except RuntimeError as error:
                if error.__cause__ is None:
                    raise
                # PyTorch's message lists all tensors of the stage; the cause is the actual error.
                raise error.__cause__ from error.__cause__.__cause__
        self._loss = None

    def assume(self, inputs: Mapping[int, tuple[torch.Tensor, ...]]) -> None:
        """Have this rank run alone, without values; no other rank of the pipeline is there.

        Args:
            inputs: what each of its stages but the first takes for a micro-batch.
        """
        self.chain.assumed = inputs

    def buffers(self) -> list[torch.Tensor]:
        """Where tensors of other stages arrive; they are kept from one batch to the next."""
        return [
            info.buffer
            for stage in self._stages
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
            if info.buffer is not None
        ]

    def sync_tied(self) -> None:
        """Sum the gradients of parameters that several stages use, over those stages."""
        parameters = self.shard.parameters()
        gradients = self.shard.gradients()
        # Sorted: all ranks of a group have to begin the same reduction.
        for name, group in sorted(self.shard.tied.groups.items()):
            if not parameters[name].requires_grad:
                continue
            if name not in gradients:
                raise TaskError(
                    f"parameter {name!r} is used in several pipeline stages and has no gradient in "
                    "one of them; untie it or set pipeline_parallel = 1"
                )
            dist.all_reduce(local(gradients[name]), group=group)

    def _build_schedule(self, inputs: torch.Tensor) -> Any:
        """A schedule for batches of this shape and type."""
        dims = self.shard.dims
        microbatch = inputs[: inputs.shape[0] // dims.microbatches]
        # Run once to learn the shapes between stages. The random number generators must not
        # advance: a restarted rank does this at another step.
        with torch.no_grad(), torch.random.fork_rng():
            self.chain(microbatch)
        # A pass without a backward pass leaves parameters gathered.
        self.shard.reshard()
        kind = _KnownShapesStage if self.chain.assumed is None else _LoneStage
        splits_backward = dims.schedule == "zero_bubble"
        stages: list[Any] = []
        for index, module in self.shard.stages.items():
            stage_inputs, stage_outputs = self.chain.last_traces[index]
            stages.append(
                kind(
                    module,
                    index,
                    dims.stages,
                    self.device,
                    input_args=tuple(_empty_like(each, index > 0) for each in stage_inputs),
                    output_args=tuple(
                        _empty_like(each if index == dims.stages - 1 else _in_order(each), True)
                        for each in stage_outputs
                    ),
                    group=self.group,
                    splits_backward=splits_backward,
                )
            )
        self.chain.last_traces = {}
        self._stages += stages
        if dims.schedule in ("gpipe", "1f1b"):
            single = ScheduleGPipe if dims.schedule == "gpipe" else Schedule1F1B
            return single(
                stages[0], dims.microbatches, loss_fn=self._microbatch_loss, scale_grads=False
            )
        looped = (
            ScheduleInterleaved1F1B
            if dims.schedule == "interleaved"
            else ScheduleInterleavedZeroBubble
        )
        return looped(stages, dims.microbatches, loss_fn=self._microbatch_loss, scale_grads=False)

    def _microbatch_loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        # Without values, the parts of a batch differ in nothing.
        return self._loss(output, int(number) if self.chain.assumed is None else 0)


class _KnownShapesStage(PipelineStage):
    """A stage that knows the shapes of its inputs and outputs, and exchanges no pickles about them.

    PyTorch's stages first agree, by a number, on whether all know them. A program that has taken a
    rank's place could send another number.
    """

    def __init__(self, *args: Any, splits_backward: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._splits_backward = splits_backward
        """Whether gradients of parameters are computed apart from those of inputs."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stage for a micro-batch."""
        output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        if not self.is_last:
            output = tree_map_only(torch.Tensor, _in_order, output)
        # PyTorch frees the graph between the two parts of such a backward pass by detaching outputs
        # in place, which it cannot do with views. A Hugging Face decoder's last part is one.
        return tree_map_only(torch.Tensor, _no_view, output) if self._splits_backward else output

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The messages with the gradients of a micro-batch's inputs."""
        messages = super().get_bwd_send_ops(bwd_chunk_id)
        for each in messages:
            each.tensor = _in_order(each.tensor)
        return messages

    def _recv_meta(self, src_stage: int) -> Any:
        raise RankMessageError(_ASKED)

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        raise RankMessageError(_ASKED)


class _LoneStage(_KnownShapesStage):
    """A stage that does not agree on anything with others, which are not there."""

    def _warmup_forward_vote(
        self, has_backward: bool, received_acc: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.tensor([1])

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        # Its value is known also where tensors have none.
        return torch.tensor([1])


_ASKED = (
    "another stage of the pipeline asks for the shapes of tensors, which each stage knows: another "
    "program has taken a rank's place"
)


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements in order, which messages need; a transposed one is copied."""
    return tensor.contiguous()


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor._is_view() else tensor


def _empty_like(tensor: Any, requires_grad: bool) -> Any:
    """An uninitialised tensor of the same shape and type, which schedules take as a description."""
    empty = torch.empty_like(tensor.detach())
    return empty.requires_grad_(requires_grad and empty.is_floating_point())
