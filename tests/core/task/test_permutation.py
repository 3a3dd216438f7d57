"""The beginning of a permutation is that of the whole permutation."""

import tracemalloc

import pytest
import torch

from isthmus.task.scoring import permutation
from isthmus.task.scoring.permutation import first_of_permutation


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("examples", "count"), [(8, 1), (801, 100), (1000, 125), (99_991, 777), (2_000_000, 64)]
)
def test_it_is_that_of_torch(examples, count):
    for seed in range(3):
        whole = torch.randperm(examples, generator=seeded(seed))
        assert torch.equal(first_of_permutation(examples, count, seeded(seed)), whole[:count])


def test_a_large_part_is_left_to_torch():
    generator = seeded()
    assert first_of_permutation(1000, 126, generator) is None
    assert torch.equal(
        torch.randperm(9, generator=generator), torch.randperm(9, generator=seeded())
    )


def test_another_way_to_permute_is_noticed(monkeypatch):
    monkeypatch.setattr(permutation, "_NARROW", 0)  # as if PyTorch drew 64 bits for each
    permutation._is_known.cache_clear()
    try:
        assert first_of_permutation(1000, 5, seeded()) is None
    finally:
        permutation._is_known.cache_clear()


def test_it_takes_no_memory_for_the_rest():
    tracemalloc.start()
    try:
        chosen = first_of_permutation(10**10, 64, seeded())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert chosen.unique().numel() == 64
    assert int(chosen.max()) > 10**9
