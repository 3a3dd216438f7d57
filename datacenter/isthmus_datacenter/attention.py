"""Attention cut by heads: found by the names of its layers, and believed after a trial.

An attention that makes queries, keys and values by linear layers of its own can be cut with one
message: each rank has some heads, and the layer that mixes them adds up what the ranks found. Heads
are nowhere written down that all models share. So a few examples go through each such module whole,
and then again with one part of its layers after the other: what reaches the mixing layer must be
that part of what reached it before. With grouped heads (Ainslie et al. 2023) the groups are cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from isthmus_datacenter.linears import widths

_FAMILIES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
"""Names of the layers in common transformers."""
_FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "to_qkv")
"""Names of one layer that makes all three, in an order that every model has of its own."""
_ROUNDING = 1e-4
"""Relative to the largest: a part of a matrix is multiplied in another order than the whole."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """A module with layers for queries, keys and values."""

    name: str
    module: nn.Module
    into: tuple[nn.Linear, ...]
    """Queries, keys and values: to be cut along their outputs."""
    mixes: tuple[nn.Linear, ...]
    """What may be the layer after them, to be cut along its inputs."""


class _ReachedError(Exception):
    """The mixing layer was called; what comes after it is the same for all ranks."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given = given


def by_heads(
    model: nn.Module, degree: int, run: Callable[[], Any]
) -> tuple[list[Attention], list[Attention]]:
    """Those that can be cut into `degree` parts by heads, each with its one mix; and the others.

    `run` sends a few examples through the whole model, in evaluation mode and without gradients.
    """
    found: dict[str, Attention] = {}
    attentions = list(_attentions(model))
    with contextlib.ExitStack() as watched:
        for each in attentions:
            watched.enter_context(_tried_when_called(each, degree, found))
        if attentions:
            run()
    return list(found.values()), [each for each in attentions if each.name not in found]


def fused(model: nn.Module) -> list[tuple[str, str]]:
    """Modules that make queries, keys and values in one linear layer, and that layer's name.

    A model cuts what such a layer makes into three of the widths it knows; a part of the heads
    would be a part of each third, which no plain shard of the layer is.
    """
    return [
        (name, child)
        for name, module in model.named_modules()
        for child, layer in module.named_children()
        if child in _FUSED and widths(layer) is not None
    ]


def _attentions(model: nn.Module) -> Iterator[Attention]:
    for name, module in model.named_modules():
        linears = {at: each for at, each in module.named_children() if type(each) is nn.Linear}
        family = next((names for names in _FAMILIES if linears.keys() >= set(names)), None)
        if family is not None:
            into = tuple(linears.pop(each) for each in family)
            width = into[0].out_features
            mixes = tuple(each for each in linears.values() if each.in_features == width)
            if mixes:
                yield Attention(name, module, into, mixes)


@contextlib.contextmanager
def _tried_when_called(
    whole: Attention, degree: int, found: dict[str, Attention]
) -> Iterator[None]:
    """Have a module tried when it is called in the block; added to `found` where it can be cut."""
    reached: dict[nn.Module, torch.Tensor] = {}

    def reaches(mix: nn.Module, given: tuple[Any, ...]) -> None:
        reached.setdefault(mix, given[0])

    def called(module: nn.Module, given: Any, named: Any, output: Any) -> None:
        for mix in whole.mixes:
            if mix in reached and whole.name not in found:
                parts = _parts(whole, mix, degree, lambda: module.forward(*given, **named))
                if _same(reached[mix], parts):
                    found[whole.name] = dataclasses.replace(whole, mixes=(mix,))

    hooks = [mix.register_forward_pre_hook(reaches) for mix in whole.mixes]
    hooks.append(whole.module.register_forward_hook(called, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _parts(
    whole: Attention, mix: nn.Module, degree: int, run: Callable[[], Any]
) -> list[torch.Tensor]:
    """What reaches the mixing layer with each part of the others; empty where something fails."""

    def stop(_: nn.Module, given: tuple[Any, ...]) -> None:
        raise _ReachedError(given[0])

    if any(layer.out_features % degree for layer in whole.into):
        return []
    found: list[torch.Tensor] = []
    hook = mix.register_forward_pre_hook(stop, prepend=True)
    try:
        for part in range(degree):
            with contextlib.ExitStack() as cuts:
                for layer in whole.into:
                    cuts.enter_context(_only(layer, part, degree))
                try:
                    run()
                except _ReachedError as reached:
                    found.append(reached.given)
    except Exception:  # noqa: BLE001 - whatever the model says about a part of its layers
        return []
    finally:
        hook.remove()
    return found


@contextlib.contextmanager
def _only(layer: nn.Linear, part: int, degree: int) -> Iterator[None]:
    """A layer with one of `degree` parts of its outputs."""
    kept = dict(layer._parameters)
    for name, parameter in kept.items():
        if parameter is not None:
            layer._parameters[name] = nn.Parameter(parameter.chunk(degree)[part], False)
    try:
        yield
    finally:
        layer._parameters.update(kept)


def _same(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Whether the parts are those of the whole, along the last dimension."""
    if not parts or any(part.shape[:-1] != whole.shape[:-1] for part in parts):
        return False
    together = torch.cat(list(parts), -1)
    scale = max(float(whole.abs().max()), 1e-6)
    return together.shape == whole.shape and bool(
        ((together - whole).abs() <= _ROUNDING * scale).all()
    )
