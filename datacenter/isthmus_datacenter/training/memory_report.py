"""What a layout takes of a rank's memory, for any number of ranks, without them.

The model is built of fake tensors, which have shapes and no memory, and distributed over a process
group whose collectives do nothing. One step is then taken, and what is alive in it is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.task import Participant, Task, user_code
from isthmus.task.definition import Parameters, defines
from isthmus.task.made_optimizers import made_by
from isthmus.task.optimizers import TaskOptimizers
from isthmus.task.scoring import map_tensors, pair_of
from isthmus_datacenter.parallel.expert_parallel import find_experts
from isthmus_datacenter.parallel.kept_moments import moments_of
from isthmus_datacenter.parallel.model_shard import ModelShard, local
from isthmus_datacenter.parallel.parallel_dims import LayoutError, ParallelDims
from isthmus_datacenter.parallel.pipeline_stages import split_into_stages
from isthmus_datacenter.training.alive_tensors import AliveTensors
from isthmus_datacenter.training.assumed_values import spread_evenly
from isthmus_datacenter.training.one_rank import (
    as_rank,
    batch_of,
    built,
    dims_of,
    distributed,
    fake_mode,
    first_microbatch,
    loss_of,
    parts_of_step,
    pass_batch,
    ranks_alone,
    without_warnings,
)
from isthmus_datacenter.training.profile import count_flops
from isthmus_datacenter.training.repeated_blocks import (
    SHORTENED,
    Counts,
    Repetition,
    blocks_of,
    copied,
    extended,
    find_repetition,
    kinds_of_blocks,
    shortened,
)

_FOUND = "the memory of a rank is"
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
"""Sizes of small parameters, by which the dimensions of an optimizer's state are recognised."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the rank that has most of each: in a pipeline these may be several."""

    parameters: int
    """Part of the parameters that it has, and the buffers."""
    gradients: int
    optimizer: int
    """State of the task's optimizer after a step."""
    activations: int
    """What the forward pass of the examples that are trained at a time keeps for the backward pass,
    losses included."""
    peak: int
    """The most at any time of a step, with what is gathered for a while."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Measured:
    """What was counted of a model, by what it is, and by the index of a block where it is at one.

    The numbers of a model with many alike blocks follow from those with few.
    """

    parameters: int
    gradients: int
    optimizer: int
    before: int
    """What there is before the step, with its batch."""
    kept: Counts
    """Activations that each part of the batch keeps."""
    totals: Counts
    """The most between two calls of blocks, with parameters and gradients, without the optimizer"""

    def counts(self) -> Counts:
        """All of them, to be extended together."""
        numbers = ("parameters", "gradients", "optimizer", "before")
        found: dict[tuple[Hashable, int | None], int] = {
            (name, None): getattr(self, name) for name in numbers
        }
        for name in ("kept", "totals"):
            for (what, block), count in getattr(self, name).items():
                found[(name, what), block] = count
        return found

    def memory(self) -> RankMemory:
        """The figures of the report."""
        return _memory(self.counts())


def _memory(counts: Mapping[Any, int]) -> RankMemory:
    """The figures of the report from what was counted, whatever the blocks."""
    numbers = {what: count for (what, _), count in counts.items() if isinstance(what, str)}
    kept, totals = (
        max(count for (what, *_), count in counts.items() if what[0] == name)
        for name in ("kept", "totals")
    )
    return RankMemory(
        parameters=numbers["parameters"],
        gradients=numbers["gradients"],
        optimizer=numbers["optimizer"],
        activations=kept,
        peak=max(totals, numbers["before"] + numbers["gradients"]) + numbers["optimizer"],
    )


def _most(ranks: Sequence[RankMemory]) -> RankMemory:
    """The most of each number on any of the ranks."""
    numbers = [dataclasses.asdict(each) for each in ranks]
    return RankMemory(**{key: max(each[key] for each in numbers) for key in numbers[0]})


class _PeakTracker(AliveTensors):  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    """Keeps the peaks between calls of blocks, and the most that forward passes keep."""

    def __init__(self, shard: ModelShard) -> None:
        super().__init__()
        self._shard = shard
        self._part = 0
        self.activations: dict[tuple[Hashable, int | None], int] = {}
        """Bytes that are kept for the backward pass, by part of the step."""

    def begin_part(self) -> None:
        """Begin another part of a step: what follows has peaks of its own."""
        self._part += 1
        self.now((self._part, "begin"))

    def note_activations(self) -> None:
        """Note what is kept for the backward pass now, without what is gathered for a while."""
        stages = self._shard.stages.values()
        others = [each for stage in stages for each in stage.parameters()]
        place = (self._part, None)
        self.activations[place] = max(self.activations.get(place, 0), self.kept(others))

    def watch(self, blocks: Sequence[nn.Module]) -> None:
        """Keep peaks by the calls of blocks, and by the gradients of their outputs."""
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook("forward", index))
            block.register_forward_hook(self._hook("after", index))
            block.register_forward_hook(_before_backward(self._hook("backward", index)))

    def watch_stages(self) -> None:
        """Have each call of a stage of a pipeline be a part of the step, and its backward pass."""

        def begin(*_: object) -> None:
            self.begin_part()

        def note(*_: object) -> None:
            self.note_activations()

        for stage in self._shard.stages.values():
            stage.register_forward_pre_hook(begin)
            stage.register_forward_hook(note)
            stage.register_forward_hook(_before_backward(begin))

    def _hook(self, what: str, index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.now((self._part, what), index)

        return hook


def _before_backward(begin: Callable[..., None]) -> Callable[..., None]:
    """A hook of a module that calls `begin` before the module's backward pass."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        tensors = (each for each in tree_leaves(output) if isinstance(each, torch.Tensor))
        trained = next((each for each in tensors if each.requires_grad), None)
        if trained is not None:
            trained.register_hook(begin)  # type: ignore[no-untyped-call]  # PyTorch has no types for it

    return hook


def memory_of(
    task: Task, job: Job, rows: Sequence[Any], ranks: int, *, accelerators: bool
) -> RankMemory:
    """What a job's layout takes on each of so many ranks.

    Args:
        task: of the job.
        job: the job.
        rows: of the data set, as many as are trained at a time.
        ranks: their number.
        accelerators: whether they are GPUs.

    Raises:
        LayoutError: the layout is impossible on so many ranks, or not one whose memory is known.
        TaskError: the model cannot be built or trained without values.
    """
    dims = dims_of(job, ranks, _FOUND, accelerators=accelerators)
    batch = batch_of(task, rows)
    mode = fake_mode()
    with ranks_alone(_FOUND, batch):
        with mode, without_warnings():
            whole = _Whole.of(task, job, dims, map_tensors(mode.from_tensor, batch))
        found = []
        for rank in whole.ranks:
            with as_rank(dims, rank, mode):
                found.append(whole.memory(rank))
    return _most(found)


def memory_of_tensors(task: Task, job: Job, rows: Sequence[Any], ranks: int) -> RankMemory:
    """What `memory_of` finds, counted of tensors with values, on this processor of those there.

    All ranks of the process group call this together. The arguments are those of `memory_of`.

    Raises:
        LayoutError: see `memory_of`.
        TaskError: the model cannot be built or trained.
    """
    dims = dims_of(job, ranks, _FOUND, accelerators=False)
    batch = batch_of(task, rows)
    rank = dist.get_rank()
    return _measured(task, built(task, job), job, dims, batch, rank, has_values=True).memory()


def operations_of(task: Task, job: Job, rows: Sequence[Any]) -> int:
    """Floating-point operations of a batch in the whole model, counted of fake tensors.

    They are those of `count_flops`, of the forward and the backward pass.

    Args:
        task: of the job.
        job: the job.
        rows: of the data set, as many as are trained together.

    Raises:
        TaskError: they cannot be counted, with the reason.
    """
    if defines(task, "training_step"):
        raise TaskError(
            "the operations of a step are counted in forward(), and the task calls its model in "
            "training_step()"
        )
    if job.datacenter.privacy is not None:
        raise TaskError(
            "the operations of a step with datacenter.privacy follow from how many examples are "
            "drawn, and are not counted"
        )
    batch = batch_of(task, rows)
    mode = FakeTensorMode()
    with mode, without_warnings():
        model = built(task, job)
        inputs, _ = pair_of(task, map_tensors(mode.from_tensor, batch))
        counted = count_flops(model, lambda: task.forward(model, inputs))
    if not counted:
        raise TaskError(
            "the operations of a step are counted with tensors that have no values, and the code "
            "of the task reads some, or its model has no matrix product"
        )
    return counted


def largest_parameter(task: Task, job: Job) -> tuple[str, int]:
    """Name and bytes of the largest parameter of the whole model.

    Raises:
        TaskError: the model cannot be built.
    """
    with FakeTensorMode(), without_warnings():
        sizes = {
            name: each.numel() * each.element_size()
            for name, each in built(task, job).named_parameters()
        }
    return max(sizes.items(), key=lambda item: item[1])


def elements_of(task: Task, job: Job) -> int:
    """Elements of all parameters of the whole model.

    Raises:
        TaskError: the model cannot be built.
    """
    with FakeTensorMode(), without_warnings():
        return sum(each.numel() for each in built(task, job).parameters())


def elements_of_experts(task: Task, job: Job) -> int:
    """Elements of the parameters of all experts that `datacenter.expert_parallel` divides.

    Raises:
        TaskError: the model cannot be built.
    """
    if job.datacenter.expert_parallel == 1:
        return 0
    with FakeTensorMode(), without_warnings():
        experts = find_experts(built(task, job)).values()
        return sum(each.numel() for module in experts for each in module.parameters())


def examples_at_once(job: Job, ranks: int) -> int:
    """How many examples a replica trains at a time.

    Raises:
        LayoutError: the layout is impossible on so many ranks.
    """
    try:
        return job.datacenter.examples_at_once(ranks)
    except ValueError as error:
        raise LayoutError(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Whole:
    """A model without values, and a batch."""

    task: Task
    job: Job
    dims: ParallelDims
    batch: Any
    model: nn.Module
    repetition: Repetition | None
    """What repeats of its blocks; None if all of them are to be taken."""
    ranks: Sequence[int]
    """The ranks whose memory is known, among which are those that have most."""

    @classmethod
    def of(cls, task: Task, job: Job, dims: ParallelDims, batch: Any) -> _Whole:
        """Build the model, and find what repeats in it.

        Raises:
            TaskError: it cannot be built, or split into the stages of a pipeline.
        """
        model = built(task, job)
        spread_evenly(model)
        states = _kinds_of_states(task, model)

        def run() -> object:
            return loss_of(task, model, batch)

        repetition = None
        ranks: Sequence[int] = [0]
        if dims.pipeline > 1:
            ranks = _ranks_that_differ(
                task, model, dims, batch, kinds_of_blocks(model, run, states)
            )
        else:
            every = dims.checkpoint_every if dims.checkpoint_activations else 1
            repetition = find_repetition(model, run, every, states)
        return cls(
            task=task,
            job=job,
            dims=dims,
            batch=batch,
            model=model,
            repetition=repetition,
            ranks=ranks,
        )

    def memory(self, rank: int) -> RankMemory:
        """The memory of one of the ranks; the process group is as if this process were it."""
        if self.repetition is not None:
            # Any exception: counts that are on no line, or code of the task that wants all blocks.
            with contextlib.suppress(Exception):
                return self._extended(self.repetition, rank)
        # A copy, where another rank needs the model, too.
        model = copied(self.model) if len(self.ranks) > 1 else self.model
        return self._measured(model, rank).memory()

    def _extended(self, repetition: Repetition, rank: int) -> RankMemory:
        """The memory with all repetitions, from models with a few of them.

        Raises:
            NotOnALineError: it does not follow from them.
        """
        counts = []
        for times in SHORTENED:
            short = shortened(self.model, repetition, times)
            blocks = blocks_of(short, repetition, times)
            counts.append(self._measured(short, rank, blocks).counts())
        return _memory(extended(counts, repetition.period, repetition.times))

    def _measured(self, model: nn.Module, rank: int, blocks: Sequence[nn.Module] = ()) -> _Measured:
        return _measured(self.task, model, self.job, self.dims, self.batch, rank, blocks)


def _ranks_that_differ(
    task: Task,
    model: nn.Module,
    dims: ParallelDims,
    batch: Any,
    kinds: Mapping[nn.Module, Hashable],
) -> list[int]:
    """One rank of each stage of a pipeline, without stages like one before them.

    Of stages that are alike the first one has most: it passes on micro-batches before the others
    do, and keeps more of them.
    """
    stages, _ = split_into_stages(
        task, model, dims, first_microbatch(task, dims, batch), None, compared=False
    )
    found: dict[Hashable, int] = {}
    for row in range(dims.pipeline):
        own = range(row, dims.stages, dims.pipeline)
        parts = tuple(
            (index == 0, index == dims.stages - 1, _kind_of_stage(stages[index], kinds))
            for index in own
        )
        found.setdefault(parts, row * dims.data * dims.tensor)
    return list(found.values())


def _kind_of_stage(stage: nn.Module, kinds: Mapping[nn.Module, Hashable]) -> Hashable:
    """What stages that are alike have in common."""
    blocks = [each for each in stage.modules() if each in kinds]
    in_blocks = {each for block in blocks for each in block.modules()}
    others = [
        (type(module), tuple((tuple(each.shape), each.dtype) for each in tensors))
        for module in stage.modules()
        if module not in in_blocks
        for tensors in [[*module.parameters(recurse=False), *module.buffers(recurse=False)]]
        if tensors
    ]
    # A block of no known kind is like itself only.
    own = [block if kinds[block] is None else kinds[block] for block in blocks]
    return (tuple(own), tuple(others))


def _measured(
    task: Task,
    model: nn.Module,
    job: Job,
    dims: ParallelDims,
    batch: Any,
    rank: int,
    blocks: Sequence[nn.Module] = (),
    *,
    has_values: bool = False,
) -> _Measured:
    """Distribute a model, and count what a step with a batch takes, by calls of `blocks`."""
    shard, steps = distributed(task, model, job, dims, batch, rank, has_values=has_values)
    # The first pass prepares what is kept from step to step, such as the shards themselves.
    pass_batch(task, steps, batch)
    _clear(shard)
    tracker = _PeakTracker(shard)
    for stage in shard.stages.values():
        tracker.add((*stage.parameters(), *stage.buffers()))
    tracker.add(_tensors(batch))
    if steps.pipeline is not None:
        tracker.add(steps.pipeline.buffers())
        tracker.watch_stages()
    tracker.watch(blocks)
    before = tracker.total
    with tracker:
        # Gradients of a first part are there while others are trained.
        for _ in parts_of_step(steps):
            tracker.begin_part()
            pass_batch(task, steps, batch, tracker.note_activations)
        tracker.now("end")
    trained = {name: each for name, each in shard.parameters().items() if each.requires_grad}
    rounded = job.datacenter.optimizer_states == "bf16"
    return _Measured(
        parameters=_bytes(shard.parameters().values()) + _bytes(shard.buffers().values()),
        gradients=_bytes(trained.values()),
        optimizer=_optimizer_bytes(task, trained, rounded=rounded),
        before=before,
        kept=tracker.activations,
        totals=tracker.peaks,
    )


def _clear(shard: ModelShard) -> None:
    for parameter in shard.parameters().values():
        parameter.grad = None


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(found.append, batch)
    return found


def _bytes(tensors: Any) -> int:
    return sum(local(each).numel() * each.element_size() for each in tensors)


# -- optimizer ------------------------------------------------------------------------------------


def _optimizer_bytes(
    task: Task, trained: Mapping[str, torch.Tensor], *, rounded: bool = False
) -> int:
    """Bytes of the optimizer's state, found by a step on small real parameters of the same names.

    With `rounded`, its moments are kept in bfloat16.

    Raises:
        TaskError: `optimizer()` raised.
    """
    with _disable_current_modes():
        return sum(
            _state_bytes(
                value.bfloat16() if rounded and key in moments else value,
                local(trained[name]).shape,
            )
            for name, states, moments in _states(task, trained)
            for key, value in states.items()
        )


def _states(
    task: Task, trained: Mapping[str, torch.Tensor]
) -> list[tuple[str, Mapping[str, torch.Tensor], frozenset[str]]]:
    """By parameter, the optimizers' states after a step on small ones, and which are moments.

    Raises:
        TaskError: `optimizer()` raised.
    """
    with _disable_current_modes():
        small = {
            name: nn.Parameter(torch.zeros(_PRIMES[: each.ndim], dtype=each.dtype))
            for name, each in trained.items()
        }
        parameters = Parameters(small.items())
        participant = Participant(name="datacenter", regime="datacenter", round=1)
        with user_code("optimizer()"):
            made = made_by(task, parameters, participant)
        optimizers = TaskOptimizers(made, parameters)
        for parameter in small.values():
            parameter.grad = torch.ones_like(parameter)
        optimizers.step()
        names = {id(each): name for name, each in small.items()}
        return [
            (
                names[id(parameter)],
                {key: each for key, each in state.items() if isinstance(each, torch.Tensor)},
                frozenset(moments_of(state, parameter)),
            )
            for inner in optimizers.named.values()
            for parameter, state in inner.state.items()
        ]


def _kinds_of_states(task: Task, model: nn.Module) -> Mapping[nn.Parameter, Hashable]:
    """What tells the optimizers' states of one parameter from those of another."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    kinds: dict[nn.Parameter, tuple[Hashable, ...]] = {}
    for name, states, moments in _states(task, trained):
        shapes = [(key, tuple(each.shape), each.dtype) for key, each in sorted(states.items())]
        kinds[trained[name]] = (*kinds.get(trained[name], ()), tuple(shapes), moments)
    return kinds


def _state_bytes(state: torch.Tensor, shape: Sequence[int]) -> int:
    """Bytes of a state of a small parameter where the parameter has the shape `shape`."""
    sizes = {1: 1, **dict(zip(_PRIMES, shape, strict=False))}
    if all(size in sizes for size in state.shape):
        return math.prod(sizes[size] for size in state.shape) * state.element_size()
    if state.numel() == math.prod(_PRIMES[: len(shape)]):
        return math.prod(shape) * state.element_size()
    return state.numel() * state.element_size()
