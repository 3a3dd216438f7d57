"""How to cut the matrices of a model where its task does not say.

Two linear layers with only an element-wise function between them (known from a `Sequential`, or
from the names transformers give them) are cut along what lies between, and attentions by heads
where a trial shows that to be right (`attention`). Any other linear layer (of either kind,
`linears`) or embedding is cut along its outputs, which are gathered right away: right wherever the
layer is *called*, at the price of one message per layer. All else is whole on every rank.

That this is right cannot be proved from the outside, so a sample of the data goes through the whole
model and through the cut one, and the outputs must agree.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.attention import Attention, by_heads
from isthmus_datacenter.parallel.fused_attention import ByHeads
from isthmus_datacenter.parallel.linears import by_inputs, by_outputs, widths

Plan = Mapping[str, ParallelStyle]

_WORTH_SAYING = 0.1
"""Share of the parameters."""

_PAIRS = (
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
"""Names of the layers of an MLP in common transformers: those into the hidden units, and out."""

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
_CLOSED = (nn.MultiheadAttention, nn.RNNBase)
"""Modules that use their children's matrices without calling the children."""


def tensor_plan(
    model: nn.Module, degree: int, stages: Sequence[nn.Module], run: Callable[[], Any]
) -> tuple[Plan, list[str]]:
    """A plan for any model, by module name; maybe empty. And what in it could be better.

    Of layers whose widths `degree` divides. Between `stages` everything is whole: no layers are cut
    together across two of them. `run` sends a few examples through the whole model.
    """
    within = [{id(module) for module in stage.modules()} for stage in stages]
    plan: dict[str, ParallelStyle] = {}
    taken = _tied_modules(model)
    modules = {
        name: each for name, each in model.named_modules() if not _inside_closed(model, name)
    }
    names = {id(module): name for name, module in modules.items()}

    def together(children: Sequence[nn.Module]) -> bool:
        ids = [id(child) for child in children]
        return taken.isdisjoint(ids) and any(here.issuperset(ids) for here in within)

    def cut(into: Sequence[nn.Module], out: nn.Module) -> None:
        plan.update({names[id(each)]: by_outputs(each) for each in into})
        plan[names[id(out)]] = by_inputs(out)
        taken.update(id(each) for each in (*into, out))

    attentions, others = by_heads(model, degree, run)
    for each in attentions:
        if not together([*each.into, *each.mixes]):
            continue
        cut(() if each.fused else each.into, each.mixes[0])
        if each.fused:
            plan[each.name] = ByHeads(each.fused, each.pieces, each.remembered)
            taken.add(id(each.into[0]))
    for module in modules.values():
        for into, out in _pairs(module):
            children = [module.get_submodule(name) for name in (*into, out)]
            if together(children) and _width(children[-1], 0) % degree == 0:
                cut(children[:-1], children[-1])
    for name, module in modules.items():
        if id(module) in taken:
            continue
        if isinstance(module, nn.Embedding) and module.embedding_dim % degree == 0:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        elif widths(module) is not None and _width(module, 1) % degree == 0:
            plan[name] = by_outputs(module, gathered=True)
    plan.update(_plan_of_tied(model, modules, degree))
    notes = [*_about_heads(others, degree), *_about_whole(model, plan)]
    return plan, notes


def _about_heads(others: Sequence[Attention], degree: int) -> Iterator[str]:
    if not others:
        return
    name = others[0].name
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    if others[0].fused:
        why = f"{others[0].fused!r} makes queries, keys and values in one"
    else:
        queries, keys, _ = (_width(layer, 1) for layer in others[0].into)
        why = f"queries are {queries} wide, keys {keys}"
    yield (
        f"{name!r}{more} cannot be cut by heads into tensor_parallel={degree} equal parts "
        f"({why}): each of its layers is gathered on its own"
    )


def _about_whole(model: nn.Module, plan: Plan) -> Iterator[str]:
    """What takes memory on every rank although its degree of parallelism says otherwise."""
    cut = {id(parameter) for name in plan for parameter in model.get_submodule(name).parameters()}
    total = sum(parameter.numel() for parameter in model.parameters())
    whole = {
        name: sum(each.numel() for each in module.parameters(recurse=False) if id(each) not in cut)
        for name, module in model.named_modules()
    }
    left = sum(whole.values())
    if total and left > _WORTH_SAYING * total:
        largest = max(whole, key=whole.__getitem__)
        kind = type(model.get_submodule(largest)).__name__
        yield (
            f"{left / total:.0%} of the parameters stay whole on every rank, the largest in "
            f"{largest!r} ({kind}); a tensor_parallel_plan(model) of the task can cut more"
        )


def _plan_of_tied(model: nn.Module, modules: Mapping[str, nn.Module], degree: int) -> Plan:
    """An embedding and the head that shares its table: both cut by words, or neither."""
    plan: dict[str, ParallelStyle] = {}
    for users in _tied(model):
        names = [name for name, module in modules.items() if any(module is u for u in users)]
        tables = [modules[name] for name in names]
        fits = all(
            isinstance(each, (nn.Linear, nn.Embedding)) and each.weight.shape[0] % degree == 0
            for each in tables
        )
        if fits and len(tables) == len(users):
            for name, table in zip(names, tables, strict=True):
                plan[name] = (
                    RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
                    if isinstance(table, nn.Embedding)
                    else ColwiseParallel(output_layouts=Replicate())
                )
    return plan


def resolve(model: nn.Module, plan: Plan) -> list[tuple[nn.Module, ParallelStyle]]:
    """The modules a plan names, `*` standing for any one part of a name.

    Raises:
        TaskError: a name or a style that is none.
    """
    found = []
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
            raise TaskError(f"tensor_parallel_plan() names {pattern!r}, and no module is called so")
        found += [(module, style) for module in matches]
    return found


def _pairs(module: nn.Module) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of children that are two linear layers with only element-wise functions between."""
    children = dict(module.named_children())
    if isinstance(module, nn.Sequential):
        last: str | None = None
        for name, child in children.items():
            if widths(child) is not None:
                if last is not None:
                    yield (last,), name
                    last = None
                else:
                    last = name
            elif not isinstance(child, _ELEMENTWISE):
                last = None
        return
    for into, out in _PAIRS:
        layers = [children.get(name) for name in (*into, out)]
        if any(widths(layer) is None for layer in layers):
            continue
        hidden = _width(layers[-1], 0)
        made = {_width(layer, 1) for layer in layers[:-1]}
        # A norm over the hidden units would see a part of them.
        normed = any(
            tuple(getattr(child, "normalized_shape", ())) == (hidden,)
            for child in children.values()
        )
        if made == {hidden} and not normed:
            yield into, out
            return


def _width(layer: nn.Module | None, which: int) -> int:
    """Of a linear layer: its inputs (0) or outputs (1)."""
    both = widths(layer)
    assert both is not None
    return both[which]


def _tied(model: nn.Module) -> list[list[nn.Module]]:
    """Groups of modules that own one parameter together."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    return [modules for modules in users.values() if len(modules) > 1]


def _tied_modules(model: nn.Module) -> set[int]:
    return {id(module) for users in _tied(model) for module in users}


def _inside_closed(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    return any(
        isinstance(model.get_submodule(".".join(parts[:end])), _CLOSED) for end in range(len(parts))
    )
