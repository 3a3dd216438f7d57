"""The random generators of Python and NumPy, from which a task may draw besides PyTorch's.

>>> before = HostGenerators.now()
>>> drawn = random.random()
>>> HostGenerators.now() == before
False
>>> before.restore()
>>> random.random() == drawn
True
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

_LARGEST = (1 << 63) - 1
"""Largest seed that PyTorch takes."""
_WORD = 1 << 32
"""From here on NumPy takes a seed in parts."""


@dataclasses.dataclass(frozen=True)
class HostGenerators:
    """The states of both; equal ones give the same numbers."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    """State of the generator of `numpy.random`'s functions; None if NumPy is not imported."""

    @classmethod
    def now(cls) -> HostGenerators:
        """The states that they have."""
        arrays = sys.modules.get("numpy")
        if arrays is None:
            return cls(random.getstate(), None)
        kind, keys, *rest = arrays.random.get_state(legacy=True)
        return cls(random.getstate(), (kind, keys.tobytes(), *rest))

    @staticmethod
    def seed(number: int) -> None:
        """Seed both, by all bits of a number."""
        random.seed(number)
        arrays = sys.modules.get("numpy")
        if arrays is not None:
            arrays.random.seed(number if number < _WORD else _words(number))

    def restore(self) -> None:
        """Give them these states."""
        random.setstate(self.python)
        arrays = sys.modules.get("numpy")
        if arrays is not None and self.numpy is not None:
            kind, keys, *rest = self.numpy
            arrays.random.set_state((kind, arrays.frombuffer(keys, arrays.uint32), *rest))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all random generators that a task may use, and restore their states afterwards.

    The seed may be larger than PyTorch and NumPy take as one number.
    """
    before = HostGenerators.now()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed & _LARGEST)
        HostGenerators.seed(seed)
        try:
            yield
        finally:
            before.restore()


def _words(seed: int) -> list[int]:
    return [seed >> shift & (_WORD - 1) for shift in range(0, seed.bit_length(), 32)]
