"""Random numbers that a rank draws while it trains: the same in every repetition."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from isthmus_datacenter.data import derived_seed


def seed_all(seed: int, step: int, place: int) -> None:
    """Make whatever is drawn from here on depend on the seed, the step and the place alone."""
    derived = derived_seed(seed, step, place)
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
