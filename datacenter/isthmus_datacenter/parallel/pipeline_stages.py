"""How to cut a model into pipeline stages where its task does not say.

The longest container of blocks is cut into stretches of about equally many parameters; what runs
before the first block goes to the first stage, what runs after it to the last. What runs before,
has no parameters, and makes something else than what the blocks hand on (the angles of rotary
embeddings) is in every stage. None of this can be proved from the outside, so a sample of the data
goes through the whole model and through the stages, and the outputs must agree.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.equivalence_check import run_still, same


class Pass(nn.Module):
    """Stands where another stage's module is: hands on the first of what that takes."""

    def __init__(self, instead_of: nn.Module) -> None:
        super().__init__()
        self._first = _first_name(instead_of)

    def forward(self, *given: Any, **named: Any) -> Any:
        """The first argument, unchanged; None where there is none."""
        return given[0] if given else named.get(self._first)


def _first_name(module: nn.Module) -> str:
    """What a module's forward() calls the first thing it takes."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def cut(model: nn.Module, stages: int, sample: torch.Tensor) -> list[nn.Module]:
    """The model as stages that are called one after the other; they share its modules.

    Raises:
        TaskError: there are fewer blocks than stages.
    """
    path, container = _blocks(model, stages)
    order = _order_of_calls(model, path, container, sample)
    groups = _balance(container, stages)
    return [_stage(model, path, order, set(groups[at]), at, stages) for at in range(stages)]


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
    """`before`, `after` or `beside`: what each module around the blocks is to them."""
    order: dict[str, str] = {}
    made: dict[str, Any] = {}
    reached: list[torch.Size | None] = []
    hooks = []
    module = model
    for depth, step in enumerate(path):
        for name, child in module.named_children():
            if name == step:
                continue
            full = ".".join([*path[:depth], name])

            def called(*_: Any, full: str = full) -> None:
                order.setdefault(full, "after" if reached else "before")

            def returned(_: Any, given: Any, output: Any, full: str = full) -> None:
                made.setdefault(full, _shape(output))

            hooks.append(child.register_forward_pre_hook(called))
            if not _size(child):
                hooks.append(child.register_forward_hook(returned))
        module = module.get_submodule(step)

    def reaches(block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        reached.append(_shape(given[0] if given else named.get(_first_name(block))))

    hooks += [
        block.register_forward_pre_hook(reaches, with_kwargs=True) for block in container.children()
    ]
    try:
        run_still(model, sample)
    finally:
        for hook in hooks:
            hook.remove()
    handed_on = reached[0] if reached else None
    for full, shape in made.items():
        if order[full] == "before" and shape != handed_on:
            order[full] = "beside"
    return order


def _shape(value: Any) -> torch.Size | None:
    """Of one tensor; None for anything else."""
    return value.shape if isinstance(value, torch.Tensor) else None


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
        for name, module in clone._modules.items():
            when = order.get(".".join([*path[:depth], name]))
            here = when == "beside" or at == (0 if when == "before" else of - 1)
            if name != step and not here and module is not None:
                clone._modules[name] = Pass(module)
        child = clone._modules[step]
        assert child is not None
        clone._modules[step] = clone = _shallow(child)
    for name, block in clone._modules.items():
        if name not in blocks and block is not None:
            clone._modules[name] = Pass(block)
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
