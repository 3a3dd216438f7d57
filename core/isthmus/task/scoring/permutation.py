"""The beginning of `torch.randperm`, without the rest of it.

`torch.randperm` shuffles from the front (Fisher and Yates): the k-th element follows from the first
k random numbers. A device that trains on two batches of twenty million examples needs no more of
it, and gets the same examples as from the whole permutation.
"""

from __future__ import annotations

import functools

import torch

_NARROW = (2**32 - 1) // 20
"""Below so many elements `torch.randperm` draws 32 random bits for each."""
_PART = 8
"""A beginning of at most this part of a permutation is worth it: its steps are in Python."""


def first_of_permutation(
    examples: int, count: int, generator: torch.Generator
) -> torch.Tensor | None:
    """The first `count` elements of `torch.randperm(examples, generator=generator)`, int64.

    From 214,748,364 examples on they are those of another permutation, drawn from 64 bits each: the
    whole one would take gigabytes. The generator is in another state afterwards than
    `torch.randperm` leaves it in. None, and nothing is drawn, if the whole permutation is not
    slower, or this PyTorch draws in another way.
    """
    if count * _PART > examples or not _is_known():
        return None
    return _first(examples, count, generator)


def _first(examples: int, count: int, generator: torch.Generator) -> torch.Tensor:
    narrow = examples < _NARROW
    words = (count + 1) // 2 if narrow else count
    # All 64 bits of a random number.
    drawn = torch.empty(words, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    if narrow:  # two numbers of 32 bits, the upper half is that drawn first
        halves = torch.stack([drawn >> 32 & 0xFFFFFFFF, drawn & 0xFFFFFFFF], dim=1)
        numbers = halves.flatten()[:count].tolist()
    else:
        numbers = [number % 2**64 for number in drawn.tolist()]
    chosen = []
    moved: dict[int, int] = {}
    """What is at a position that is not its own number."""
    for position, number in enumerate(numbers):
        other = position + number % (examples - position)
        chosen.append(moved.get(other, other))
        moved[other] = moved.pop(position, position)
    return torch.tensor(chosen, dtype=torch.int64)


@functools.cache
def _is_known() -> bool:
    """Whether this PyTorch permutes as described above, which it does not promise."""
    whole = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    return torch.equal(_first(1000, 100, torch.Generator().manual_seed(0)), whole[:100])
