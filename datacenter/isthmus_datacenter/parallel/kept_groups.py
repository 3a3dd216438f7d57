"""Process groups and meshes that are made once: a rank opens many runs, and releases none.

They belong to the world in which they were made, and mean nothing in another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_Params = ParamSpec("_Params")
_Made = TypeVar("_Made")

_forget: list[Callable[[], None]] = []


def kept(make: Callable[_Params, _Made]) -> Callable[_Params, _Made]:
    """Make each once, by its hashable arguments, until `forget_groups`."""
    cached = functools.cache(make)
    _forget.append(cached.cache_clear)
    return cached  # type: ignore[return-value]  # the cache takes what the function takes


def forget_groups() -> None:
    """Forget what was made; for a process that ends its world and may begin another."""
    for forget in _forget:
        forget()
    # What PyTorch remembers of operators on equal meshes has the names of their groups.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # of PyTorch
