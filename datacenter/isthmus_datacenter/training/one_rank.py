"""One rank of a layout without the others: a model of fake tensors over a group that does nothing.

The model is built of tensors that have shapes and no memory, and distributed over a process group
whose collectives do nothing; this process is one of its ranks, and the only one.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_parameters
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.task import Task, user_code
from isthmus.task.definition import defines
from isthmus.task.scoring import UnitValues, build_model, losses, pair_of
from isthmus.task.scoring.steps import training_step
from isthmus.tensors.division import divide
from isthmus_datacenter.parallel.kept_groups import forget_groups
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.parallel_dims import LayoutError, ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.parallel.pipeline import Pipeline
from isthmus_datacenter.training.assumed_values import rows_of_one_sequence
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.rng import kept_generators

CPU = torch.device("cpu")
_WANT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class OnAccelerators(ParallelDims):
    """A layout as it is on GPUs: processors have another way to sum gradients of whole replicas.

    They also send their messages one by one.
    """

    def uses_all_reduce(self, device_type: str) -> bool:
        """As on a GPU, whatever the type of the device here."""
        return False

    def overlaps_messages(self, device_type: str) -> bool:
        """As on a GPU, whatever the type of the device here."""
        return True


@contextlib.contextmanager
def told_of_values(what: str) -> Iterator[None]:
    """Say of code that reads values, of tensors that have none, what it does.

    Args:
        what: is found, with its verb: "the memory of a rank is".

    Raises:
        TaskError: it does.
    """
    try:
        yield
    except (*_WANT_VALUES, TaskError) as error:
        cause = error.__cause__ if isinstance(error, TaskError) else error
        if not isinstance(cause, _WANT_VALUES):
            raise
        raise TaskError(
            f"{what} found with tensors that have no values, and the code of "
            f"the task reads some, or selects by them ({error}); return a mask instead"
        ) from None


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore warnings that are about tensors with values only."""
    with warnings.catch_warnings():
        # Of the places of tensors in memory, which are compared, and here are nowhere.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        # Of hooks that an in-place change would lose: nothing is trained.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        yield


def dims_of(job: Job, ranks: int, what: str, *, accelerators: bool) -> ParallelDims:
    """The layout of a job on so many ranks.

    Args:
        job: the job.
        ranks: their number.
        what: is found, with its verb: "the memory of a rank is".
        accelerators: whether they are GPUs.

    Raises:
        LayoutError: the layout is impossible on so many ranks, or not one whose steps are known.
    """
    section = job.datacenter
    if section.layout != "given":
        raise LayoutError(
            f"{what} known for layout='given' only, and the job has "
            f"{section.layout!r}: ranks choose another"
        )
    unknown = {
        "compile": section.compile,
        "privacy": section.privacy is not None,
        "offload": section.offload != "none",
        "float8": section.float8,
        "frozen_dtype": section.frozen_dtype != "float32",
    }
    for key in (key for key, given in unknown.items() if given):
        raise LayoutError(f"{what} not known with datacenter.{key}")
    dims = ParallelDims.from_section(section, ranks)
    return OnAccelerators(**vars(dims)) if accelerators else dims


@contextlib.contextmanager
def readable_meshes() -> Iterator[None]:
    """Within it meshes may be joined, which reads the numbers of their ranks.

    PyTorch joins those of sharding and tensor parallelism itself, within the modes in which nothing
    has values, and has no way to say that these tensors have some.
    """
    joined = DeviceMesh._concatenate

    def join(meshes: list[DeviceMesh]) -> DeviceMesh:
        with _disable_current_modes():
            return joined(meshes)

    # Types have no methods that are replaced, here until the block ends.
    DeviceMesh._concatenate = staticmethod(join)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(joined)  # type: ignore[method-assign]  # as above


@contextlib.contextmanager
def few_chunks() -> Iterator[None]:
    """Within it `fully_shard` cuts off the parts of a parameter that it looks at, and no others.

    It makes the parts of all ranks, twice for each parameter, and looks at the first and its own.
    With a thousand ranks that is most of the time of a report.
    """
    module: Any = fsdp_parameters
    before = module._chunk_with_empty
    module._chunk_with_empty = Chunks
    try:
        yield
    finally:
        module._chunk_with_empty = before


class Chunks:
    """The parts into which `torch.chunk` cuts a tensor, and empty ones after them."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._size = max(1, -(-tensor.shape[dim] // num_chunks))

    def __getitem__(self, index: int) -> torch.Tensor:
        """One part."""
        whole = self._tensor.shape[self._dim]
        if not whole:
            return self._tensor
        start = index * self._size
        if start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, whole - start))


@contextlib.contextmanager
def pretended_ranks(ranks: int, rank: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is one, and the only one."""
    with _environment(ranks, rank):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            yield
        finally:
            forget_groups()
            dist.destroy_process_group()


@contextlib.contextmanager
def _environment(ranks: int, rank: int) -> Iterator[None]:
    """The variables by which code may know its rank, as a rank has them."""
    given = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    # As if all ranks were on one machine.
    given |= {f"LOCAL_{key}": value for key, value in given.items()}
    before = {key: os.environ.get(key) for key in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors that are made have no values, and meet some that have."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def ranks_alone(what: str, batch: Any) -> Iterator[None]:
    """Within it ranks can be taken by themselves, one after the other (`as_rank`).

    Args:
        what: is found, with its verb: "the memory of a rank is".
        batch: of a replica, with values.

    Raises:
        TaskError: the code of the task reads values.
    """
    with told_of_values(what), rows_of_one_sequence(batch), few_chunks():
        yield


@contextlib.contextmanager
def as_rank(dims: ParallelDims, rank: int, mode: FakeTensorMode) -> Iterator[None]:
    """Within it this process is one rank of a layout, and tensors have no values.

    What the rank draws of random numbers changes nothing for those that are taken after it.

    Args:
        dims: the layout.
        rank: which this process is.
        mode: without values.
    """
    with pretended_ranks(dims.ranks, rank), kept_generators(CPU):
        # Before any tensor is fake: a mesh reads the numbers of its ranks.
        if dims.ranks > 1 or dims.needs_fully_shard:
            dims.mesh("cpu")
        if dims.expert > 1:
            dims.expert_mesh("cpu")
        with mode, readable_meshes(), without_warnings():
            yield


def batch_of(task: Task, rows: Sequence[Any]) -> Any:
    """A batch of rows of the data set.

    Raises:
        TaskError: `collate()` raised.
    """
    with user_code("collate()"):
        return task.collate(list(rows))


def built(task: Task, job: Job) -> nn.Module:
    """The model of a task, in training, with what is exchanged of it set apart.

    Raises:
        TaskError: `model()` raised or did not return a module.
    """
    with _weakly_referenced_moved():
        model = build_model(task, job.seed)
    divide(model, job.exchange)
    return model.train()


@contextlib.contextmanager
def _weakly_referenced_moved() -> Iterator[None]:
    """Let `Module.to()` work on parameters without values, as PEFT uses it for each adapter.

    PyTorch swaps these with others, and refuses those that are referenced weakly. Its own mode for
    tensors without values references the latest ones so, which are the same objects after a swap.
    """
    names = vars(torch.utils)  # where `swap_tensors` finds what it asks
    asked = names["weakref"]
    names["weakref"] = SimpleNamespace(getweakrefs=lambda _: ())
    try:
        yield
    finally:
        names["weakref"] = asked


def first_microbatch(task: Task, dims: ParallelDims, batch: Any) -> Any:
    """The inputs of the first micro-batch of a pipeline, or of the batch."""
    inputs, _ = pair_of(task, batch)
    if dims.pipeline == 1 or not isinstance(inputs, torch.Tensor):
        return inputs
    return inputs[: inputs.shape[0] // dims.microbatches]


def distributed(
    task: Task,
    model: nn.Module,
    job: Job,
    dims: ParallelDims,
    batch: Any,
    rank: int,
    *,
    has_values: bool = False,
) -> tuple[ModelShard, ForwardBackward]:
    """Distribute a model, and get ready to train this rank's part of it.

    Args:
        task: of the job.
        model: the whole one.
        job: the job.
        dims: its layout.
        batch: of a replica.
        rank: which this process is.
        has_values: whether tensors have values, and the other ranks are there.

    Raises:
        LayoutError: the model cannot be distributed so.
        TaskError: the code of the task failed.
    """
    shard = parallelize(
        task,
        model,
        dims,
        rank,
        CPU,
        sample=lambda: first_microbatch(task, dims, batch),
        compared=False,
    )
    steps = ForwardBackward(task, shard, rank, CPU, job.datacenter.batch_size)
    if steps.pipeline is not None and not has_values:
        steps.pipeline.assume(_received(shard))
    for stage in shard.stages.values():
        stage.train()
    return shard, steps


def _received(shard: ModelShard) -> dict[int, tuple[torch.Tensor, ...]]:
    """What stages receive from those before them: in mixed precision, in the lower one."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(shard.dims.precision)

    def sent(each: torch.Tensor) -> torch.Tensor:
        return each if dtype is None or not each.is_floating_point() else each.to(dtype)

    return {index: tuple(map(sent, inputs)) for index, inputs in shard.stage_inputs.items()}


def parts_of_step(steps: ForwardBackward) -> Iterator[bool]:
    """The parts of a step that differ, each set up: whether it is the last.

    An accumulated batch has two: gradients are not summed over replicas before the last one.
    """
    for last in (False, True)[-min(steps.dims.accumulate, 2) :]:
        steps.set_gradient_sync(last)
        yield last


def pass_batch(
    task: Task,
    steps: ForwardBackward,
    batch: Any,
    after_forward: Callable[[], None] = lambda: None,
) -> None:
    """Pass a batch forward and backward.

    Args:
        task: has the loss.
        steps: of this rank.
        batch: of a replica.
        after_forward: called after each loss, before its backward pass.

    Raises:
        TaskError: the code of the task failed.
    """
    if steps.pipeline is not None:
        _pass_through(task, steps, steps.pipeline, batch, after_forward)
        return
    total = loss_of(task, steps.model, batch)
    after_forward()
    with user_code("the backward pass"):
        total.backward()  # type: ignore[no-untyped-call]  # PyTorch has no types for it


def _pass_through(
    task: Task,
    steps: ForwardBackward,
    pipeline: Pipeline,
    batch: Any,
    after_forward: Callable[[], None],
) -> None:
    inputs, target = pair_of(task, batch)

    def loss(output: Any, number: int) -> torch.Tensor:
        total = steps.microbatch_loss(target, UnitValues.total, output, number)
        after_forward()
        return total

    pipeline.run(inputs, loss)


def loss_of(task: Task, model: nn.Module, batch: Any) -> torch.Tensor:
    """The sum of the losses of a batch, a scalar, as a step on a rank computes it.

    Raises:
        TaskError: the code of the task failed.
    """
    if defines(task, "training_step"):
        return training_step(task, model, batch).loss
    inputs, target = pair_of(task, batch)
    return losses(task, model, inputs, target)[1].total()
