"""Shard parameters, gradients and optimizer state over the data-parallel ranks (ZeRO).

`apply_zero_stage` is the one place where a job's `zero_stage` becomes calls of PyTorch's
`fully_shard`. What else depends on the stage is elsewhere: the mesh (`ParallelDims.axes`), when
gradients are reduced (`ForwardBackward.set_gradient_sync`), and whether whole replicas on
processors do without `fully_shard` (`ParallelDims.applies_fully_shard`).

The *sharding units*, whose parameters are gathered and freed together, are the children of the
model's containers (`isthmus.task.scoring.blocks`), then the root with everything else. The same
units are compiled and recomputed (`wrap_unit`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from isthmus.errors import TaskError
from isthmus.task.scoring.recomputation import recompute
from isthmus_datacenter.parallel.host_messages import FreedActivations, send_without_overlap
from isthmus_datacenter.parallel.parallel_dims import ParallelDims

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply_zero_stage(
    stage: nn.Module,
    units: Sequence[nn.Module],
    dims: ParallelDims,
    mesh: DeviceMesh,
    *,
    is_last_stage: bool,
    freed: FreedActivations | None = None,
) -> None:
    """Apply `fully_shard` to the units of a pipeline stage and then to the stage itself.

    The ZeRO stage (Rajbhandari et al. 2020) selects the mesh and one option:

      * 0: a mesh (replicate, shard=1), so parameters are replicated and gradients all-reduced;
      * 1 and 2: sharded, and gathered parameters are kept from the forward to the backward pass.
        The two differ only when gradients are accumulated (`ForwardBackward`);
      * 3: sharded, and gathered again for the backward pass.

    With `shard_groups`, stages 1 to 3 have a mesh (replicate, shard), too: each group has all
    shards, and gathers among its own ranks (hybrid sharding, HSDP).

    `freed` returns freed activations on processors; None keeps them for the next step.

    Raises:
        TaskError: see `_refuse_shared`.
    """
    dtype = _DTYPES.get(dims.precision)
    data_mesh = dims.data_mesh(mesh)
    _refuse_shared(stage, units)
    _make_contiguous(stage)
    # A unit that is within another one comes before it, which takes what is left.
    sizes = {id(unit): sum(1 for _ in unit.modules()) for unit in units}
    own = [
        each
        for each in sorted(units, key=lambda unit: sizes[id(unit)])
        if each is not stage and not isinstance(each, FSDPModule)
    ]
    for module in (*own, stage):
        # Sums over many replicas lose small gradients in half precision.
        reduce_dtype = None if dtype is None else torch.float32
        # Losses are computed in float32; activations between stages stay in half precision.
        needs_float32 = dtype is not None and module is stage and is_last_stage
        output_dtype = torch.float32 if needs_float32 else None
        fully_shard(
            module,
            mesh=data_mesh,
            reshard_after_forward=dims.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype, output_dtype),
            offload_policy=_offload(dims, mesh),
        )
        _choose_messages(module, dims, mesh, freed)


def shard_experts(
    experts: Sequence[nn.Module],
    dims: ParallelDims,
    mesh: DeviceMesh,
    *,
    freed: FreedActivations | None = None,
) -> None:
    """Apply `fully_shard` to experts that are divided, on the mesh of those (`expert_mesh`).

    Called before the units that contain them, with the same `freed`.
    """
    dtype = _DTYPES.get(dims.precision)
    reduce_dtype = None if dtype is None else torch.float32
    for module in experts:
        fully_shard(
            module,
            mesh=dims.data_mesh(mesh),
            reshard_after_forward=dims.reshard_after_forward,
            # Activations have the type of the block; the weights of the routing keep theirs.
            mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False),
            offload_policy=_offload(dims, mesh),
        )
        _choose_messages(module, dims, mesh, freed)


def _refuse_shared(stage: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse units that use a parameter of another unit, or of the rest of the model.

    It would be gathered with one of the two, and be a shard for the other.

    Raises:
        TaskError: there is one.
    """
    chosen = {id(each) for each in units}
    unit_of: dict[str, str] = {}
    first_use: dict[int, str] = {}
    # By all paths, as two units may have one module.
    for path, module in stage.named_modules(remove_duplicate=False):
        is_unit = id(module) in chosen or isinstance(module, FSDPModule)
        unit_of[path] = path if is_unit else unit_of.get(path.rpartition(".")[0], "")
        for name, parameter in module.named_parameters(recurse=False):
            own = unit_of[path]
            other = first_use.setdefault(id(parameter), own)
            if other != own and stage.get_submodule(other) is not stage.get_submodule(own):
                unit, rest = (own, other) if own else (other, own)
                where = f"of {rest!r}" if rest else "of the rest of the model"
                raise TaskError(
                    f"shard_units() returned {unit!r}, which has parameter "
                    f"{f'{path}.{name}'.lstrip('.')!r}, and this is one {where}, too; ranks gather "
                    "a parameter with one unit only: leave out the units that share it"
                )


def _make_contiguous(stage: nn.Module) -> None:
    """Lay out the elements of parameters in order, of which `fully_shard` takes no others.

    Those of convolutions in `torch.channels_last` are not, nor is a transposed matrix.
    """
    for parameter in stage.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _choose_messages(
    module: nn.Module, dims: ParallelDims, mesh: DeviceMesh, freed: FreedActivations | None
) -> None:
    if not dims.overlaps_messages(mesh.device_type):
        assert isinstance(module, FSDPModule)
        send_without_overlap(module, freed)


def _offload(dims: ParallelDims, mesh: DeviceMesh) -> OffloadPolicy:
    """Where shards are between their uses."""
    if not dims.offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")


def parts_of(unit: nn.Module, smallest: int) -> list[nn.Module]:
    """The modules in a unit that contain no others and have at least `smallest` parameters.

    None if there is one only, which is most of the unit by itself.
    """
    uses = Counter(
        id(parameter) for module in unit.modules() for parameter in module.parameters(recurse=False)
    )
    parts = [
        module
        for module in unit.modules()
        if not any(True for _ in module.children())
        and sum(parameter.numel() for parameter in module.parameters()) >= smallest
        and all(uses[id(parameter)] == 1 for parameter in module.parameters())
    ]
    return parts if len(parts) > 1 else []


def units_in_stage(stage: nn.Module, task_units: Sequence[Any]) -> list[nn.Module]:
    """Select those of a task's `shard_units` that are in a pipeline stage, each once.

    Raises:
        TaskError: one of them is not a module.
    """
    modules = {id(module) for module in stage.modules()}
    for unit in task_units:
        if not isinstance(unit, nn.Module):
            raise TaskError(f"shard_units() returned {type(unit).__name__}, not an nn.Module")
    return list({id(unit): unit for unit in task_units if id(unit) in modules}.values())


def wrap_unit(unit: nn.Module, number: int, dims: ParallelDims, backend: Any) -> None:
    """Compile a unit and recompute its activations, where the job says so.

    `number` is that of the unit in its stage. The instance's `forward` is replaced, so that no
    parameter name changes.
    """
    if dims.compile:
        # torch.compile skips PyTorch's own modules unless a function of another package calls them.
        unit.forward = torch.compile(_calling(unit), backend=backend)
    if dims.checkpoint_activations and number % dims.checkpoint_every == 0:
        keep_products = dims.checkpoint_activations == "operators"
        # With other positions, or tokens, each rank may call other layers of a block.
        to_end = dims.shares_positions or dims.expert > 1
        recompute(unit, keep_products=keep_products, to_end=to_end, compares=True)


def _calling(unit: nn.Module) -> Callable[..., Any]:
    forward = unit.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # The compiler caches by code object, up to a limit: units of one class share a code object.
    call.__code__ = _code_for(type(unit).__qualname__, call.__code__)
    return call


@functools.cache
def _code_for(class_name: str, code: CodeType) -> CodeType:
    return code.replace(co_name=f"call_{class_name}")
