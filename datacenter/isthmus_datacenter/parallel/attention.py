"""Find attention modules that can be sharded by heads, by names of layers and a numerical check.

An attention that computes queries, keys and values by linear layers can be sharded with a single
all-reduce: each rank has some heads, and the output projection sums the ranks' partial results.
Models do not declare their heads in a common way. So a few examples pass through each candidate
module whole, and then again with one part of the outputs of its input projections after the other:
the input of the output projection must each time be that part of its whole input. With
grouped-query attention (Ainslie et al. 2023) the groups are sharded.

One layer may compute all three (a *fused* layer): one after another, or interleaved by head. Both
are checked. A module that then splits the outputs knows their width, so attributes with that value
are reduced during the check.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from isthmus_datacenter.parallel.tensor_styles import heads_of_part, linear_widths

_SEPARATE_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
)
"""Names of the three input projections in common transformers."""
_FUSED_NAMES = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "to_qkv")
"""Names of a layer that computes queries, keys and values."""
_TOLERANCE = 1e-4
"""Relative to the largest element: a part of a matrix product may sum in another order."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention module with separate or fused input projections."""

    name: str
    module: nn.Module
    input_projections: tuple[nn.Module, ...]
    """The layer or layers that compute queries, keys and values: sharded along their outputs."""
    output_projections: tuple[nn.Module, ...]
    """Candidates for the layer that mixes the heads: sharded along its inputs."""
    fused: str = ""
    """Name of the fused layer; empty for separate ones."""
    pieces: int = 1
    """Equally wide pieces of each input projection's outputs; a rank gets a part of each piece."""
    width_attributes: tuple[str, ...] = ()
    """Attributes of the module that hold the width of a piece."""


class _OutputProjectionReached(Exception):
    """Stops the module at its output projection: the rest is the same on all ranks."""

    def __init__(self, inputs: torch.Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def find_head_sharding(
    model: nn.Module, degree: int, run: Callable[[], Any], *, compared: bool = True
) -> tuple[list[Attention], list[Attention]]:
    """Find the attention modules of a model and check which can be sharded by heads.

    Args:
        model: the whole model; unchanged afterwards.
        degree: number of tensor-parallel ranks.
        run: sends a few examples through the model, in evaluation mode and without gradients.
        compared: whether the parts have to have the values of the whole, and not its shape only.

    Returns:
        Those that can be sharded into `degree` equal parts, each with its one output projection;
        and the others.
    """
    shardable: dict[str, Attention] = {}
    candidates = list(_candidates(model))
    # All hooks at once, so that the whole model runs only once; each check calls just its module.
    with contextlib.ExitStack() as checks:
        for candidate in candidates:
            checks.enter_context(
                _check_when_called(candidate, degree, shardable, compared=compared)
            )
        if candidates:
            run()
    others = {each.name: each for each in candidates if each.name not in shardable}
    return list(shardable.values()), list(others.values())


def _candidates(model: nn.Module) -> Iterator[Attention]:
    """Modules with the layers of an attention, once for each way of sharding to check."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        linears = {key: child for key, child in children.items() if type(child) is nn.Linear}
        names = next((each for each in _SEPARATE_NAMES if linears.keys() >= set(each)), None)
        if names is not None:
            projections = tuple(linears.pop(each) for each in names)
            width = projections[0].out_features
            outputs = tuple(each for each in linears.values() if each.in_features == width)
            if outputs:
                yield Attention(name, module, projections, outputs)
        for fused in _FUSED_NAMES:  # in a fixed order: all ranks must make the same plan
            if fused in children:
                yield from _fused_candidates(name, module, fused)


def _fused_candidates(name: str, module: nn.Module, fused: str) -> Iterator[Attention]:
    layer = module.get_submodule(fused)
    layer_widths = linear_widths(layer)
    if layer_widths is None:
        return
    width = layer_widths[1] // 3
    outputs = tuple(
        each
        for each in module.children()
        if each is not layer and (linear_widths(each) or (0, 0))[0] == width
    )
    attributes = tuple(
        key for key, value in vars(module).items() if type(value) is int and value == width
    )
    # Both ways: which of them a fused layer has cannot be read off its shape.
    yield Attention(name, module, (layer,), outputs, fused, 3, attributes)
    yield Attention(name, module, (layer,), outputs, fused)


@contextlib.contextmanager
def _check_when_called(
    candidate: Attention, degree: int, shardable: dict[str, Attention], *, compared: bool
) -> Iterator[None]:
    """Within the block, check a module when it is called; add it to `shardable` if it passes."""
    whole_inputs: dict[nn.Module, torch.Tensor] = {}

    def record(projection: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The first call only: within a check the module runs again, with a part of its heads.
        whole_inputs.setdefault(projection, *args, *kwargs.values())

    def check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for projection in candidate.output_projections:
            if projection in whole_inputs and candidate.name not in shardable:
                parts = _inputs_by_part(
                    candidate, projection, degree, lambda: module.forward(*args, **kwargs)
                )
                if _parts_match(whole_inputs[projection], parts, compared=compared):
                    shardable[candidate.name] = dataclasses.replace(
                        candidate, output_projections=(projection,)
                    )

    hooks = [
        projection.register_forward_pre_hook(record, with_kwargs=True)
        for projection in candidate.output_projections
    ]
    hooks.append(candidate.module.register_forward_hook(check, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _inputs_by_part(
    candidate: Attention, projection: nn.Module, degree: int, run: Callable[[], Any]
) -> list[torch.Tensor]:
    """The output projection's input with each part of the heads; empty where the module fails."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _OutputProjectionReached(*args, *kwargs.values())

    if any(
        (linear_widths(layer) or (0, 1))[1] % (candidate.pieces * degree)
        for layer in candidate.input_projections
    ):
        return []
    inputs: list[torch.Tensor] = []
    hook = projection.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        for part in range(degree):
            with _restricted_to_part(candidate, part, degree):
                try:
                    run()
                except _OutputProjectionReached as reached:
                    inputs.append(reached.inputs)
    except Exception:  # noqa: BLE001 - the model's code may not support the smaller shapes
        return []
    finally:
        hook.remove()
    return inputs


@contextlib.contextmanager
def _restricted_to_part(candidate: Attention, part: int, degree: int) -> Iterator[None]:
    """Within the block, the input projections return one of `degree` parts of their outputs."""

    def restrict(layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return heads_of_part(output, part=part, degree=degree, pieces=candidate.pieces)

    hooks = [layer.register_forward_hook(restrict) for layer in candidate.input_projections]
    widths = {name: getattr(candidate.module, name) for name in candidate.width_attributes}
    try:
        for name, width in widths.items():
            setattr(candidate.module, name, width // degree)
        yield
    finally:
        for name, width in widths.items():
            setattr(candidate.module, name, width)
        for hook in hooks:
            hook.remove()


def _parts_match(whole: torch.Tensor, parts: Sequence[torch.Tensor], *, compared: bool) -> bool:
    """Whether the parts, concatenated along the last dimension, equal the whole."""
    if not parts or any(part.shape[:-1] != whole.shape[:-1] for part in parts):
        return False
    joined = torch.cat(list(parts), -1)
    if not compared:
        return joined.shape == whole.shape
    scale = max(float(whole.abs().max()), 1e-6)
    return joined.shape == whole.shape and bool(
        ((joined - whole).abs() <= _TOLERANCE * scale).all()
    )
