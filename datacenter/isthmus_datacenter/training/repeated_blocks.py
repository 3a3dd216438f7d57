"""Blocks of a model that repeat, such as the layers of a decoder, and the model with fewer of them.

What a rank's memory is with eighty layers follows from three, four and five of them, if they are
alike: everything that is counted grows by the same number of bytes with each. Blocks are alike if
they have the same class and tensors, call the same operators with the same shapes, and keep the
same tensors for the backward pass and in the optimizer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus.task.scoring.blocks import outermost_containers

SHORTENED = (3, 4, 5)
"""Numbers of repetitions that are measured: the third shows that the first two give a line."""
_LONGEST_PERIOD = 8


@dataclasses.dataclass(frozen=True)
class Repetition:
    """Consecutive blocks of a container, whose kinds repeat."""

    container: str
    """Name of the container in the model."""
    start: int
    """Index of the first of the blocks."""
    period: int
    """Number of blocks after which the next ones are alike."""
    times: int

    @property
    def blocks(self) -> int:
        """Number of the blocks."""
        return self.period * self.times


def find_repetition(
    model: nn.Module,
    run: Callable[[], object],
    multiple: int = 1,
    states: Mapping[nn.Parameter, Hashable] | None = None,
) -> Repetition | None:
    """Find the blocks whose repetition makes most of a model; None if it is faster to take all.

    Args:
        model: the model.
        run: passes a batch through it.
        multiple: of the period.
        states: what optimizers keep of parameters, which is alike in blocks that are; None if that
            does not count.
    """
    containers = _containers(model)
    known = kinds_of_blocks(model, run, states)
    blocks = list(known)
    longest = None
    for name, children in containers.items():
        found = _longest(name, [known[block] for block in children], multiple)
        if found is not None and (longest is None or found.blocks > longest.blocks):
            longest = found
    if longest is None:
        return None
    rest = len(blocks) - longest.blocks
    taken = sum(rest + times * longest.period for times in SHORTENED)
    return longest if taken < len(blocks) else None


def kinds_of_blocks(
    model: nn.Module,
    run: Callable[[], object],
    states: Mapping[nn.Parameter, Hashable] | None = None,
) -> dict[nn.Module, Hashable]:
    """What blocks have in common that are alike; None of a block of which it is not known.

    The arguments are those of `find_repetition`.
    """
    blocks = [block for children in _containers(model).values() for block in children]
    operators = _operators(blocks, run)
    return {block: _kind(block, operators.get(block), states or {}) for block in blocks}


def _containers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The blocks of each container of a model, by the container's name."""
    return {
        name: list(each.children())
        for name, each in model.named_modules()
        if isinstance(each, (nn.ModuleList, nn.Sequential))
        and any(each is outermost for outermost in outermost_containers(model))
        # A child that is there twice is one block, called twice.
        and len(each) == len(list(each.children()))
    }


def _longest(container: str, kinds: Sequence[Hashable], multiple: int) -> Repetition | None:
    found = None
    for period in range(multiple, multiple * _LONGEST_PERIOD + 1, multiple):
        start = 0
        while start + period < len(kinds):
            end = start
            while end + period < len(kinds) and kinds[end] == kinds[end + period]:
                end += 1
            times = (end + period - start) // period
            alike = None not in kinds[start : start + period]
            if alike and times > SHORTENED[-1] and (found is None or times * period > found.blocks):
                found = Repetition(container, start, period, times)
            start = end + 1
    return found


def _kind(
    block: nn.Module, operators: Hashable, states: Mapping[nn.Parameter, Hashable]
) -> Hashable:
    """What blocks have in common that are alike; None if it is not known."""
    if operators is None:
        return None
    kept = tuple(states.get(each) for each in block.parameters())
    tensors = (*block.named_parameters(), *block.named_buffers())
    known = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors]
    return (type(block), tuple(known), operators, kept)


def _operators(blocks: Sequence[nn.Module], run: Callable[[], object]) -> dict[nn.Module, Hashable]:
    """The operators that each block calls, with shapes; only of those that are called once.

    With them is what the block keeps for the backward pass: a model may recompute some of its
    blocks, which call the same operators.
    """
    recorder = _OperatorRecorder()
    calls: dict[nn.Module, list[Hashable]] = {}
    kept: list[Hashable] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    def begin(block: nn.Module, *_: object) -> None:
        recorder.operators = []
        kept.clear()

    def finish(block: nn.Module, *_: object) -> None:
        calls.setdefault(block, []).append((tuple(recorder.operators), tuple(kept)))
        recorder.operators = []
        kept.clear()

    handles: list[Any] = []
    for block in blocks:
        handles.append(block.register_forward_pre_hook(begin))
        handles.append(block.register_forward_hook(finish))
    try:
        with recorder, saved_tensors_hooks(keep, lambda tensor: tensor):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {block: operators[0] for block, operators in calls.items() if len(operators) == 1}


class _OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    """Notes operators with the shapes of what they take and return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self.operators: list[Hashable] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [
            (tuple(each.shape), each.dtype)
            for each in tree_leaves((args, kwargs, result))
            if isinstance(each, torch.Tensor)
        ]
        self.operators.append((func, tuple(tensors)))
        return result


def blocks_of(model: nn.Module, repetition: Repetition, times: int) -> list[nn.Module]:
    """The blocks that repeat, of a model with so many repetitions."""
    children = list(model.get_submodule(repetition.container).children())
    return children[repetition.start : repetition.start + times * repetition.period]


def shortened(model: nn.Module, repetition: Repetition, times: int) -> nn.Module:
    """A copy of a model with fewer repetitions."""
    with _without(model, repetition, times):
        return copied(model)


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, which may be without values."""
    tensors = (*model.parameters(), *model.buffers())
    # Tensors without values have a mode in common, and so do their copies.
    modes = {each.fake_mode for each in tensors if isinstance(each, FakeTensor)}
    return copy.deepcopy(model, {id(mode): mode for mode in modes})


@contextlib.contextmanager
def _without(model: nn.Module, repetition: Repetition, times: int) -> Iterator[None]:
    """Take the last repetitions out of a model for a while."""
    container = model.get_submodule(repetition.container)
    before = container._modules
    children = list(before.values())
    start = repetition.start + times * repetition.period
    kept = children[:start] + children[repetition.start + repetition.blocks :]
    container._modules = {str(index): each for index, each in enumerate(kept)}
    try:
        yield
    finally:
        container._modules = before


# -- from few repetitions to all ------------------------------------------------------------------


class NotOnALineError(Exception):
    """What was counted does not grow by the same number with each repetition."""


Counts = Mapping[tuple[Hashable, int | None], int]
"""Bytes by what was counted, and by the index of the block where, if it was at one."""


def extended(
    counts: Sequence[Counts], period: int, times: int
) -> dict[tuple[Hashable, Hashable], int]:
    """What would be counted with so many repetitions.

    Bytes at a block grow with the repetitions before and after it, by two constants. They are most
    at the first or last repetition, which are next to other parts of the model, or at those next
    to them.

    Args:
        counts: with each number of `SHORTENED` repetitions.
        period: number of blocks of a repetition.
        times: the number of repetitions to know.

    Raises:
        NotOnALineError: the counts do not follow such lines.
    """
    by_place = [
        _by_place(each, period, measured) for each, measured in zip(counts, SHORTENED, strict=True)
    ]
    few, more, most = by_place
    if not few.keys() == more.keys() == most.keys():
        raise NotOnALineError
    found = {}
    for place, count in few.items():
        step = more[place] - count
        if most[place] - more[place] != step:
            raise NotOnALineError
        found[place] = count + (times - SHORTENED[0]) * step
    return found


def _by_place(counts: Counts, period: int, times: int) -> dict[tuple[Hashable, Hashable], int]:
    """Counts at the first, second, last and last but one repetition, and at no block."""
    found: dict[tuple[Hashable, Hashable], int] = {}
    for (what, block), count in counts.items():
        if block is None:
            found[what, None] = count
            continue
        repetition, position = divmod(block, period)
        places = {"first": 0, "second": 1, "last but one": times - 2, "last": times - 1}
        for place, index in places.items():
            if index == repetition:
                found[what, (position, place)] = count
        if 1 < repetition < times - 2:
            before = counts[what, block - period]
            after = counts[what, block + period]
            if before + after != 2 * count:
                raise NotOnALineError
    return found
