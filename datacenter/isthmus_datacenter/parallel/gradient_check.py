"""Check that a sharded model computes the same gradients as the whole one, on a sample.

The outputs of a sharded model may be right and its gradients wrong. A parameter that every rank has
whole gets the same gradient on all ranks if it acts on whole activations. If it acts on sharded
ones, as a norm within attention heads does, each rank gets the gradient of its part, and that of
the whole is the sum (in DTensor's words, it is *partial*). Which of them it is cannot be read off
the model, so the gradients of a few examples say so: `compare_gradients` finds the reduction that
gives each parameter the gradient it has in the whole model, or names the parameter.

Whole gradients are as large as the model, so they are not kept. Of each gradient remain its norm
and its inner products with a few tensors of random signs, which every rank can make for its own
shard; of a difference, their mean square is the expected square of its norm. Blocks are recomputed
in the backward pass, so that only the activations of one are in memory.

Shape legend: `P` is the number of projections of each gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves, tree_map

from isthmus.task.scoring.host_generators import HostGenerators
from isthmus.task.scoring.kept_values import KeptValues
from isthmus.task.scoring.recomputation import recompute
from isthmus_datacenter.parallel.equivalence_check import PartitionError
from isthmus_datacenter.parallel.given_values import Read, values_while_called
from isthmus_datacenter.parallel.random_draws import DrawsByModule, FixedDraws
from isthmus_datacenter.rank_messages import RankMessages

INPUTS = "the inputs"
"""Stands for a stage's inputs among the names of parameters."""

_PROJECTIONS = 8
_TOLERANCE = 1e-3
"""Difference allowed relative to the norm of a gradient: float32 sums in another order."""
_ROUNDING = 16.0
"""Difference allowed in units of the precision of the parameter's type, where that is lower."""
_FLOOR = 1e-3
"""Norm of a gradient relative to the largest, below which the difference is relative to that:
some gradients are zero but for rounding, such as that of a bias of attention keys."""
_REPLACED_ZERO = 0.02
"""Magnitude of parameters that are all zero, during the check: they hide gradients of others."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What is kept of the gradient of one parameter on one rank."""

    projections: tuple[float, ...]
    norm: float
    adds_up: bool
    """Whether the ranks' gradients are parts or summands of the whole by their placement."""
    precision: float
    """Precision of the parameter's type, as `torch.finfo.eps`."""


@dataclasses.dataclass(frozen=True)
class GradientRecord:
    """Gradients and random draws of one pass of a module forward and backward."""

    gradients: Mapping[str, Gradient]
    """By parameter, in the order of the backward pass; those without gradient are missing."""
    draws: DrawsByModule
    zeros: frozenset[str]
    """Parameters that are all zero."""


_RECORDS: RankMessages[GradientRecord] = RankMessages("gradients", GradientRecord, 1 << 26)


@dataclasses.dataclass(frozen=True)
class Reductions:
    """How gradients of parameters that all tensor-parallel ranks have whole become one gradient."""

    summed: frozenset[str] = frozenset()
    """Parameters whose gradients are partial; all others are equal but for rounding."""
    unknown: frozenset[str] = frozenset()
    """Parameters that no example of the sample reached."""


def record_gradients(
    called: nn.Module,
    module: nn.Module,
    names: Mapping[str, str],
    inputs: Sequence[Any],
    units: Sequence[nn.Module],
    *,
    differentiable_inputs: bool,
    zeros: frozenset[str] | None = None,
    read: Read | None = None,
) -> GradientRecord:
    """Run a module forward and backward from a fixed gradient of its outputs.

    Afterwards the module is as before.

    Args:
        called: what to call, with the module inside.
        module: has the parameters; in training, with random draws replaced by fixed values.
        names: the model's names of the module's parameters.
        inputs: arguments of the call.
        units: modules within it that are recomputed in the backward pass.
        differentiable_inputs: whether the gradient of the inputs is passed on, to another stage.
        zeros: names of parameters to take for zero; None to look.
        read: gives the values of parameters that have no memory, to each module while it is
            called; None for a module with values.
    """
    parameters = {names[name]: each for name, each in module.named_parameters()}
    zero_names = set(zeros or ())
    found: dict[str, Gradient] = {}
    inputs = tree_map(functools.partial(_as_leaf, differentiable=differentiable_inputs), inputs)
    with contextlib.ExitStack() as restored:
        if read is None:
            if zeros is None:
                zero_names.update(name for name, each in parameters.items() if _is_zero(each))
            for name, each in parameters.items():
                if not each.requires_grad:
                    continue
                take = functools.partial(_take_gradient, name, found)
                hook = each.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]  # PyTorch's own
                restored.callback(hook.remove)
            restored.enter_context(_replaced_zeros(parameters, zero_names))
        else:
            read_nonzero = functools.partial(
                _read_nonzero, read, names, zero_names, looks=zeros is None
            )

            def sketch(path: str, gradient: torch.Tensor) -> None:
                found[names[path]] = _sketch(names[path], gradient)

            restored.enter_context(values_while_called(module, read_nonzero, sketch))
        restored.enter_context(in_training(module))
        restored.enter_context(_recomputed(units))
        restored.enter_context(_full_precision())
        draws = restored.enter_context(FixedDraws(module))
        outputs = [each for each in tree_leaves(called(*inputs)) if _has_gradient(each)]
        draws.recording = False  # a recomputation is no further draw
        if outputs:  # not of a stage that is frozen
            directions = [_direction(each, at) for at, each in enumerate(outputs)]
            torch.autograd.backward(outputs, directions)
    for at, each in enumerate(tree_leaves(inputs)):
        if isinstance(each, torch.Tensor) and each.grad is not None:
            name = f"{INPUTS} {at}"
            found[name] = _sketch(name, each.grad)
    return GradientRecord(found, draws.draws, frozenset(zero_names))


def compare_gradients(
    whole: GradientRecord, ranks: Sequence[GradientRecord], replicated: Sequence[str]
) -> Reductions:
    """Find how the gradients of the tensor-parallel ranks become those of the whole model.

    Args:
        whole: of the whole model.
        ranks: of each rank of a tensor-parallel group.
        replicated: the trained parameters that all ranks have whole.

    Raises:
        PartitionError: no reduction gives some parameter its gradient.
    """
    largest = max((each.norm for each in whole.gradients.values()), default=0.0)
    summed = set()
    known: dict[str, bool] = {}
    # In this order: a wrong gradient makes those of everything before it wrong, so the first is
    # the cause.
    for name, expected in whole.gradients.items():
        if not math.isfinite(expected.norm):
            raise PartitionError(
                f"the model cannot be compared, as the gradient of {_quoted(name)} for two "
                "examples is not finite",
                "set tensor_parallel = 1",
            )
        local = [rank.gradients.get(name) for rank in ranks]
        parts = [each for each in local if each is not None]
        if len(parts) < len(local):
            raise _wrong(name, "no gradient")
        limit = max(_TOLERANCE, _ROUNDING * expected.precision) * max(
            expected.norm, _FLOOR * largest
        )
        total = [sum(column) for column in zip(*(each.projections for each in parts), strict=True)]
        error_of_sum = _distance(total, expected.projections)
        error_of_each = max(_distance(each.projections, expected.projections) for each in parts)
        if parts[0].adds_up:
            if not error_of_sum <= limit:
                raise _wrong(name, "another gradient than whole")
            continue
        if expected.norm == 0.0 and all(each.norm == 0.0 for each in parts):
            continue
        if not min(error_of_each, error_of_sum) <= limit:
            raise _wrong(name, "another gradient than whole")
        known[name] = error_of_sum < error_of_each
        if name.startswith(INPUTS) and known[name]:
            raise _wrong(name, "another gradient than whole")
        if known[name]:
            summed.add(name)
    extra = {name for rank in ranks for name in rank.gradients} - whole.gradients.keys()
    if extra:
        raise _wrong(min(extra), "a gradient that it does not get whole")
    # The same parameter of another block, such as an expert that the sample reached.
    alike: dict[str, set[bool]] = {}
    for name, is_sum in known.items():
        alike.setdefault(_pattern(name), set()).add(is_sum)
    unknown = set()
    for name in replicated:
        if name in known:
            continue
        match alike.get(_pattern(name)):
            case None:
                unknown.add(name)
            case found if len(found) == 1:
                summed |= {name} if True in found else set()
            case _:
                unknown.add(name)
    # Parameters without any gradient may never get one, but these do in the first step.
    zero = unknown & whole.gradients.keys()
    if zero:
        raise PartitionError(
            f"the gradient of {_quoted(min(zero))} for two examples is zero, which does not show "
            "whether the ranks have to sum or to average it",
            "freeze it, or set tensor_parallel = 1",
        )
    return Reductions(frozenset(summed), frozenset(unknown))


def exchange_records(own: GradientRecord, group: dist.ProcessGroup) -> list[GradientRecord]:
    """The records of all ranks of a group, in their order. All of them call this together."""
    return _RECORDS.all_gather(own, group)


def _quoted(name: str) -> str:
    return name if name.startswith(INPUTS) else f"parameter {name!r}"


def _wrong(name: str, what: str) -> PartitionError:
    return PartitionError(
        f"the model gives {_quoted(name)} {what} (a layer after it may combine sharded with whole "
        "activations)",
        "give the task a tensor_parallel_plan(model) that leaves that part whole, or set "
        "tensor_parallel = 1",
    )


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    squares = [(left - right) ** 2 for left, right in zip(first, second, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


# -- one pass -------------------------------------------------------------------------------------


def _as_leaf(value: Any, *, differentiable: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(differentiable and value.is_floating_point())


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _direction(output: torch.Tensor, at: int) -> torch.Tensor:
    """A fixed gradient of an output, the same for a whole and for a sharded model."""
    generator = torch.Generator().manual_seed(at)
    # Not normally distributed numbers, of which `FixedDraws` makes zeros. Nor signs alone: those of
    # two examples would cancel in the gradient of a bias, which then says nothing.
    signs = torch.randint(2, output.shape, generator=generator) * 2 - 1
    sizes = torch.randint(256, 769, output.shape, generator=generator) / 512
    return (signs * sizes).to(output.device, output.dtype)


def _take_gradient(name: str, found: dict[str, Gradient], parameter: torch.Tensor) -> None:
    """Keep the projections of a gradient, and free it."""
    assert parameter.grad is not None
    found[name] = _sketch(name, parameter.grad)
    parameter.grad = None


@torch.no_grad()
def _sketch(name: str, gradient: torch.Tensor) -> Gradient:
    adds_up = isinstance(gradient, DTensor) and not all(
        each.is_replicate() for each in gradient.placements
    )
    values = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    *outer, last = _signs(name, gradient)
    # (..., P): the inner product with the random signs of one dimension after the other.
    projected = values @ last.to(values)
    for signs in reversed(outer):
        projected = (projected * signs.to(projected)).sum(-2)
    return Gradient(
        tuple(projected.tolist()),
        float(values.norm()),
        adds_up,
        torch.finfo(gradient.dtype).eps,
    )


def _signs(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Random signs for this rank's part of each dimension, (size of the part, P)."""
    shape: Sequence[int] = tensor.shape
    offsets: Sequence[int] = [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        shape, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    signs = []
    for dim, (size, offset) in enumerate(zip(shape, offsets, strict=True)):
        digest = hashlib.sha256(f"{name}/{dim}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        whole = torch.randint(2, (tensor.shape[dim], _PROJECTIONS), generator=generator) * 2 - 1
        signs.append(whole[offset : offset + size])
    return signs


def _is_zero(parameter: torch.Tensor) -> bool:
    """Whether all elements are the positive zero, which can be restored bit for bit."""
    return (
        parameter.is_floating_point()
        and not bool(parameter.detach().any())
        and not bool(parameter.detach().signbit().any())
    )


@contextlib.contextmanager
def _replaced_zeros(
    parameters: Mapping[str, torch.Tensor], zeros: Collection[str]
) -> Iterator[None]:
    """Within it parameters that are all zero have small values, of random signs."""
    parts = {
        name: each.to_local() if isinstance(each, DTensor) else each.data
        for name, each in parameters.items()
        if name in zeros
    }
    with torch.no_grad():
        for name, part in parts.items():
            part.copy_(_small_values(name, parameters[name], part))
    try:
        yield
    finally:
        with torch.no_grad():
            for part in parts.values():
                part.zero_()


def _small_values(name: str, parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Values that do not hide gradients of other parameters, for this rank's part of one."""
    values = torch.full_like(part, _REPLACED_ZERO)
    for dim, signs in enumerate(_signs(name, parameter)):
        shape = [-1 if at == dim else 1 for at in range(part.ndim)]
        values *= signs[:, 0].to(values).view(shape)
    return values


@torch.no_grad()
def _read_nonzero(
    read: Read,
    names: Mapping[str, str],
    zeros: set[str],
    path: str,
    parameter: nn.Parameter,
    *,
    looks: bool,
) -> torch.Tensor:
    """The values of a parameter, or others if they are all zero; with `looks` these are noted."""
    values = read(path, parameter)
    name = names[path]
    if looks and _is_zero(values):
        zeros.add(name)
    if name in zeros:
        part = values.to_local() if isinstance(values, DTensor) else values
        part.copy_(_small_values(name, values, part))
    return values


@contextlib.contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    """Within it the module trains; what it keeps and the random generators are restored.

    It keeps modes, buffers, and what is in attributes (`KeptValues`).
    """
    modes = {each: each.training for each in module.modules()}
    kept = KeptValues(modes)
    buffers = [(each, each.detach().clone()) for each in module.buffers()]
    on_device = any(each.device.type == "cuda" for each in module.parameters())
    devices = [torch.cuda.current_device()] if on_device else []
    drawn = HostGenerators.now()
    try:
        module.train()
        # As PyTorch's: ranks that skip other blocks would wait for each other without an end.
        HostGenerators.seed(0)
        with torch.enable_grad(), torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(0)
            if on_device:
                torch.cuda.manual_seed(0)
            yield
    finally:
        drawn.restore()
        kept.undo()
        for each, training in modes.items():
            each.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextlib.contextmanager
def _recomputed(units: Sequence[nn.Module]) -> Iterator[None]:
    """Within it the units keep no activations for the backward pass."""
    before = [(unit, vars(unit).get("forward")) for unit in units]
    try:
        for unit in units:
            # One of the ranks may call a layer that another does not.
            recompute(unit, to_end=True)
        yield
    finally:
        for unit, forward in before:
            del unit.forward
            if forward is not None:
                unit.forward = forward


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Within it matrix products of float32 are not rounded to TF32 on GPUs."""
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions
