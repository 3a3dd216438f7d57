"""The fixed-point sum is exact, independent of order, and cannot wrap."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import RoundFailed
from isthmus_server.model.fixed_point_sum import MAGNITUDE_BITS, SUM_BYTES, TILE, WeightedSum
from isthmus_server.model.mmap_buffer import MmapBuffer

values = st.floats(-4095, 4095, width=32)


updates = st.tuples(st.tuples(values, values, values), st.integers(1, 1000))


def mean_of(weighted_updates):
    total = WeightedSum(3, sum(weight for _, weight in weighted_updates))
    for vector, weight in weighted_updates:
        add_tile(total, torch.tensor(vector, dtype=torch.float32), weight)
    return total


def add_tile(total, vector, weight):
    total.reserve(weight)
    total.add(0, vector, weight)


@given(st.lists(updates, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_same_bytes(weighted_updates, random):
    first = mean_of(weighted_updates).mean()
    random.shuffle(weighted_updates)
    shuffled = mean_of(weighted_updates).mean()
    assert first.numpy().tobytes() == shuffled.numpy().tobytes()


@given(st.lists(updates, min_size=1, max_size=8))
def test_the_mean_is_the_weighted_mean(weighted_updates):
    total = mean_of(weighted_updates)
    vectors = torch.tensor([vector for vector, _ in weighted_updates], dtype=torch.float64)
    weights = torch.tensor([weight for _, weight in weighted_updates], dtype=torch.float64)
    expected = (vectors * weights[:, None]).sum(0) / weights.sum()
    error = len(weighted_updates) * 2.0 ** (MAGNITUDE_BITS - 61)
    torch.testing.assert_close(total.mean().double(), expected, rtol=1e-6, atol=error)


@pytest.mark.parametrize("scale", [1e-7, 1e-6, 1e-3, 1.0, 1e3, 1e5])
@pytest.mark.parametrize("examples", [1, 8_000, 5_000_000, 1 << 30])
def test_updates_of_any_scale_and_weight_keep_their_precision(scale, examples):
    """The rounding of values, and not of products, cost small updates of large data sets."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(10, 1000, generator=generator) * scale
    weights = [max(1, examples >> i) for i in range(10)]
    total = WeightedSum(1000, sum(weights))
    for vector, weight in zip(vectors, weights, strict=True):
        add_tile(total, vector, weight)
    factors = torch.tensor(weights, dtype=torch.float64)
    expected = (vectors.double() * factors[:, None]).sum(0) / factors.sum()
    error = torch.linalg.vector_norm(total.mean().double() - expected)
    assert error < 1e-4 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("declared", [1, 3, 1000, 2**31, 2**48])
def test_the_largest_values_and_weights_do_not_wrap(declared):
    total = WeightedSum(2, declared)
    most = torch.tensor([2.0**MAGNITUDE_BITS - 0.0625, -(2.0**MAGNITUDE_BITS) + 0.0625])
    add_tile(total, most, declared)
    add_tile(total, most, declared)
    torch.testing.assert_close(total.mean(), most)


def test_tiles_in_any_order_give_the_same_sum():
    vector = torch.arange(2 * TILE + 3, dtype=torch.float32) / 128
    used = MmapBuffer(SUM_BYTES * len(vector))
    used.view[:] = b"\x4d" * len(used.view)
    for order in itertools.permutations(range(3)):
        total = WeightedSum(len(vector), 7, used)
        total.reserve(7)
        for i in order:
            total.add(i * TILE, vector[i * TILE : (i + 1) * TILE], 7)
        assert torch.equal(total.mean(), vector)


def lost(scale, declared, weights):
    """The mean, and its error, after a device that declared most of the examples was lost."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(weights), 1000, generator=generator) * scale
    total = WeightedSum(1000, declared + sum(weights))
    for vector, weight in zip(vectors, weights, strict=True):
        add_tile(total, vector, weight)
    factors = torch.tensor(weights, dtype=torch.float64)
    expected = (vectors.double() * factors[:, None]).sum(0) / factors.sum()
    error = torch.linalg.vector_norm(total.mean().double() - expected)
    return float(error / torch.linalg.vector_norm(expected))


@pytest.mark.parametrize(
    ("scale", "declared"), [(1e-6, 1000), (1e-4, 100_000), (1e-2, 5_000_000), (1.0, 1 << 27)]
)
@pytest.mark.parametrize("weights", [[1, 1, 1], [12, 300]])
def test_a_mean_without_the_largest_device_is_precise(scale, declared, weights):
    assert lost(scale, declared, weights) < 1e-4


@pytest.mark.parametrize(
    ("scale", "declared"), [(1e-6, 5_000_000), (1e-4, 1 << 30), (1e-2, 1 << 37), (1.0, 1 << 45)]
)
@pytest.mark.parametrize("weights", [[1, 1, 1], [12, 3]])
def test_a_mean_that_is_lost_without_the_largest_device_is_refused(scale, declared, weights):
    with pytest.raises(RoundFailed, match="lost in the rounding that these need"):
        lost(scale, declared, weights)


def test_zeros_without_the_largest_device_are_zeros():
    total = WeightedSum(3, 5_000_000)
    add_tile(total, torch.zeros(3), 1)
    assert total.mean().tolist() == [0, 0, 0]


@pytest.mark.parametrize("clip", [1e-9, 1e-5, 0.75, 1.0, 3e8])
def test_rounding_does_not_make_a_clipped_update_longer(clip):
    size = 50_000
    vector = torch.full((size,), clip / size**0.5)
    total = WeightedSum(size, 1000, clip=clip)
    add_tile(total, vector, 1)
    assert float(total.mean().double().norm()) == pytest.approx(clip, rel=1e-6)


def test_a_mean_that_gets_noise_is_never_refused_for_its_rounding():
    total = WeightedSum(3, 5_000_000, clip=1.0)
    add_tile(total, torch.full((3,), 1e-9), 1)
    assert total.mean().tolist() == pytest.approx([1e-9] * 3, rel=0.01)
