"""Random numbers in steps that are computed in two ways, to compare them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.errors import TaskError

_DRAWS = frozenset(
    f"aten::{name}"
    for name in (
        *("bernoulli", "bernoulli_", "rand", "rand_like", "randn", "randn_like", "randint"),
        *("randint_like", "randperm", "normal", "normal_", "uniform", "uniform_", "exponential_"),
        *("geometric_", "log_normal_", "cauchy_", "random", "random_", "multinomial"),
    )
)


class Predictable(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's has no types
    """All numbers of PyTorch's default generator are one half, or if they are whole the largest.

    Permutations are in falling order. With either, examples that only fill up a batch are noticed
    if others are combined with them. Where no largest number is known, it is 0.

    Of two ways of training each draws other ones otherwise, and their updates cannot be compared.
    Other generators, as of the order of the examples, have the same seed in both ways.
    """

    def __init__(self) -> None:
        """Set up; `with` begins it."""
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's has no types

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operation."""
        given = kwargs or {}
        result = func(*args, **given)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(result[1])
        if func._schema.name in _DRAWS and given.get("generator") is None:
            if result.is_floating_point() or result.is_complex():
                result.fill_(0.5)
            elif func._schema.name == "aten::randperm":
                result.copy_(torch.arange(len(result)).flip(0))
            else:
                names = (argument.name for argument in func._schema.arguments)
                named = {**dict(zip(names, args, strict=False)), **given}
                end = named.get("high", named.get("to"))
                result.fill_(0 if end is None else end - 1)
        return result


@contextlib.contextmanager
def no_other_generators() -> Iterator[None]:
    """Notice numbers of Python's or NumPy's generator: a recorded step would repeat them for ever.

    Raises:
        TaskError: some were drawn.
    """
    before = _states()
    yield
    if _states() != before:
        raise TaskError(
            "stacked models cannot draw numbers from Python's random or NumPy in forward() or "
            "loss(); use those of PyTorch, or train one by one"
        )


def _states() -> tuple[object, object]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else repr(numpy.random.get_state())
