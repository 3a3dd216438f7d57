"""Recompute a module's activations in the backward pass instead of keeping them.

All of them, or all but the outputs of the operators that take most of the time (*selective*
recomputation, Korthikanti et al. 2022): their memory is a part of the whole, and calling the others
again costs little.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from isthmus.errors import TaskError
from isthmus.task.definition import Task
from isthmus.task.loading import user_code
from isthmus.task.scoring.blocks import default_units
from isthmus.task.scoring.host_generators import HostGenerators

_Kept = list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]
"""A module's table of buffers, the name of one, and its values before a call."""

_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
"""Operators whose outputs are kept, as they cost most to call again."""

_CHANGED = "cached during selective activation checkpoint has been mutated"
"""A part of PyTorch's sentence."""


def recompute(unit: nn.Module, *, keep_products: bool = False, to_end: bool = False) -> None:
    """Have a module keep no activations; the backward pass calls its `forward` a second time.

    With `keep_products` the outputs of matrix products, convolutions and attention are kept, and
    the second call does not compute them.

    The second call ends as soon as the backward pass has what it needs, or with `to_end` where the
    first one did: for ranks that need other parts of it, and exchange activations in it.

    Buffers that a call changes have the values of the first call's beginning in the second one, and
    keep what the first has made of them: otherwise running statistics would count each batch twice,
    and what depends on a buffer, such as spectral norm, would be computed from another. It draws
    the same random numbers, also those of Python and NumPy.
    """
    unit.forward = functools.partial(
        checkpoint,
        unit.forward,
        use_reentrant=False,
        early_stop=not to_end,
        context_fn=functools.partial(_contexts, unit, keep_products),
    )


def recompute_blocks(task: Task, model: nn.Module, *, keep_products: bool) -> None:
    """Have the blocks of a model keep no activations, see `recompute`.

    They are those that the task names (`shard_units`), or the children of the model's containers.

    Raises:
        TaskError: it has none, or the task's code raised.
    """
    with user_code("shard_units()"):
        given = task.shard_units(model)
    if given is None:
        groups = default_units(model, smallest=1, shared=True)
        units = [unit for group in groups for unit in group]
    else:
        units = list(given)
        for unit in units:
            if not isinstance(unit, nn.Module):
                raise TaskError(f"shard_units() returned {type(unit).__name__}, not an nn.Module")
        units = list(dict.fromkeys(units))
    if not units:
        raise TaskError(
            "checkpoint_activations is for models of blocks, and this one has no nn.ModuleList or "
            "nn.Sequential with parameters; set federated.checkpoint_activations = false"
        )
    for unit in units:
        recompute(unit, keep_products=keep_products)


def _contexts(unit: nn.Module, keep_products: bool) -> tuple[Any, Any]:
    """What the two calls run within."""
    before = HostGenerators.now() if torch.is_grad_enabled() else None
    kept: _Kept = []
    first: Any = _noting(unit, kept)
    second: Any = _Repeating(kept, before)
    if not keep_products:
        return first, second
    keeping, using = create_selective_checkpoint_contexts(output_policy)  # type: ignore[no-untyped-call]  # PyTorch's own
    # The buffers are copied outside of what counts the operators of a call.
    return _within(first, keeping), _within(second, _refusing_changes(unit), using)


def output_policy(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Whether the output of an operator is kept.

    One that draws random numbers, such as attention with dropout, is not: if the second call left
    it out, whatever draws after it would get other numbers than in the first.
    """
    keeps = operator in _PRODUCTS and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0))


@contextlib.contextmanager
def _within(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


@contextlib.contextmanager
def _refusing_changes(unit: nn.Module) -> Iterator[None]:
    """Say what to do where a kept output is no longer what the operator returned.

    Raises:
        TaskError: the model has changed it in place.
    """
    try:
        yield
    except RuntimeError as error:
        if _CHANGED not in str(error):
            raise
        raise TaskError(
            'checkpoint_activations="operators": the output of a matrix product or convolution '
            f"in a {type(unit).__name__} was changed in place (as nn.ReLU(inplace=True) does), so "
            "that it cannot be kept; use inplace=False there, or set checkpoint_activations = true"
        ) from error


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


class _Repeating:
    """Has the kept values in place of what the first call has made of them.

    It can be entered again: a schedule that computes the gradients of inputs and of parameters one
    after the other (`zero_bubble`) calls the module for each.
    """

    def __init__(self, kept: _Kept, before: HostGenerators | None) -> None:
        """`before` are the generators before the first call; PyTorch sets its own back itself."""
        self._kept = kept
        self._before = before
        self._after: HostGenerators | None = None
        self._now: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        if self._before is not None:
            self._after = HostGenerators.now()
            self._before.restore()
        self._now = [(table, name, table[name]) for table, name, _ in self._kept]
        for table, name, values in self._kept:
            # A copy, as the values are needed again if the backward pass is.
            table[name] = values.clone()

    def __exit__(self, *_: object) -> None:
        if self._after is not None:
            self._after.restore()
        for table, name, buffer in self._now:
            table[name] = buffer
