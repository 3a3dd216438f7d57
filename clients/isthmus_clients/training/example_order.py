"""The examples of a device's local steps, a pure function of the job's seed, round and device."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import torch

from isthmus.job.federated import FederatedSection
from isthmus.task.scoring.order import EpochOrder


def local_seed(seed: int, round_: int, name: str) -> bytes:
    """32-byte seed of a device's randomness in a round."""
    return hashlib.sha256(f"isthmus/local/{seed}/{round_}/{name}".encode()).digest()


def step_indices(seed: bytes, order: EpochOrder, settings: FederatedSection) -> Iterator[list[int]]:
    """Yield the examples of each local step: shuffled epochs, as many as the job specifies."""
    generator = torch.Generator().manual_seed(number(seed))
    steps_left = settings.local_steps
    # A number of steps goes through as many epochs as it takes.
    epochs = itertools.repeat(None) if steps_left is not None else range(settings.local_epochs or 1)
    for _ in epochs:
        if steps_left == 0:
            return
        wanted = order.length if steps_left is None else steps_left * settings.batch_size
        # In the last epoch only what is used of it: nothing is drawn after it.
        if wanted < order.length:
            indices = order.first(generator, wanted)
        else:
            indices = order.epoch(generator)
        for start in range(0, len(indices), settings.batch_size):
            if steps_left == 0:
                return
            # Each batch by itself: a list of numbers takes several times the tensor's memory.
            yield indices[start : start + settings.batch_size].tolist()
            steps_left = None if steps_left is None else steps_left - 1


def first_pass(seed: bytes, order: EpochOrder, settings: FederatedSection) -> list[list[int]]:
    """The steps of `step_indices` in the first epoch."""
    steps = -(-order.length // settings.batch_size)
    return list(itertools.islice(step_indices(seed, order, settings), steps))


def number(seed: bytes) -> int:
    """The seed for one of PyTorch's generators."""
    return int.from_bytes(seed[:8], "little") >> 1
