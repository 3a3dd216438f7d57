"""Recompute a module's activations in the backward pass instead of keeping them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_Kept = list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]
"""A module's table of buffers, the name of one, and its values before a call."""


def recompute(unit: nn.Module) -> None:
    """Have a module keep no activations; the backward pass calls its `forward` a second time.

    Buffers that a call changes have the values of the first call's beginning in the second one, and
    keep what the first has made of them: otherwise running statistics would count each batch twice,
    and what depends on a buffer, such as spectral norm, would be computed from another.
    """
    unit.forward = functools.partial(
        checkpoint,
        unit.forward,
        use_reentrant=False,
        context_fn=functools.partial(_contexts, unit),
    )


def _contexts(unit: nn.Module) -> tuple[Any, Any]:
    """What the two calls run within."""
    kept: _Kept = []
    return _noting(unit, kept), _repeating(kept)


@contextlib.contextmanager
def _noting(unit: nn.Module, kept: _Kept) -> Iterator[None]:
    """Keep the values of the buffers that may change."""
    if not torch.is_grad_enabled():  # there is no second call
        yield
        return
    before = [
        (module._buffers, name, buffer, buffer._version, buffer.clone())
        for module in unit.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for table, name, buffer, version, values in before:
        # The versions of running statistics stay: batch_norm does not declare what it changes. A
        # comparison of values would wait for the device.
        may_change = buffer.is_floating_point() or buffer._version != version
        if may_change or table[name] is not buffer:
            kept.append((table, name, values))


@contextlib.contextmanager
def _repeating(kept: _Kept) -> Iterator[None]:
    """Have the kept values in place of what the first call has made of them."""
    now = [(table, name, table[name]) for table, name, _ in kept]
    for table, name, values in kept:
        # A copy, in case that the backward pass is run again (`retain_graph`).
        table[name] = values.clone()
    try:
        yield
    finally:
        for table, name, buffer in now:
            table[name] = buffer
