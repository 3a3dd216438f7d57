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

import dataclasses
import random
import sys
from typing import Any


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

    def restore(self) -> None:
        """Give them these states."""
        random.setstate(self.python)
        arrays = sys.modules.get("numpy")
        if arrays is not None and self.numpy is not None:
            kind, keys, *rest = self.numpy
            arrays.random.set_state((kind, arrays.frombuffer(keys, arrays.uint32), *rest))
