"""How to cut a model where its task does not say, and how to tell whether that was right.

Tensor parallelism: two linear layers with only an element-wise function between them (known from a
`Sequential`, or from the names transformers give them) are cut along what lies between. Any other
linear layer or embedding is cut along its outputs, which are gathered right away: right wherever
the layer is *called*, at the price of one message per layer. All else is whole on every rank.

Pipeline: the longest container of blocks is cut into stretches of about equally many parameters;
what runs before the first block goes to the first stage, what runs after it to the last.

Neither can be proved from the outside, so a sample of the data goes through both, the whole model
and what was made of it, and the outputs must agree.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from isthmus.errors import TaskError

Plan = Mapping[str, ParallelStyle]

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


class Pass(nn.Module):
    """Stands where another stage's module is: hands on the first thing it is called with."""

    def forward(self, first: Any = None, *rest: Any, **named: Any) -> Any:
        """The first argument, unchanged."""
        return first


# -- tensor parallelism ---------------------------------------------------------------------------


def tensor_plan(model: nn.Module, degree: int, stages: Sequence[nn.Module]) -> Plan:
    """A plan for any model, by module name, of what `degree` divides; maybe empty.

    Between `stages` everything is whole: no pair of layers is cut across two of them.
    """
    within = [{id(module) for module in stage.modules()} for stage in stages]
    plan: dict[str, ParallelStyle] = {}
    taken = _tied_modules(model)
    modules = {
        name: each for name, each in model.named_modules() if not _inside_closed(model, name)
    }
    for name, module in modules.items():
        for into, out in _pairs(module):
            children = [module.get_submodule(each) for each in (*into, out)]
            hidden = children[-1].in_features
            together = any(here.issuperset(map(id, children)) for here in within)
            taken_already = any(id(child) in taken for child in children)
            if together and hidden % degree == 0 and not taken_already:
                plan |= {_join(name, each): ColwiseParallel() for each in into}
                plan[_join(name, out)] = RowwiseParallel()
                taken.update(id(child) for child in children)
    for name, module in modules.items():
        if id(module) in taken:
            continue
        outputs = (
            module.out_features
            if isinstance(module, nn.Linear)
            else module.embedding_dim
            if isinstance(module, nn.Embedding)
            else 1
        )
        if outputs % degree == 0:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
    return {**plan, **_plan_of_tied(model, modules, degree)}


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
            if isinstance(child, nn.Linear):
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
        if not all(isinstance(layer, nn.Linear) for layer in layers):
            continue
        hidden = layers[-1].in_features  # type: ignore[union-attr]
        widths = {layer.out_features for layer in layers[:-1]}  # type: ignore[union-attr]
        # A norm over the hidden units would see a part of them.
        normed = any(
            tuple(getattr(child, "normalized_shape", ())) == (hidden,)
            for child in children.values()
        )
        if widths == {hidden} and not normed:
            yield into, out
            return


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


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


# -- pipelines ------------------------------------------------------------------------------------


def cut(model: nn.Module, stages: int, sample: torch.Tensor) -> list[nn.Module]:
    """The model as stages that are called one after the other; they share its modules.

    Raises:
        TaskError: there are fewer blocks than stages.
    """
    path, container = _blocks(model, stages)
    order = _order_of_calls(model, path, container, sample)
    groups = _balance(container, stages)
    return [_stage(model, path, order, set(groups[at]), at, stages) for at in range(stages)]


def run_still(model: nn.Module, *inputs: Any) -> Any:
    """The output of a module in evaluation mode, without gradients; nothing remembers it."""
    was = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model(*inputs)
    finally:
        for module, training in was.items():
            module.training = training


def same(first: Any, second: Any, tolerance: float) -> bool:
    """Whether two outputs agree: tensors up to `tolerance`, relative to the largest element."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape:
            return False
        if not first.is_floating_point():
            return torch.equal(first, second.to(first.device))
        there = second.to(first.device, first.dtype)
        scale = float(first.abs().max()) if first.numel() else 0.0
        return bool(((first - there).abs() <= tolerance * max(scale, 1e-6)).all())
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            same(first[key], second[key], tolerance) for key in first
        )
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(
            same(one, other, tolerance) for one, other in zip(first, second, strict=True)
        )
    return type(first) is type(second)


def _blocks(model: nn.Module, stages: int) -> tuple[list[str], nn.Module]:
    """The container to cut, with the names that lead to it."""
    longest = 0
    best: tuple[int, str, nn.Module] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        weighted = sum(_size(child) > 0 for child in module.children())
        longest = max(longest, weighted)
        if weighted >= stages and (best is None or _size(module) > best[0]):
            best = (_size(module), name, module)
    if best is None:
        raise TaskError(
            f"the model cannot be cut into {stages} pipeline stages: its longest Sequential or "
            f"ModuleList has {longest} blocks with parameters; lower pipeline_parallel or give the "
            "task a pipeline_stages(model, n)"
        )
    return (best[1].split(".") if best[1] else []), best[2]


def _order_of_calls(
    model: nn.Module, path: list[str], container: nn.Module, sample: torch.Tensor
) -> dict[str, str]:
    """`before` or `after`: when each module beside the blocks, and above them, is called."""
    order: dict[str, str] = {}
    reached: list[bool] = []
    hooks = []
    module = model
    for depth, step in enumerate(path):
        for name, child in module.named_children():
            if name == step:
                continue
            full = ".".join([*path[:depth], name])

            def called(*_: Any, full: str = full) -> None:
                order.setdefault(full, "after" if reached else "before")

            hooks.append(child.register_forward_pre_hook(called))
        module = module.get_submodule(step)
    hooks += [
        block.register_forward_pre_hook(lambda *_: reached.append(True))
        for block in container.children()
    ]
    try:
        run_still(model, sample)
    finally:
        for hook in hooks:
            hook.remove()
    return order


def _balance(container: nn.Module, stages: int) -> list[list[str]]:
    """Names of the blocks of each stage: contiguous, each with parameters, about equally many."""
    sizes = [(name, _size(block)) for name, block in container.named_children()]
    total = sum(size for _, size in sizes)
    left = sum(size > 0 for _, size in sizes)
    groups: list[list[str]] = [[]]
    seen = held = 0
    for name, size in sizes:
        more = stages - len(groups)
        full = 2 * seen + size > 2 * total * len(groups) / stages
        if size and held and more and (full or left <= more):
            groups.append([])
            held = 0
        groups[-1].append(name)
        seen += size
        held += size > 0
        left -= size > 0
    return groups


def _stage(
    model: nn.Module, path: list[str], order: Mapping[str, str], blocks: set[str], at: int, of: int
) -> nn.Module:
    """A copy of the modules that lead to the blocks; everything else is shared or passed by."""
    clone = root = _shallow(model)
    for depth, step in enumerate(path):
        for name in list(clone._modules):
            when = order.get(".".join([*path[:depth], name]))
            elsewhere = (when == "before" and at > 0) or (when != "before" and at < of - 1)
            if name != step and elsewhere:
                clone._modules[name] = Pass()
        child = clone._modules[step]
        assert child is not None
        clone._modules[step] = clone = _shallow(child)
    for name in clone._modules:
        if name not in blocks:
            clone._modules[name] = Pass()
    return root


def _shallow(module: nn.Module) -> nn.Module:
    """The same module with tables of its own."""
    clone = copy.copy(module)
    for key, value in clone.__dict__.items():
        if isinstance(value, (dict, set)):
            clone.__dict__[key] = copy.copy(value)
    return clone


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def check_chain(
    stages: Sequence[nn.Module], whole: Any, sample: Any
) -> list[tuple[tuple[Any, ...], Any]]:
    """Run the stages one after the other; what went into each and came out.

    Raises:
        TaskError: the last one's output is not the whole model's.
    """
    value, seen = sample, []
    for stage in stages:
        inputs = value if isinstance(value, tuple) else (value,)
        value = run_still(stage, *inputs)
        seen.append((inputs, value))
    if not same(whole, value, 1e-4):
        raise TaskError("called in order, they give another output than the model")
    return seen
