"""What a layout takes of a rank's memory, for any number of ranks, without them.

The model is built of fake tensors, which have shapes and no memory, and distributed over a process
group whose collectives do nothing. One step is then taken, and what is alive in it is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.task import Participant, Task, user_code
from isthmus.task.definition import Parameters, defines
from isthmus.task.made_optimizers import made_by
from isthmus.task.optimizers import TaskOptimizers
from isthmus.task.scoring import losses, map_tensors, pair_of
from isthmus.task.scoring.steps import training_step
from isthmus.tensors.division import divide
from isthmus_datacenter.parallel.kept_groups import forget_groups
from isthmus_datacenter.parallel.kept_moments import moments_of
from isthmus_datacenter.parallel.model_shard import ModelShard, local
from isthmus_datacenter.parallel.parallel_dims import LayoutError, ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.profile import count_flops
from isthmus_datacenter.training.repeated_blocks import (
    SHORTENED,
    Counts,
    Repetition,
    blocks_of,
    extended,
    find_repetition,
    shortened,
)

_CPU = torch.device("cpu")
_WANT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_TWICE = "multiple iterative calls"
"""In the message of PyTorch's tracker about a module that is called twice in a pass, which has no
class of its own."""
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
"""Sizes of small parameters, by which the dimensions of an optimizer's state are recognised."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the rank that has most."""

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


class _OnAccelerators(ParallelDims):
    """A layout as it is on GPUs: processors have another way to sum gradients of whole replicas.

    They also send their messages one by one.
    """

    def uses_all_reduce(self, device_type: str) -> bool:
        return False

    def overlaps_messages(self, device_type: str) -> bool:
        return True


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


class _PeakTracker(MemTracker):  # type: ignore[misc]  # PyTorch has no types for it
    """Keeps the peaks between calls of blocks, and not that of each module.

    PyTorch's tracker looks at all modules in each operation, which takes most of the time of a
    model with many layers.
    """

    def __init__(self, part: int = 0) -> None:
        super().__init__()
        self.part = part
        """Number of the part of the batch."""
        self.totals: dict[tuple[Hashable, int | None], int] = {}
        """Peaks by what happens, and by the index of the block to which it does."""
        self._place: tuple[Hashable, int | None] | None = None

    def now(self, what: str, block: int | None = None) -> None:
        """Begin to keep the peak of what happens from now on."""
        self._place = ((self.part, what), block)
        self._update_peak_stats(None)

    def _update_peak_stats(self, peak_state: Any) -> None:
        del peak_state
        if self._place is None:
            return
        total = sum(kinds["Total"] for kinds in self._curr_mem_snap.values())
        if self.totals.get(self._place, -1) < total:
            self.totals[self._place] = total

    def watch(self, blocks: Sequence[nn.Module]) -> None:
        """Keep peaks by the calls of blocks, and by the gradients of their outputs."""
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook("forward", index))
            block.register_forward_hook(self._hook("after", index))
            block.register_forward_hook(self._before_backward(index))

    def _hook(self, what: str, index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.now(what, index)

        return hook

    def _before_backward(self, index: int) -> Callable[..., None]:
        begin = self._hook("backward", index)

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
    dims = _dims(job, ranks, accelerators)
    with _pretended_ranks(ranks):
        # Before any tensor is fake: a mesh reads the numbers of its ranks.
        if dims.ranks > 1 or dims.needs_fully_shard:
            dims.mesh("cpu")
        with user_code("collate()"):
            batch = task.collate(list(rows))
        mode = FakeTensorMode()
        try:
            with mode, _readable_meshes(), _without_warnings():
                return _found(task, job, dims, map_tensors(mode.from_tensor, batch))
        except (*_WANT_VALUES, TaskError) as error:
            cause = error.__cause__ if isinstance(error, TaskError) else error
            if isinstance(cause, NotImplementedError) and _TWICE in str(cause):
                raise TaskError(
                    "the model calls a module twice in one pass, of which PyTorch cannot say what "
                    "it keeps: its memory is not known"
                ) from None
            if not isinstance(cause, _WANT_VALUES):
                raise
            raise TaskError(
                "the memory of a rank is found with tensors that have no values, and the code of "
                f"the task reads some, or selects by them ({error}); return a mask instead"
            ) from None


def memory_of_tensors(task: Task, job: Job, rows: Sequence[Any], ranks: int) -> RankMemory:
    """What `memory_of` finds, counted of tensors with values, on processors that are there.

    All ranks of the process group call this together. The arguments are those of `memory_of`.

    Raises:
        LayoutError: see `memory_of`.
        TaskError: the model cannot be built or trained.
    """
    dims = _dims(job, ranks, accelerators=False)
    with user_code("collate()"):
        batch = task.collate(list(rows))
    return _measured(task, _built(task, job), job, dims, batch).memory()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings that are about tensors with values only."""
    with warnings.catch_warnings():
        # Of the places of tensors in memory, which are compared, and here are nowhere.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        # Of hooks that an in-place change would lose: nothing is trained.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        yield


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
    with user_code("collate()"):
        batch = task.collate(list(rows))
    mode = FakeTensorMode()
    with mode, _without_warnings():
        model = _built(task, job)
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
    with FakeTensorMode(), _without_warnings():
        sizes = {
            name: each.numel() * each.element_size()
            for name, each in _built(task, job).named_parameters()
        }
    return max(sizes.items(), key=lambda item: item[1])


def examples_at_once(job: Job, ranks: int) -> int:
    """How many examples a replica trains at a time.

    Raises:
        LayoutError: the layout is impossible on so many ranks.
    """
    try:
        return job.datacenter.examples_at_once(ranks)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def _dims(job: Job, ranks: int, accelerators: bool) -> ParallelDims:
    section = job.datacenter
    unknown_unless = {
        "layout": ("given", "ranks choose another"),
        "expert_parallel": (1, "how many tokens a rank gets depends on their values"),
        "pipeline_parallel": (1, "ranks of a pipeline tell each other the shapes they exchange"),
    }
    for key, (known, why) in unknown_unless.items():
        if getattr(section, key) != known:
            raise LayoutError(
                f"the memory of a rank is known for {key}={known!r} only, and the job has "
                f"{getattr(section, key)!r}: {why}"
            )
    unknown = {
        "compile": section.compile,
        "privacy": section.privacy is not None,
        "offload": section.offload != "none",
        "float8": section.float8,
    }
    for what in (key for key, given in unknown.items() if given):
        raise LayoutError(f"the memory of a rank with datacenter.{what} is not known")
    dims = ParallelDims.from_section(section, ranks)
    return _OnAccelerators(**vars(dims)) if accelerators else dims


@contextlib.contextmanager
def _readable_meshes() -> Iterator[None]:
    """Within it meshes may be joined, which reads the numbers of their ranks.

    PyTorch joins those of sharding and tensor parallelism itself, within the modes in which nothing
    has values, and has no way to say that these tensors have some.
    """
    joined = DeviceMesh._concatenate

    def join(meshes: list[DeviceMesh]) -> DeviceMesh:
        with _disable_current_modes():
            return joined(meshes)

    DeviceMesh._concatenate = staticmethod(join)  # type: ignore[method-assign, assignment]  # until the block ends
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(joined)  # type: ignore[method-assign]  # its own again


@contextlib.contextmanager
def _pretended_ranks(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first and the only one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        forget_groups()
        dist.destroy_process_group()


def _found(task: Task, job: Job, dims: ParallelDims, batch: Any) -> RankMemory:
    """The memory of a rank with tensors that have no values."""
    model = _built(task, job)
    every = dims.checkpoint_every if dims.checkpoint_activations else 1
    states = _kinds_of_states(task, model)
    repetition = find_repetition(model, lambda: _loss(task, model, batch), every, states)
    if repetition is not None:
        # Any exception: counts that are on no line, or code of the task that wants all blocks.
        with contextlib.suppress(Exception):
            return _extended(task, job, dims, batch, model, repetition)
    return _measured(task, model, job, dims, batch).memory()


def _built(task: Task, job: Job) -> nn.Module:
    with user_code("model()"):
        model = task.model()
    divide(model, job.exchange)
    return model.train()


def _extended(
    task: Task,
    job: Job,
    dims: ParallelDims,
    batch: Any,
    model: nn.Module,
    repetition: Repetition,
) -> RankMemory:
    """The memory with all repetitions, from models with a few of them.

    Raises:
        NotOnALineError: it does not follow from them.
    """
    counts = []
    for times in SHORTENED:
        short = shortened(model, repetition, times)
        blocks = blocks_of(short, repetition, times)
        counts.append(_measured(task, short, job, dims, batch, blocks).counts())
    return _memory(extended(counts, repetition.period, repetition.times))


def _measured(
    task: Task,
    model: nn.Module,
    job: Job,
    dims: ParallelDims,
    batch: Any,
    blocks: Sequence[nn.Module] = (),
) -> _Measured:
    """Distribute a model, and count what a step with a batch takes, by calls of `blocks`."""
    shard = parallelize(
        task,
        model,
        dims,
        0,
        _CPU,
        sample=lambda: pair_of(task, batch)[0],
        compared=False,
    )
    steps = ForwardBackward(task, shard, 0, _CPU, job.datacenter.batch_size)
    stage = shard.stages[0]
    stage.train()
    # The first pass prepares what `fully_shard` keeps, such as the shards themselves.
    _pass(task, stage, batch)
    _clear(shard)
    tracker = _PeakTracker()
    tracker.track_external(stage, *_tensors(batch))
    tracker.watch(blocks)
    before = _total(tracker)
    kept: dict[tuple[Hashable, int | None], int] = {}
    parts = dims.accumulate
    with tracker:
        # Gradients of a first part are there while others are trained.
        for last in (False, True)[-min(parts, 2) :]:
            steps.set_gradient_sync(last)
            tracker.now("begin")
            kept[tracker.part, None] = _pass(task, stage, batch, tracker)
            tracker.reset_mod_stats()
            tracker.part += 1
    trained = {name: each for name, each in shard.parameters().items() if each.requires_grad}
    rounded = job.datacenter.optimizer_states == "bf16"
    return _Measured(
        parameters=_bytes(shard.parameters().values()) + _bytes(shard.buffers().values()),
        gradients=_bytes(trained.values()),
        optimizer=_optimizer_bytes(task, trained, rounded=rounded),
        before=before,
        kept=kept,
        totals=tracker.totals,
    )


def _pass(task: Task, model: nn.Module, batch: Any, tracker: MemTracker | None = None) -> int:
    """Pass a batch forward and backward; returns the bytes that were kept between the two."""
    before = {} if tracker is None else _kinds(tracker)
    total = _loss(task, model, batch)
    after = {} if tracker is None else _kinds(tracker)
    total.backward()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    # Gathered parameters are there too, and no activations.
    kinds = [kind for kind in after if kind not in ("Parameter", "Gradient", "Total")]
    return sum(after[kind] - before.get(kind, 0) for kind in kinds)


def _loss(task: Task, model: nn.Module, batch: Any) -> torch.Tensor:
    if defines(task, "training_step"):
        return training_step(task, model, batch).loss
    inputs, target = pair_of(task, batch)
    return losses(task, model, inputs, target)[1].total()


def _clear(shard: ModelShard) -> None:
    for parameter in shard.parameters().values():
        parameter.grad = None


def _kinds(tracker: MemTracker) -> dict[str, int]:
    """Bytes by kind, on all devices together."""
    bytes_by_kind: dict[str, int] = {}
    for kinds in tracker.get_tracker_snapshot().values():
        for kind, count in kinds.items():
            name = str(getattr(kind, "value", kind))
            bytes_by_kind[name] = bytes_by_kind.get(name, 0) + int(count)
    return bytes_by_kind


def _total(tracker: MemTracker) -> int:
    return _kinds(tracker).get("Total", 0)


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
