"""Random number generators of a rank: seeds, and saving and restoring the generators' states."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def derived_seed(*parts: int) -> int:
    """Derive a 63-bit seed from a tuple of numbers; different tuples give unrelated seeds.

    >>> derived_seed(0, 1) == derived_seed(0, 1) != derived_seed(1, 0)
    True
    """
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def seed_all(*parts: int) -> None:
    """Seed torch, Python's `random` and NumPy (if it is imported) from a tuple of numbers."""
    seed = derived_seed(*parts)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators that a task may use on a device."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to states that `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
