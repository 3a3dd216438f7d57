"""The encoding that follows from summed ranges: nothing is clipped, and rounding changes little."""

import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.protocol import make_config

from isthmus_privacy.secagg.encoding import decode, encode
from isthmus_privacy.secagg.ranges import LADDER, SIZE, Encoding, Ranges, counts_of

SCALES = [10.0**exponent for exponent in (-6, -5, -4, -3, -2, 0, 1, 2, 4, 6)]


def ranges_of(updates, weights, tensors=None):
    counts = [
        counts_of(update, tensors(update) if tensors else [update], weight)
        for update, weight in zip(updates, weights, strict=True)
    ]
    assert all(each.sum() == 4 and each.max() == 1 for each in counts)
    return Ranges.of(torch.stack(counts).sum(0), devices=len(updates))


def summed(encoding, updates, weights, clients=None):
    """The mean of a sum with that encoding."""
    config = make_config(
        size=len(updates[0]),
        clients_max=clients or max(3, len(updates)),
        clip=encoding.clip,
        weight_max=encoding.weight_max,
        bits=encoding.bits,
        levels=encoding.levels,
    )
    config.check()
    total = None
    for update, weight in zip(updates, weights, strict=True):
        vector = encode(config, update, weight=weight).vector
        total = vector.clone() if total is None else total.add_(vector)
    return decode(config, total, clients=len(updates))


def plain_mean(updates, weights):
    pairs = zip(updates, weights, strict=True)
    return sum(weight * update.double() for update, weight in pairs) / sum(weights)


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "weights",
    [[20] * 5, [1] * 5, [1, 7, 300, 20_000, 5_000_000], [1 << 24, 1, 1, 1, 1], [3] * 60],
    ids=["equal", "ones", "mixed", "one-large", "many"],
)
def test_the_mean_is_the_plain_one_at_any_scale(scale, weights):
    torch.manual_seed(0)
    updates = [scale * (torch.randn(3000) + 0.5) for _ in weights]
    encoding = ranges_of(updates, weights).encoding(clients=len(weights))
    mean = summed(encoding, updates, weights)
    assert mean.clipped == 0
    assert mean.weight == sum(weights)
    assert relative_error(mean.vector, plain_mean(updates, weights)) < 1e-4


@pytest.mark.parametrize("large", [1.0, 1e3, 1e6])
def test_a_tensor_with_far_smaller_elements_is_not_rounded_away(large):
    torch.manual_seed(0)
    updates = [torch.cat([large * torch.randn(100), 1e-4 * torch.randn(100)]) for _ in range(6)]
    encoding = ranges_of(updates, [30] * 6, lambda update: update.split(100)).encoding(clients=6)
    mean = summed(encoding, updates, [30] * 6)
    expected = plain_mean(updates, [30] * 6)
    assert encoding.bits == (32 if large == 1.0 else 64)
    assert relative_error(mean.vector, expected) < 1e-4
    assert relative_error(mean.vector[100:], expected[100:]) < 0.05


def test_usual_updates_have_the_usual_encoding():
    updates = [0.01 * torch.randn(500) for _ in range(5)]
    encoding = ranges_of(updates, [20, 400, 1000, 3, 50]).encoding(clients=5)
    assert encoding == Encoding(clip=4.0, weight_max=1000, bits=32)


def test_what_the_job_says_stays():
    updates = [1000 * torch.randn(50) for _ in range(3)]
    ranges = ranges_of(updates, [20, 9000, 1])
    assert ranges.encoding(clients=3, clip=0.5) == Encoding(0.5, 16_000, 32)
    assert ranges.encoding(clients=3, weight_max=70).weight_max == 70
    assert ranges.encoding(clients=3, clip=2.0, weight_max=70) == Encoding(2.0, 70, 32)


def test_devices_that_are_not_in_the_counts_have_room():
    updates = [3 * torch.ones(50) for _ in range(3)]
    ranges = ranges_of(updates, [20] * 3)
    assert ranges.encoding(clients=3, wider=True).clip == 64.0
    others = [60 * torch.ones(50), *updates[1:]]
    assert summed(ranges.encoding(clients=3, wider=True), others, [90, 20, 20]).clipped == 0


def test_a_codec_keeps_its_ring():
    updates = [1e-12 * torch.randn(50) for _ in range(3)]
    encoding = ranges_of(updates, [1, 1, 1]).encoding(clients=3, levels=(1 << 24) - 2)
    assert encoding.bits == 32
    assert encoding.clip < 1e-11


@pytest.mark.parametrize("values", [[0.0, 0.0], [3e38, -3e38], [1e-45, 0.0], []])
def test_the_ends_of_float32(values):
    update = torch.tensor(values)
    encoding = ranges_of([update] * 3, [1] * 3).encoding(clients=3)
    mean = summed(encoding, [update] * 3, [1] * 3)
    assert not mean.clipped
    assert bool(mean.vector.isfinite().all())
    if values and abs(values[0]) > 1:
        assert relative_error(mean.vector, update.double()) < 1e-4


@pytest.mark.parametrize("weight", [0, 1, 2, 32, 33, 63, 1000, 1001, 2000, 1 << 24, LADDER[-1]])
def test_no_number_of_examples_is_above_its_step(weight):
    largest = ranges_of([torch.ones(2)] * 3, [weight] * 3).encoding(clients=3).weight_max
    assert weight <= largest <= max(1000, 2 * weight)


@pytest.mark.parametrize(("index", "change"), [(0, -1), (0, 1), (SIZE - 1, 1)])
def test_a_sum_that_devices_cannot_have_is_refused(index, change):
    total = 3 * counts_of(torch.ones(2), [], weight=1)
    total[index] += change
    with pytest.raises(ValueError, match="does not have a count for each"):
        Ranges.of(total, devices=3)


@pytest.mark.parametrize(
    ("others", "lied", "clip"),
    [
        (0.01, 3.9, 4.0),  # within the usual range, as before
        (0.01, 1e6, 4.0),
        (0.01, 1e30, 4.0),
        (100.0, 1000.0, 1024.0),  # 16 times the others at most: it may be right
        (100.0, 1e6, 2048.0),
        (0.0, 1e6, 4.0),
    ],
)
def test_a_device_that_may_lie_does_not_make_the_range_as_wide_as_it_likes(others, lied, clip):
    updates = [torch.full((4,), others)] * 19 + [torch.full((4,), lied)]
    ranges = ranges_of(updates, [20] * 20)
    assert ranges.encoding(clients=20, liars=2).clip == clip
    assert ranges.is_limited(2) == (clip < lied)
    assert ranges.encoding(clients=20).clip >= lied
    assert not ranges.is_limited(0)


@settings(max_examples=50)
@given(
    exponent=st.integers(-30, 30),
    spread=st.floats(0, 3.9),
    devices=st.integers(3, 40),
    seed=st.integers(0, 2**32),
)
def test_devices_of_one_scale_are_never_limited(exponent, spread, devices, seed):
    """Whatever it is: the largest is up to 16 times as large as the others."""
    draws = torch.Generator().manual_seed(seed)
    powers = exponent + spread * torch.rand(devices, generator=draws)
    updates = [torch.full((3,), float(2**power)) for power in powers]
    ranges = ranges_of(updates, [20] * devices)
    assert not ranges.is_limited(max(1, devices // 10))
    assert ranges.encoding(clients=devices, liars=2) == ranges.encoding(clients=devices)


def test_the_weight_of_survivors_is_known_to_a_factor_of_two():
    ranges = ranges_of([torch.ones(2)] * 5, [1, 20, 20, 300, 5000])
    assert ranges.weight_bounds(5, 8000) == (1 + 17 + 17 + 251 + 4001, 1 + 32 + 32 + 500 + 8000)
    assert ranges.weight_bounds(3, 8000) == (1 + 17 + 17, 32 + 500 + 8000)  # if any one is lost
    assert ranges.weight_bounds(5, 100) == (1 + 17 + 17 + 100 + 100, 1 + 32 + 32 + 100 + 100)
    assert ranges.weight_bounds(5, 1) == (5, 5)
    assert ranges.weight_bounds(0, 8000) == (0, 0)


def test_the_magnitude_of_compressed_updates_is_near_that_of_the_updates():
    updates = [torch.full((50,), 0.02)] * 20
    ranges = ranges_of(updates, [20] * 20)
    low, high = ranges.magnitude_bounds(1000, 4)
    sent = math.log2(0.02 * 20 / 1000)
    assert sent - 11 < low < sent - 7
    assert sent + 2 < high < sent + 5
    lied = ranges_of([*updates[:-1], torch.full((50,), 1e30)], [20] * 20)
    assert lied.magnitude_bounds(1000, 4, 2)[1] < math.log2(4 * 4 * 32 / 1000) + 0.01
    nothing = ranges_of([torch.zeros(50)] * 3, [20] * 3)
    assert nothing.magnitude_bounds(1000, 4) == (-math.inf, math.inf)
    assert Ranges.unknown().magnitude_bounds(1000, 4) == (-math.inf, math.inf)


def test_counts_are_read_as_they_were_written():
    ranges = ranges_of([torch.ones(3), torch.zeros(3)], [1, 900])
    assert Ranges.read(ranges.counts) == ranges
    assert dataclasses.asdict(ranges) == dataclasses.asdict(Ranges.read(ranges.counts))


@pytest.mark.parametrize(
    ("devices", "is_refused"),
    [
        ([(0.01, 20)] * 9, False),
        ([(0.01, 20)] * 9 + [(1e4, 20)], False),
        ([(0.01, 20)] * 9 + [(0.01, 5_000_000)], False),
        ([(0.0, 0)] * 9 + [(0.01, 20)], False),
        ([(0.0, 20)] * 9, False),
        ([(0.01, 20)] * 9 + [(1e30, 20)], True),
        ([(0.01, 20)] * 9 + [(1e12, 20)], True),
    ],
)
def test_a_device_out_of_all_proportion_does_not_silently_cost_the_others_their_updates(
    devices, is_refused
):
    updates = [torch.full((4,), size) for size, _ in devices]
    ranges = ranges_of(updates, [weight for _, weight in devices])
    encoding = ranges.encoding(clients=12)
    config = make_config(
        size=4,
        clients_max=12,
        clip=encoding.clip,
        weight_max=encoding.weight_max,
        bits=encoding.bits,
        levels=encoding.levels,
    )
    refusal = ranges.refusal(encoding, config.levels)
    assert bool(refusal) == is_refused
    if is_refused:
        assert "too different to be summed" in refusal


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("largest", [10_000, 5_000_000])
def test_a_mean_without_the_device_with_most_examples_is_precise(scale, largest):
    """It is lost after the ranges are summed, and the others have few examples."""
    generator = torch.Generator().manual_seed(3)
    updates = list(torch.randn(10, 300, generator=generator) * scale)
    weights = [largest, *[1] * 9]
    ranges = ranges_of(updates, weights)
    encoding = ranges.encoding(clients=10, needed=9)
    result = summed(encoding, updates[1:], weights[1:], clients=10)
    assert relative_error(result.vector, plain_mean(updates[1:], weights[1:])) < 1e-4
    assert not are_lost(ranges, encoding, result)


@pytest.mark.parametrize("scale", SCALES)
def test_a_mean_of_other_devices_with_few_examples_is_precise(scale):
    generator = torch.Generator().manual_seed(4)
    updates = list(torch.randn(6, 300, generator=generator) * scale)
    encoding = ranges_of(updates[:3], [5_000_000] * 3).encoding(clients=3, wider=True)
    found = summed(encoding, updates[3:], [1, 2, 1]).vector
    assert relative_error(found, plain_mean(updates[3:], [1, 2, 1])) < 1e-4


def are_lost(ranges, encoding, result):
    return ranges.are_lost(
        result.vector,
        result.rounding,
        devices=result.clients,
        weight=result.weight,
        weight_max=encoding.weight_max,
    )


def test_a_sum_that_lost_the_updates_is_noticed():
    """By a thousandth in one: less than what was accepted."""
    for clip, is_lost in ((50.0, True), (1.0, False)):
        updates = [torch.full((400,), 1e-4)] * 3
        ranges = ranges_of(updates, [1, 1, 5_000_000])
        encoding = ranges.encoding(clients=3, needed=2, clip=clip)
        result = summed(encoding, updates[:2], [1, 1], clients=3)
        error = relative_error(result.vector, plain_mean(updates[:2], [1, 1]))
        assert (error > 1e-4) == is_lost
        assert are_lost(ranges, encoding, result) == is_lost


def test_zeros_are_not_lost():
    zeros = [torch.zeros(4)] * 3
    ranges = ranges_of(zeros, [1, 1, 5_000_000])
    encoding = ranges.encoding(clients=3, needed=2, clip=1e9)
    assert not are_lost(ranges, encoding, summed(encoding, zeros[:2], [1, 1], clients=3))


@pytest.mark.parametrize("outlier", [1.0, 1e3])
def test_the_lightest_of_very_different_devices_are_precise_alone(outlier):
    """The usual range and weight cost them digits that a ring of 64 bits has."""
    generator = torch.Generator().manual_seed(7)
    updates = list(torch.randn(6, 300, generator=generator) * 1e-5)
    updates[5] *= outlier
    weights = [1, 2, 1, 5_000_000, 4_000_000, 5_000_000]
    ranges = ranges_of(updates, weights)
    encoding = ranges.encoding(clients=6, needed=3)
    result = summed(encoding, updates[:3], weights[:3], clients=6)
    assert relative_error(result.vector, plain_mean(updates[:3], weights[:3])) < 1e-4
    assert not are_lost(ranges, encoding, result)


def test_parameters_are_precise_next_to_running_statistics():
    """Those change by far more, and most devices have changed no parameter."""
    generator = torch.Generator().manual_seed(9)
    parameters = torch.randn(3, 200, generator=generator) * torch.tensor([[1e-4], [0.0], [0.0]])
    statistics = torch.rand(3, 20, generator=generator)
    updates = list(torch.cat([parameters, statistics], dim=1))
    weights = [20, 400, 5_000_000]
    counts = [
        counts_of(update, update.split(200), weight, update[:200])
        for update, weight in zip(updates, weights, strict=True)
    ]
    ranges = Ranges.of(torch.stack(counts).sum(0), devices=3)
    result = summed(ranges.encoding(clients=3), updates, weights)
    expected = plain_mean(updates, weights)
    assert relative_error(result.vector[:200], expected[:200]) < 1e-4


def test_updates_that_cancel_are_not_refused():
    """Their mean is small, and rounding is a small part of each."""
    generator = torch.Generator().manual_seed(8)
    first = torch.randn(300, generator=generator) * 1e-3
    updates = [first, -first * 1.001, first * 1e-3]
    ranges = ranges_of(updates, [40] * 3)
    encoding = ranges.encoding(clients=3)
    result = summed(encoding, updates, [40] * 3)
    error = (result.vector.double() - plain_mean(updates, [40] * 3)).norm()
    assert error < 1e-4 * first.norm()
    assert not are_lost(ranges, encoding, result)


def test_any_devices_of_a_sum_are_right_or_refused():
    """Weights of 1 to 5,000,000, updates of 1e-6 to 1e6, tensors unlike each other, and some lost.

    The error is in parts of the updates' own length, as their mean may be next to zero.
    """
    accepted = 0
    for seed in range(300):
        draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        count = draw.choice([3, 5, 12])
        size = draw.choice([1, 2, 80])
        spread = draw.choice([0, 6])
        base = draw.uniform(-6, 6 - spread)
        scales = [10.0 ** (base + draw.uniform(0, spread)) for _ in range(count)]
        scales = [scale * (draw.random() > 0.1) for scale in scales]
        updates = [torch.randn(size, generator=generator) * scale for scale in scales]
        for update in updates:
            update[: size // 2] *= 10.0 ** draw.uniform(-6, 0)
        weights = [round(10 ** draw.uniform(0, 6.7)) for _ in range(count)]
        needed = draw.randint(2, count)
        clip = draw.choice([None, None, 1e3, 1e9])
        ranges = ranges_of(updates, weights, lambda update: update.split(1))
        encoding = ranges.encoding(clients=count, needed=needed, clip=clip)
        alive = draw.sample(range(count), draw.randint(needed, count))
        if draw.random() < 0.5:
            alive = sorted(range(count), key=lambda each: weights[each])[: len(alive)]
        counted = [weights[each] for each in alive]
        vectors = [updates[each] for each in alive]
        result = summed(encoding, vectors, counted, clients=count)
        if result.clipped or are_lost(ranges, encoding, result):
            continue
        accepted += 1
        error = (result.vector.double() - plain_mean(vectors, counted)).norm()
        pairs = zip(vectors, counted, strict=True)
        length = sum(weight * vector.double().norm() for vector, weight in pairs) / sum(counted)
        assert error <= 1e-4 * length, seed
    assert accepted > 250


@pytest.mark.parametrize("small", [0.0, 1e-6])
@pytest.mark.parametrize("count", [1, 2])
def test_a_mean_far_below_most_updates_is_precise(small, count):
    """The devices with most examples have hardly changed the model."""
    generator = torch.Generator().manual_seed(5)
    scales = torch.tensor([*[small] * count, 1.0, 1.0, 1.0])
    updates = list(torch.randn(count + 3, 300, generator=generator) * scales[:, None])
    weights = [*[1_000_000] * count, 1, 1, 1]
    ranges = ranges_of(updates, weights)
    found = summed(ranges.encoding(clients=len(weights)), updates, weights).vector
    assert relative_error(found, plain_mean(updates, weights)) < 1e-4


@pytest.mark.parametrize("clients", [10, 400])
def test_devices_of_usual_differences_need_no_wide_ring(clients):
    generator = torch.Generator().manual_seed(6)
    scales = 2.0 ** torch.randint(-2, 3, (clients, 1), generator=generator)
    updates = list(torch.randn(clients, 200, generator=generator) * 0.01 * scales)
    weights = torch.randint(20, 500, (clients,), generator=generator).tolist()
    encoding = ranges_of(updates, weights).encoding(clients=clients, needed=clients * 3 // 4)
    assert encoding.bits == 32
