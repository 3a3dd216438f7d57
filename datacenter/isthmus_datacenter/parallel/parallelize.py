"""Lay a freshly built model out over the ranks.

The order matters: cut into stages, cut matrices, tie again what that untied, wrap blocks for
recomputation, compile them, shard. Blocks are the units that are gathered and freed together: the
children of the model's containers (the blocks of a transformer, the layers of a Sequential), then
the root with what is left.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from isthmus.errors import TaskError
from isthmus.task import Task, user_code
from isthmus_datacenter.parallel import tensor_plans
from isthmus_datacenter.parallel.equivalence_check import run_still, same
from isthmus_datacenter.parallel.linears import lay_out
from isthmus_datacenter.parallel.model_shard import ModelShard, Names
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.pipeline_stages import check_chain, cut
from isthmus_datacenter.parallel.replicas import Replicas

SMALLEST_UNIT = 1 << 16
"""Parameters below which a block is gathered with the rest: a message of its own costs more."""

Flow = tuple[tuple[Any, ...], Any]
"""What went into a stage, and what came out."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ROUNDING = 1e-3
"""Difference of outputs, relative to the largest, by which a sum in another order is still right:
loose enough for a GPU's TF32, and far below what a wrong plan does."""


def parallelize(
    task: Task,
    model: nn.Module,
    layout: ParallelDims,
    rank: int,
    device: torch.device,
    *,
    sample: Callable[[], Any],
    smallest_unit: int = SMALLEST_UNIT,
    backend: Any = "inductor",
) -> ModelShard:
    """This rank's share of the model, on the device. All ranks call this together.

    Args:
        task: may have plans of its own.
        model: the whole model, as the seed makes it; taken apart.
        layout: what to do with it.
        rank: this one.
        device: where the share goes.
        sample: inputs for a few examples; called only where something must be checked.
        smallest_unit: in parameters.
        backend: of `torch.compile`.

    Raises:
        TaskError: the model cannot be laid out like this, and what to do about it.
    """
    if layout.wrapped or layout.tensor > 1:
        _refuse_scalars_and_sparse(model)
    mesh = layout.mesh(device.type) if layout.ranks > 1 or layout.wrapped else None
    names = Names.of(model)
    with user_code("shard_units()"):
        chosen = task.shard_units(model)
    counter = FlopCounterMode(display=False)
    stages, flows = _stages(task, model, layout, sample, counter)
    plan, notes = _tensor_plan(task, model, layout, stages, flows)
    tables = [_parameter_names(names, stage) for stage in stages]
    _refuse_lost(names, tables)
    mine = {at: stages[at] for at in layout.stages_of(rank)}
    share = ModelShard(layout, mine, {at: names.in_stage(stage) for at, stage in mine.items()})
    share.mesh = mesh
    share.notes = notes
    share.sample_flops = int(counter.get_total_flops())
    share.find_tied(tables, rank)
    if mesh is not None and layout.wrapped and layout.adds_up(device.type):
        share.replicas = Replicas(mesh.get_group("replicate"))
    for at, stage in mine.items():
        stage.to(device)
        if layout.tensor > 1:
            assert mesh is not None
            changed = _cut_matrices(stage, plan, mesh["tensor"])
            if flows:
                called = _Called(task, stage) if layout.pipeline == 1 else stage
                _check_cut(called, flows[at], device)
            if layout.compile:
                _detach_from_compiled(changed)
        blocks = units(stage, smallest_unit) if chosen is None else _members(stage, chosen)
        _wrap(blocks or [stage], layout, backend)
        if layout.wrapped and share.replicas is None:
            assert mesh is not None
            _shard(stage, blocks, layout, mesh, last=at == layout.stages - 1)
    return share


# -- stages ---------------------------------------------------------------------------------------


def _stages(
    task: Task,
    model: nn.Module,
    layout: ParallelDims,
    sample: Callable[[], Any],
    counter: FlopCounterMode,
) -> tuple[list[nn.Module], list[Flow]]:
    """All stages, and what a sample makes of each where something is to be checked."""
    if layout.pipeline == 1 and layout.tensor == 1:
        return [model], []
    given = sample()
    with user_code("the model's forward pass on two examples"), counter:
        whole = run_still(_Called(task, model), given)
    if layout.pipeline == 1:
        return [model], [((given,), whole)]
    if type(task).forward is not Task.forward:
        raise TaskError(
            "the task has a forward() of its own, which a pipeline's stages cannot go through; "
            "move it into the model or set pipeline_parallel = 1"
        )
    if not isinstance(given, torch.Tensor):
        raise TaskError(
            f"a pipeline takes a batch of inputs as one tensor, not {type(given).__name__}; "
            "set pipeline_parallel = 1"
        )
    with user_code("pipeline_stages()"):
        made = task.pipeline_stages(model, layout.stages)
    if made is None:
        return _fallback_stages(model, layout.stages, given, whole)
    stages = list(made)
    if len(stages) != layout.stages or not all(isinstance(each, nn.Module) for each in stages):
        raise TaskError(
            f"pipeline_stages(model, {layout.stages}) must return {layout.stages} modules, and "
            f"returned {[type(each).__name__ for each in stages]}"
        )
    try:
        return stages, check_chain(stages, whole, given)
    except Exception as error:
        raise TaskError(
            f"the stages of pipeline_stages() do not do what the model does: {_first_line(error)}"
        ) from error


def _fallback_stages(
    model: nn.Module, count: int, given: torch.Tensor, whole: Any
) -> tuple[list[nn.Module], list[Flow]]:
    stages = cut(model, count, given)
    try:
        return stages, check_chain(stages, whole, given)
    except Exception as error:
        raise TaskError(
            f"the model cannot be cut into {count} pipeline stages without help, because its "
            f"forward() does more than call its blocks in order ({_first_line(error)}); give the "
            "task a pipeline_stages(model, n)"
        ) from error


class _Called(nn.Module):
    """A model as its task calls it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, inputs: Any) -> Any:
        return self.task.forward(self.model, inputs)


def _parameter_names(names: Names, stage: nn.Module) -> dict[str, str]:
    table = names.in_stage(stage)
    return {name: table[name] for name, _ in stage.named_parameters(remove_duplicate=False)}


def _refuse_lost(names: Names, tables: Sequence[dict[str, str]]) -> None:
    held = {name for table in tables for name in table.values()}
    lost = sorted(set(names.parameters.values()) - held)
    if lost:
        raise TaskError(f"parameter {lost[0]!r} is in none of the pipeline's stages")
    for at, table in enumerate(tables):
        if not table:
            raise TaskError(
                f"pipeline stage {at} of {len(tables)} has no parameters; lower pipeline_parallel"
            )


# -- matrices -------------------------------------------------------------------------------------


def _tensor_plan(
    task: Task,
    model: nn.Module,
    layout: ParallelDims,
    stages: Sequence[nn.Module],
    flows: Sequence[Flow],
) -> tuple[list[tuple[nn.Module, Any]], list[str]]:
    """What to cut and how, and what a person should know of it."""
    if layout.tensor == 1:
        return [], []
    with user_code("tensor_parallel_plan()"):
        given = task.tensor_parallel_plan(model)
    if given is not None:
        return tensor_plans.resolve(model, given), []
    (sample,), _ = flows[0]
    called = _Called(task, model)
    plan, notes = tensor_plans.tensor_plan(
        model, layout.tensor, stages, lambda: run_still(called, sample)
    )
    if not plan:
        raise TaskError(
            f"no linear layer or embedding of the model can be cut into tensor_parallel="
            f"{layout.tensor} equal parts; lower it or give the task a tensor_parallel_plan(model)"
        )
    return tensor_plans.resolve(model, plan), notes


def _cut_matrices(
    stage: nn.Module, plan: Sequence[tuple[nn.Module, Any]], mesh: DeviceMesh
) -> list[nn.Module]:
    """Apply the plan to the modules that are here, and tie again what was tied; those modules."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in stage.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name, f"{prefix}.{name}"))
    tied = [users for users in places.values() if len(users) > 1]
    here = {id(module) for module in stage.modules()}
    cut = []
    # PyTorch's eval-mode shortcut reads the matrices of a transformer layer behind its back.
    torch.backends.mha.set_fastpath_enabled(False)
    for module, style in plan:
        if id(module) in here:
            with user_code("the tensor-parallel plan"):
                lay_out(module, style, mesh)
            cut.append(module)
    for users in tied:
        (owner, attribute, first), *others = users
        kept = owner._parameters[attribute]
        for module, name, other in others:
            now = module._parameters[name]
            if getattr(kept, "placements", None) != getattr(now, "placements", None):
                raise TaskError(
                    f"parameters {first!r} and {other!r} are one, and the tensor-parallel plan "
                    "cuts them differently"
                )
            module._parameters[name] = kept
    return cut


def _check_cut(called: nn.Module, flow: Flow, device: torch.device) -> None:
    given, expected = flow
    moved = torch.utils._pytree.tree_map(
        lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, given
    )
    try:
        found = run_still(called, *moved)
    except Exception as error:
        raise TaskError(
            f"with its matrices cut the model fails ({_first_line(error)}); give the task a "
            "tensor_parallel_plan(model) that fits it"
        ) from error
    if not same(expected, found, _ROUNDING):
        raise TaskError(
            "with its matrices cut the model gives another output than whole; correct the task's "
            "tensor_parallel_plan(model), or give it one"
        )


def _detach_from_compiled(cut: Sequence[nn.Module]) -> None:
    """Have embeddings hand on plain tensors: compiled code takes a pending one for granted.

    Its gradient is then lost without a word; waiting for it loses the gradient, too.
    """
    for module in cut:
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, given, output: output + 0)


# -- blocks ---------------------------------------------------------------------------------------


def _wrap(blocks: Sequence[nn.Module], layout: ParallelDims, backend: Any) -> None:
    """On the instances, so that no name changes."""
    for block in blocks:
        if layout.compile:
            # PyTorch's own modules are passed over, unless code of ours is what calls them.
            block.forward = torch.compile(_calling(block), backend=backend)
        if layout.checkpoint_activations:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _calling(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    def call(*given: Any, **named: Any) -> Any:
        return forward(*given, **named)

    # What was compiled is kept by this, up to a limit: blocks of one kind share it, others do not.
    call.__code__ = _code(type(block).__qualname__, call.__code__)
    return call


@functools.cache
def _code(kind: str, code: CodeType) -> CodeType:
    return code.replace(co_name=f"call_{kind}")


def _shard(
    stage: nn.Module,
    blocks: Sequence[nn.Module],
    layout: ParallelDims,
    mesh: DeviceMesh,
    last: bool,
) -> None:
    dtype = _DTYPES.get(layout.precision)
    data = layout.data_mesh(mesh)
    for module in (*(block for block in blocks if block is not stage), stage):
        reduce = None if dtype is None else torch.float32
        # Losses are computed in float32; between stages, half as much travels.
        output = torch.float32 if dtype is not None and module is stage and last else None
        fully_shard(
            module,
            mesh=data,
            reshard_after_forward=layout.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(dtype, reduce, output),
        )


def units(model: nn.Module, smallest: int) -> list[nn.Module]:
    """The blocks that are gathered on their own, in order.

    A block that shares a parameter with the rest of the model stays with the root, which owns
    both ends of it. Nested containers are not searched: a Sequential is one block, a ModuleList
    is never called and stays with the root.
    """
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    found = []
    for container in _outermost_containers(model):
        for block in container.children():
            own = Counter(
                id(parameter)
                for module in block.modules()
                for parameter in module.parameters(recurse=False)
            )
            size = sum(parameter.numel() for parameter in block.parameters())
            shared = any(uses[parameter] != count for parameter, count in own.items())
            if (
                size >= smallest
                and not shared
                and not isinstance(block, (nn.ModuleList, nn.ModuleDict))
            ):
                found.append(block)
    return found


def _members(stage: nn.Module, chosen: Sequence[Any]) -> list[nn.Module]:
    """Those of the task's units that are in this stage."""
    here = {id(module) for module in stage.modules()}
    for unit in chosen:
        if not isinstance(unit, nn.Module):
            raise TaskError(f"shard_units() returned {type(unit).__name__}, not an nn.Module")
    return [unit for unit in chosen if id(unit) in here]


def _outermost_containers(module: nn.Module) -> list[nn.Module]:
    if _is_container(module):
        return [module]
    return [found for child in module.children() for found in _outermost_containers(child)]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))


def _refuse_scalars_and_sparse(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise TaskError(
                f"parameter {name!r} has no dimension, and the datacenter shards along the "
                "first one; give it the shape (1,)"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TaskError(f"module {name!r} has sparse=True, which several ranks cannot add up")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
