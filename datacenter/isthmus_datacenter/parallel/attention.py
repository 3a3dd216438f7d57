"""Attention cut by heads: found by the names of its layers, and believed after a trial.

An attention that makes queries, keys and values by linear layers can be cut with one message: each
rank has some heads, and the layer that mixes them adds up what the ranks found. Heads are nowhere
written down that all models share. So a few examples go through each such module whole, and then
again with one part of what its layers make after the other: what reaches the mixing layer must be
that part of what reached it before. With grouped heads (Ainslie et al. 2023) the groups are cut.

One layer may make all three (`fused`): one after another, or head by head. Both are tried. A module
that then splits its outputs knows their width, so attributes of that width are tried smaller.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from isthmus_datacenter.parallel.fused_attention import part_of
from isthmus_datacenter.parallel.linears import widths

_FAMILIES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
"""Names of the layers in common transformers."""
_FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "to_qkv")
"""Names of one layer that makes all three."""
_ROUNDING = 1e-4
"""Relative to the largest: a part of a matrix is multiplied in another order than the whole."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """A module with layers for queries, keys and values, or with one for all three."""

    name: str
    module: nn.Module
    into: tuple[nn.Module, ...]
    """That layer or layers: to be cut along their outputs."""
    mixes: tuple[nn.Module, ...]
    """What may be the layer after them, to be cut along its inputs."""
    fused: str = ""
    """Name of the one layer for all three."""
    pieces: int = 1
    """What each layer makes is so many pieces of equal widths, and a part is a part of each."""
    remembered: tuple[str, ...] = ()
    """Attributes of the module that are the width of a piece."""


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
    others = {each.name: each for each in attentions if each.name not in found}
    return list(found.values()), list(others.values())


def _attentions(model: nn.Module) -> Iterator[Attention]:
    """All there are, with each way to cut one that may be right."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        linears = {at: each for at, each in children.items() if type(each) is nn.Linear}
        family = next((names for names in _FAMILIES if linears.keys() >= set(names)), None)
        if family is not None:
            into = tuple(linears.pop(each) for each in family)
            width = into[0].out_features
            mixes = tuple(each for each in linears.values() if each.in_features == width)
            if mixes:
                yield Attention(name, module, into, mixes)
        for fused in _FUSED:  # in one order: all ranks must find the same
            if fused in children:
                yield from _fused(name, module, fused)


def _fused(name: str, module: nn.Module, fused: str) -> Iterator[Attention]:
    layer = module.get_submodule(fused)
    made = widths(layer)
    if made is None:
        return
    width = made[1] // 3
    mixes = tuple(
        each
        for each in module.children()
        if each is not layer and (widths(each) or (0, 0))[0] == width
    )
    knows = tuple(at for at, value in vars(module).items() if type(value) is int and value == width)
    yield Attention(name, module, (layer,), mixes, fused, 3, knows)
    yield Attention(name, module, (layer,), mixes, fused)


@contextlib.contextmanager
def _tried_when_called(
    whole: Attention, degree: int, found: dict[str, Attention]
) -> Iterator[None]:
    """Have a module tried when it is called in the block; added to `found` where it can be cut."""
    reached: dict[nn.Module, torch.Tensor] = {}

    def reaches(mix: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        reached.setdefault(mix, *given, *named.values())

    def called(module: nn.Module, given: Any, named: Any, output: Any) -> None:
        for mix in whole.mixes:
            if mix in reached and whole.name not in found:
                parts = _parts(whole, mix, degree, lambda: module.forward(*given, **named))
                if _same(reached[mix], parts):
                    found[whole.name] = dataclasses.replace(whole, mixes=(mix,))

    hooks = [mix.register_forward_pre_hook(reaches, with_kwargs=True) for mix in whole.mixes]
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

    def stop(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _ReachedError(*given, *named.values())

    if any((widths(layer) or (0, 1))[1] % (whole.pieces * degree) for layer in whole.into):
        return []
    found: list[torch.Tensor] = []
    hook = mix.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        for part in range(degree):
            with _only(whole, part, degree):
                try:
                    run()
                except _ReachedError as reached:
                    found.append(reached.given)
    except Exception:  # noqa: BLE001 - the model's own code met shapes it was not written for
        return []
    finally:
        hook.remove()
    return found


@contextlib.contextmanager
def _only(whole: Attention, part: int, degree: int) -> Iterator[None]:
    """Have the layers make one of `degree` parts of what they make."""

    def made(layer: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return part_of(output, part=part, degree=degree, pieces=whole.pieces)

    hooks = [layer.register_forward_hook(made) for layer in whole.into]
    known = {name: getattr(whole.module, name) for name in whole.remembered}
    try:
        for name, width in known.items():
            setattr(whole.module, name, width // degree)
        yield
    finally:
        for name, width in known.items():
            setattr(whole.module, name, width)
        for hook in hooks:
            hook.remove()


def _same(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Whether the parts are those of the whole, along the last dimension."""
    if not parts or any(part.shape[:-1] != whole.shape[:-1] for part in parts):
        return False
    together = torch.cat(list(parts), -1)
    scale = max(float(whole.abs().max()), 1e-6)
    return together.shape == whole.shape and bool(
        ((together - whole).abs() <= _ROUNDING * scale).all()
    )
