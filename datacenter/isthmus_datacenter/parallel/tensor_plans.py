"""Default tensor-parallel plans, for models whose task does not give one.

Two linear layers with only an element-wise function between them (known from a `Sequential`, or
from the names that transformers give them) are sharded along the hidden dimension between them,
and attentions by heads where a numerical check passes (`attention`). Every other linear layer
(`nn.Linear` or `Conv1D`, see `tensor_styles`) and embedding is sharded along its outputs, which are
all-gathered at once: correct wherever the layer is *called*, at the price of one collective per
layer. Everything else is replicated on every rank.

None of this can be proved from the outside, so `parallelize` compares the outputs and gradients of
the whole and of the sharded model for a sample of the data.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.utils.parametrize import is_parametrized

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.attention import Attention, find_head_sharding
from isthmus_datacenter.parallel.sequence_parallel import (
    POSITIONS,
    ChecksHiddenStates,
    GathersPositions,
    SequenceBlocks,
)
from isthmus_datacenter.parallel.tensor_styles import (
    FusedAttentionParallel,
    column_wise,
    linear_widths,
    row_wise,
)

TensorPlan = Mapping[str, ParallelStyle]
"""Styles by module name, as a task's `tensor_parallel_plan` returns them."""

_REPORTED_FRACTION = 0.1
"""Fraction of the parameters that may stay replicated without a note to the user."""

_MLP_NAMES = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("linear1",), "linear2"),
    (("fc1",), "fc2"),
    (("w1",), "w2"),
    (("wi",), "wo"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("up",), "down"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
"""Names of the layers of an MLP in common transformers: into the hidden units, and out of them."""

_ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Hardswish,
    nn.Dropout,
    nn.Identity,
)
_OPAQUE = (nn.MultiheadAttention, nn.RNNBase)
"""Modules that use their children's weights without calling the children."""


def default_tensor_plan(
    model: nn.Module,
    degree: int,
    stages: Sequence[nn.Module],
    run: Callable[[], Any],
    *,
    sequence: bool = False,
    compared: bool = True,
) -> tuple[list[tuple[nn.Module, ParallelStyle]], list[str]]:
    """Plan how to shard a model's layers over `degree` tensor-parallel ranks.

    Only layers whose widths `degree` divides are sharded.

    Args:
        model: the whole model.
        degree: number of tensor-parallel ranks.
        stages: the pipeline stages of the model. Activations between stages are not sharded, so no
            layers of two stages are sharded as a pair.
        run: sends a few examples through the whole model.
        sequence: whether activations within blocks are sharded along the sequence
            (`sequence_parallel`).
        compared: whether the heads of attentions are compared by value; see `find_head_sharding`.

    Returns:
        Modules with their styles, maybe none; and notes for the user on what stays inefficient.

    Raises:
        TaskError: the model has no blocks for `sequence`.
    """
    stage_modules = [{id(module) for module in stage.modules()} for stage in stages]
    plan: dict[str, ParallelStyle] = {}
    # Modules that share a parameter have one style together, at the end.
    planned = _tied_modules(model)
    modules = {
        name: each for name, each in model.named_modules() if not _inside_opaque(model, name)
    }
    names = {id(module): name for name, module in modules.items()}

    checking: list[tuple[nn.Module, ParallelStyle]] = []

    def can_shard_jointly(layers: Sequence[nn.Module]) -> bool:
        ids = [id(layer) for layer in layers]
        return planned.isdisjoint(ids) and any(stage.issuperset(ids) for stage in stage_modules)

    def shard_pair(
        inner: Sequence[nn.Module], outer: nn.Module, inputs: Placement | None = None
    ) -> None:
        plan.update({names[id(each)]: column_wise(each, inputs=inputs) for each in inner})
        if inputs is not None:
            checking.extend((each, ChecksHiddenStates()) for each in inner)
        plan[names[id(outer)]] = row_wise(outer, outputs=positions(outer))
        planned.update(id(each) for each in (*inner, outer))

    # First: what is sharded by heads needs one collective, and its layers would match later rules,
    # too.
    attentions, others = find_head_sharding(model, degree, run, compared=compared)
    attentions = [
        each
        for each in attentions
        if can_shard_jointly([*each.input_projections, *each.output_projections])
    ]
    blocks = None
    if sequence:
        attending = {id(each.module) for each in attentions}
        blocks = SequenceBlocks.find(model, stages, attending, "sequence_parallel")

    def positions(layer: nn.Module) -> Placement | None:
        """What a rank has of activations outside of attentions and MLPs; None for all."""
        return POSITIONS if blocks is not None and id(layer) in blocks.modules else None

    gathering: list[tuple[nn.Module, ParallelStyle]] = []
    for attention in attentions:
        # An attention reads the number of positions from its inputs, so they are gathered before
        # it; where it is the block itself, only before its layers.
        inputs = None
        if blocks is not None and id(attention.module) in blocks.modules:
            if blocks.is_block(attention.module):
                inputs = POSITIONS
            else:
                gathering.append((attention.module, GathersPositions()))
        shard_pair(
            () if attention.fused else attention.input_projections,
            attention.output_projections[0],
            inputs,
        )
        if attention.fused:
            plan[attention.name] = FusedAttentionParallel(
                attention.fused, attention.pieces, attention.width_attributes, inputs
            )
            planned.add(id(attention.input_projections[0]))
    for module in modules.values():
        for into, out in _mlp_pairs(module):
            layers = [module.get_submodule(name) for name in (*into, out)]
            if can_shard_jointly(layers) and _width(layers[-1], 0) % degree == 0:
                shard_pair(layers[:-1], layers[-1], positions(layers[-1]))
    # What is left, alone: its outputs are gathered at once, which is correct wherever it is called.
    for name, module in modules.items():
        # In blocks that divide the sequence, each rank would gather outputs for other positions.
        if id(module) in planned or positions(module) is not None:
            continue
        if _is_embedding(module) and module.embedding_dim % degree == 0:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        elif linear_widths(module) is not None and _width(module, 1) % degree == 0:
            plan[name] = column_wise(module, gather_output=True)
    plan.update(_plan_of_tied(model, modules, degree))
    notes = [*_notes_on_attention(others, degree), *_notes_on_replicated(model, plan)]
    styles = resolve_plan(model, plan)
    if blocks is not None:
        # Blocks divide their inputs before any layer of theirs is called.
        styles += [*blocks.styles(), *gathering, *checking]
    return styles, notes


def resolve_plan(model: nn.Module, plan: TensorPlan) -> list[tuple[nn.Module, ParallelStyle]]:
    """Find the modules that a plan names; `*` matches one component of a dotted name.

    Raises:
        TaskError: a name matches no module, or a value is not a style.
    """
    resolved = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise TaskError(
                f"tensor_parallel_plan() gives {type(style).__name__} for {pattern!r}, not a "
                "torch.distributed.tensor.parallel.ParallelStyle"
            )
        matches = [
            module
            for name, module in model.named_modules()
            if name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)
        ]
        if not matches:
            raise TaskError(
                f"tensor_parallel_plan() names {pattern!r}, and the model has no such module"
            )
        resolved += [(module, style) for module in matches]
    return resolved


def _notes_on_attention(others: Sequence[Attention], degree: int) -> Iterator[str]:
    """Note attentions that are sharded layer by layer instead of by heads."""
    if not others:
        return
    name = others[0].name
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    if others[0].fused:
        why = f"{others[0].fused!r} computes queries, keys and values in one"
    else:
        queries, keys, _ = (_width(layer, 1) for layer in others[0].input_projections)
        why = f"queries are {queries} wide, keys {keys}"
    yield (
        f"{name!r}{more} cannot be sharded by heads into tensor_parallel={degree} equal parts "
        f"({why}): the output of each of its layers is gathered separately"
    )


def _notes_on_replicated(model: nn.Module, plan: TensorPlan) -> Iterator[str]:
    """Note parameters that take memory on every rank although tensor_parallel is above 1."""
    sharded = {
        id(parameter) for name in plan for parameter in model.get_submodule(name).parameters()
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    replicated = {
        name: sum(
            each.numel() for each in module.parameters(recurse=False) if id(each) not in sharded
        )
        for name, module in model.named_modules()
    }
    count = sum(replicated.values())
    if total and count > _REPORTED_FRACTION * total:
        largest = max(replicated, key=replicated.__getitem__)
        kind = type(model.get_submodule(largest)).__name__
        yield (
            f"{count / total:.0%} of the parameters are replicated on every rank, the largest in "
            f"{largest!r} ({kind}); a tensor_parallel_plan(model) of the task can shard more"
        )


def _plan_of_tied(model: nn.Module, modules: Mapping[str, nn.Module], degree: int) -> TensorPlan:
    """Shard an embedding and the head that shares its weight both by vocabulary, or neither."""
    groups = _tied(model)
    names = {id(module): name for name, module in modules.items()}

    def is_divisible(users: Sequence[nn.Module]) -> bool:
        return all(
            id(each) in names
            and (_is_linear(each) or _is_embedding(each))
            and each.weight.shape[0] % degree == 0
            for each in users
        )

    # A head may also share its bias, with a module that cannot be sharded.
    whole = {id(each) for users in groups if not is_divisible(users) for each in users}
    return {
        names[id(layer)]: (
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            if isinstance(layer, nn.Embedding)
            else ColwiseParallel(output_layouts=Replicate())
        )
        for users in groups
        if whole.isdisjoint(map(id, users))
        for layer in users
    }


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and linear_widths(module) is not None


def _is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether a module is an embedding that is called with its indices and nothing else."""
    return (
        isinstance(module, nn.Embedding)
        and not is_parametrized(module)
        and len(inspect.signature(module.forward).parameters) == 1
    )


def _mlp_pairs(module: nn.Module) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of children that are linear layers with only element-wise functions between them."""
    children = dict(module.named_children())
    if isinstance(module, nn.Sequential):
        previous: str | None = None
        for name, child in children.items():
            if linear_widths(child) is not None:
                if previous is not None:
                    yield (previous,), name
                    previous = None
                else:
                    previous = name
            elif not isinstance(child, _ELEMENTWISE):
                previous = None
        return
    for into, out in _MLP_NAMES:
        layers = [children.get(name) for name in (*into, out)]
        if any(linear_widths(layer) is None for layer in layers):
            continue
        hidden = _width(layers[-1], 0)
        produced = {_width(layer, 1) for layer in layers[:-1]}
        # A norm over the hidden units would normalise only the part that is on its rank.
        normalised = any(
            tuple(getattr(child, "normalized_shape", ())) == (hidden,)
            for child in children.values()
        )
        if produced == {hidden} and not normalised:
            yield into, out
            return


def _width(layer: nn.Module | None, which: int) -> int:
    """Number of inputs (0) or outputs (1) of a linear layer."""
    widths = linear_widths(layer)
    assert widths is not None
    return widths[which]


def _tied(model: nn.Module) -> list[list[nn.Module]]:
    """Groups of modules that share a parameter."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    return [modules for modules in users.values() if len(modules) > 1]


def _tied_modules(model: nn.Module) -> set[int]:
    return {id(module) for users in _tied(model) for module in users}


def _inside_opaque(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    return any(
        isinstance(model.get_submodule(".".join(parts[:end])), _OPAQUE) for end in range(len(parts))
    )
