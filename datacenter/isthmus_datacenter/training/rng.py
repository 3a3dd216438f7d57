"""Random number generators of a rank: seeds, and saving and restoring the generators' states."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from isthmus_datacenter.parallel.parallel_dims import ParallelDims


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


def seed_rank(seed: int, step: int, dims: ParallelDims, rank: int) -> None:
    """Seed the generators of a rank for training that begins at a step.

    Tensor-parallel ranks draw the same numbers: what they replicate must stay identical. For
    what they shard, `parallel.random_draws` gives each a stream of its own.

    Args:
        seed: of the job.
        step: the first step, from 0.
        dims: the layout.
        rank: which rank is seeded.
    """
    coordinates = dims.coordinates(rank)
    seed_all(seed, step, coordinates.data + dims.data * coordinates.pipeline)


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


@contextlib.contextmanager
def kept_generators(device: torch.device) -> Iterator[None]:
    """Within it numbers may be drawn that nobody misses: the states are restored at its end."""
    states = generator_states(device)
    try:
        yield
    finally:
        restore_generators(states, device)
