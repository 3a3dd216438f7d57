"""What a layout takes of a rank's memory, for any number of ranks, without them.

The model is built of fake tensors, which have shapes and no memory, and distributed over a process
group whose collectives do nothing. One step is then taken, and what is alive in it is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from torch.testing._internal.distributed.fake_pg import FakeStore

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

_CPU = torch.device("cpu")
_WANT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_TWICE = "multiple iterative calls"
"""In the message of PyTorch's tracker about a module that is called twice in a pass."""
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
"""Sizes of small parameters, by which the dimensions of an optimizer's state are recognised."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the rank that has most."""

    parameters: int
    """Its part of the parameters, and the buffers."""
    gradients: int
    optimizer: int
    """State of the task's optimizer after a step."""
    activations: int
    """What the forward pass of the examples that are trained at a time keeps for the backward pass,
    losses included."""
    peak: int
    """The most at any time of a step, with what is gathered for a while."""


class _OnAccelerators(ParallelDims):
    """A layout as it is on GPUs: processors have another way to sum gradients of whole replicas."""

    def uses_all_reduce(self, device_type: str) -> bool:
        return False


class _PeakTracker(MemTracker):  # type: ignore[misc]  # untyped in PyTorch
    """Keeps the peak of the whole model, and not that of each module.

    PyTorch's tracker looks at all modules in each operation, which takes most of the time of a
    model with many layers.
    """

    def _update_peak_stats(self, peak_state: Any) -> None:
        del peak_state
        for device, kinds in self._curr_mem_snap.items():
            total = kinds["Total"]
            if self._peak_mem.get(device, 0) < total:
                self._peak_mem[device] = total
                self._peak_mem_snap[device] = dict(kinds)


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
            with mode:
                return _measured(task, job, dims, map_tensors(mode.from_tensor, batch))
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
    known = {
        "layout": "given",
        "tensor_parallel": 1,
        "context_parallel": 1,
        "expert_parallel": 1,
        "pipeline_parallel": 1,
    }
    for key, one in known.items():
        if getattr(section, key) != one:
            raise LayoutError(
                f"the memory of a rank is known for {key}={one!r} only, and the job has "
                f"{getattr(section, key)!r}: such layouts are compared with the whole model by its "
                "values"
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
def _pretended_ranks(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first and the only one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        forget_groups()
        dist.destroy_process_group()


def _measured(task: Task, job: Job, dims: ParallelDims, batch: Any) -> RankMemory:
    with user_code("model()"):
        model = task.model()
    with warnings.catch_warnings():
        # Of the places of tensors in memory, which are compared, and here are nowhere.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        divide(model, job.exchange)
    shard = parallelize(task, model, dims, 0, _CPU, sample=lambda: None)
    steps = ForwardBackward(task, shard, 0, _CPU, job.datacenter.batch_size)
    stage = shard.stages[0]
    stage.train()
    # The first pass prepares what `fully_shard` keeps, such as the shards themselves.
    _pass(task, stage, batch)
    _clear(shard)
    tracker = _PeakTracker()
    tracker.track_external(stage, *_tensors(batch))
    parts = dims.accumulate
    before = _total(tracker)
    activations = 0
    with tracker:
        # Gradients of a first part are there while others are trained.
        for last in (False, True)[-min(parts, 2) :]:
            steps.set_gradient_sync(last)
            kept = _pass(task, stage, batch, tracker)
            activations = max(activations, kept)
            tracker.reset_mod_stats()
    peak = _total(tracker, "peak")
    trained = {name: each for name, each in shard.parameters().items() if each.requires_grad}
    rounded = job.datacenter.optimizer_states == "bf16"
    optimizer = _optimizer_bytes(task, trained, rounded=rounded)
    parameters = _bytes(shard.parameters().values()) + _bytes(shard.buffers().values())
    gradients = _bytes(trained.values())
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        peak=max(peak, before + gradients) + optimizer,
    )


def _pass(task: Task, model: nn.Module, batch: Any, tracker: MemTracker | None = None) -> int:
    """Pass a batch forward and backward; returns the bytes that were kept between the two."""
    before = {} if tracker is None else _kinds(tracker)
    if defines(task, "training_step"):
        total = training_step(task, model, batch).loss
    else:
        inputs, target = pair_of(task, batch)
        output, values = losses(task, model, inputs, target)
        total = values.total()
        del output, values
    after = {} if tracker is None else _kinds(tracker)
    total.backward()  # type: ignore[no-untyped-call]  # untyped in PyTorch
    # Gathered parameters are there too, and no activations.
    kinds = [kind for kind in after if kind not in ("Parameter", "Gradient", "Total")]
    return sum(after[kind] - before.get(kind, 0) for kind in kinds)


def _clear(shard: ModelShard) -> None:
    for parameter in shard.parameters().values():
        parameter.grad = None


def _kinds(tracker: MemTracker, which: str = "current") -> dict[str, int]:
    """Bytes by kind, on all devices together."""
    bytes_by_kind: dict[str, int] = {}
    for kinds in tracker.get_tracker_snapshot(which).values():
        for kind, count in kinds.items():
            name = str(getattr(kind, "value", kind))
            bytes_by_kind[name] = bytes_by_kind.get(name, 0) + int(count)
    return bytes_by_kind


def _total(tracker: MemTracker, which: str = "current") -> int:
    return _kinds(tracker, which).get("Total", 0)


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
    with torch.utils._python_dispatch._disable_current_modes():
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
        sizes = {id(each): local(trained[name]).shape for name, each in small.items()}
        return sum(
            _state_bytes(
                value.bfloat16() if rounded and key in moments_of(state, parameter) else value,
                sizes[id(parameter)],
            )
            for inner in optimizers.named.values()
            for parameter, state in inner.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        )


def _state_bytes(state: torch.Tensor, shape: Sequence[int]) -> int:
    """Bytes of a state of a small parameter where the parameter has the shape `shape`."""
    sizes = {1: 1, **dict(zip(_PRIMES, shape, strict=False))}
    if all(size in sizes for size in state.shape):
        return math.prod(sizes[size] for size in state.shape) * state.element_size()
    if state.numel() == math.prod(_PRIMES[: len(shape)]):
        return math.prod(shape) * state.element_size()
    return state.numel() * state.element_size()
