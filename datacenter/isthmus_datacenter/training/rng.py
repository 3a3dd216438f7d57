"""Random numbers that a rank draws while it trains: the same in every repetition."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def derived_seed(*parts: int) -> int:
    """A seed of 63 bits for a purpose named by numbers, unrelated to that of any other.

    >>> derived_seed(0, 1) == derived_seed(0, 1) != derived_seed(1, 0)
    True
    """
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def seed_all(*parts: int) -> None:
    """Make whatever is drawn from here on depend on these numbers alone."""
    derived = derived_seed(*parts)
    torch.manual_seed(derived)
    random.seed(derived)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(derived % 2**32)


def states(device: torch.device) -> dict[str, Any]:
    """Where the generators are."""
    found = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.get_state()
    return found


def go_on(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators where they were."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
