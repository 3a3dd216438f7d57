"""Encode updates, weights and figures as ring vectors and decode their sums."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.protocol import ProtocolRound, make_config
from torch import nn

from isthmus.errors import AggregationAborted, UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.crypto.masking import TILE
from isthmus_privacy.secagg.config import BIN_LEVELS, WIDE_LEVELS, smallest_ring
from isthmus_privacy.secagg.encoding import decode, encode
from isthmus_privacy.secagg.messages import Stage
from isthmus_privacy.secagg.ranges import SIZE as RANGE_COUNTS
from isthmus_privacy.secagg.ranges import Ranges, counts_of
from isthmus_privacy.slots import OVER_WEIGHT, UNUSABLE, WITHIN_CLIP, Slot

SLOTS = (
    Slot(name="hits", maximum=1000.0, exact=True),
    Slot(name="loss", maximum=50.0),
    Slot(name="perplexity", maximum=1e4),
)


def total_of(config, *contributions):
    encoded = [encode(config, update, weight=w, figures=f) for update, w, f in contributions]
    return sum((e.vector for e in encoded[1:]), encoded[0].vector.clone())


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("size", [0, 1, 7, TILE, TILE + 3])
def test_weighted_means_of_updates_and_figures(bits, size):
    config = make_config(bits=bits, size=size, slots=SLOTS, clip=2.0, weight_max=100)
    config.check()
    updates = [torch.empty(size).uniform_(-2, 2) for _ in range(3)]
    weights, losses, hits = [100, 30, 1], [0.5, 2.0, 49.0], [90, 20, 0]
    figures = [
        {"hits": h, "loss": x, "perplexity": 2 * x} for h, x in zip(hits, losses, strict=True)
    ]
    mean = decode(config, total_of(config, *zip(updates, weights, figures, strict=True)), clients=3)
    plain = sum(w * u for w, u in zip(weights, updates, strict=True)) / sum(weights)
    step = 2 * 2.0 / (config.levels - 1) * 3 * 100 / sum(weights)
    torch.testing.assert_close(mean.vector, plain, rtol=0, atol=step + 1e-6)
    assert mean.weight == 131
    assert mean.clients == 3
    assert mean.clipped == 0
    assert mean.figures["hits"] == 110
    loss = sum(w * x for w, x in zip(weights, losses, strict=True)) / 131
    assert mean.figures["loss"] == pytest.approx(loss, abs=step * 50 / 2)
    assert mean.figures["perplexity"] == pytest.approx(2 * loss, abs=step * 1e4 / 2)


def bins_config(clients, bits):
    return make_config(
        whole=True, bits=bits, levels=BIN_LEVELS, size=3, clients_max=clients, weight_max=1
    )


@pytest.mark.parametrize(
    ("clients", "bits"), [(3, 16), (2048, 16), (32_767, 16), (32_768, 32), (1_000_000, 32)]
)
def test_the_bins_of_all_clients_are_summed_exactly_in_the_smallest_ring(clients, bits):
    assert smallest_ring(clients, BIN_LEVELS) == bits
    config = bins_config(clients, bits)
    first = encode(config, torch.tensor([0, 1, 1]), weight=1).vector
    other = encode(config, torch.tensor([1, 0, 1]), weight=1).vector
    found = decode(config, first + other * (clients - 1), clients=clients)
    assert found.vector.dtype == torch.int64
    assert found.vector.tolist() == [clients - 1, 1, clients]
    assert found.weight == clients


def test_no_ring_is_too_large_for_whole_numbers():
    with pytest.raises(ValueError, match="do not fit 64 bits"):
        smallest_ring(1 << 63, BIN_LEVELS)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_what_one_client_adds_to_bins_is_refused_or_what_it_would_be_without_a_ring(bits):
    """A small ring wraps, and never to a sum that the liar could not have had in a large one."""
    config = bins_config(20, bits)
    honest = 20 * encode(config, torch.tensor([1, 0, 0]), weight=1).vector
    for added in (0, 1, -1, 19, 20, 21, -20, -40, -41, 1 << 14, -(1 << 14), (1 << 15) - 1):
        lied = honest.clone()
        lied[0] += added
        if abs(20 + added) <= 20:
            assert decode(config, lied, clients=20).vector.tolist() == [20 + added, 0, 0]
        else:
            with pytest.raises(AggregationAborted, match="is out of range"):
                decode(config, lied, clients=20)


def test_the_extremes_of_all_clients_do_not_wrap():
    config = make_config(clients_max=16, size=2, weight_max=7)
    update = torch.tensor([1e30, -1e30])
    mean = decode(config, total_of(config, *[(update, 7, {})] * 16), clients=16)
    torch.testing.assert_close(mean.vector, torch.tensor([1.0, -1.0]))
    assert mean.clipped == 1.0


def test_a_tight_clipping_bound_is_visible_in_the_sum():
    config = make_config(size=1000, clip=0.5)
    update = torch.linspace(-1, 1, 1000)
    mean = decode(config, total_of(config, (update, 1, {}), (update / 4, 1, {})), clients=2)
    assert mean.clipped == pytest.approx(0.25, abs=0.01)


def test_a_single_clipped_element_is_counted():
    config = make_config(size=100_000, bits=16, clip=0.5)
    update = torch.zeros(100_000)
    update[77] = 1.0
    assert decode(config, total_of(config, (update, 1, {})), clients=1).clipped > 0


@pytest.mark.parametrize("weight_max", [1, 100])
@pytest.mark.parametrize("clip", [0.003, 0.1, 4.0])
def test_a_sum_in_which_all_are_clipped_is_one_that_honest_clients_can_have(clip, weight_max):
    """(levels - 1) / 2 of a range of 0.003 is half a level too much in float64."""
    config = make_config(
        size=2, clip=clip, weight_max=weight_max, clients_max=20, bits=64, levels=WIDE_LEVELS
    )
    update = torch.tensor([1.0, -1.0]) * 2 * clip
    total = total_of(config, *[(update, weight_max, {})] * 20)
    mean = decode(config, total, clients=20)
    assert mean.vector.tolist() == pytest.approx([clip, -clip])


@pytest.mark.parametrize("value", [0.3, -0.7, 0.999])
def test_rounding_is_random_and_unbiased(value):
    """With 5 levels, values round to both neighbouring levels; a bias of 1/3 is detected."""
    config = make_config(levels=5, size=400_000)
    draws = decode(config, total_of(config, (torch.full((400_000,), value), 10, {})), clients=1)
    assert len(draws.vector.unique()) == 2
    error = 0.5 / 400_000**0.5  # levels are 0.5 apart
    # The dither has no seed: six deviations and more, exceeded once in 10^9 runs.
    assert abs(float(draws.vector.mean()) - value) < 6 * error / 2
    assert abs(float(draws.vector.mean()) - value * 2 / 3) > 5 * error


def test_two_encodings_of_one_update_differ():
    config = make_config(levels=1000, size=1000)
    update = torch.rand(1000)
    assert not torch.equal(
        encode(config, update, weight=1).vector, encode(config, update, weight=1).vector
    )


@pytest.mark.parametrize(
    ("bits", "clients", "levels"), [(16, 3, 0), (32, 3, 0), (32, 41, 0), (64, 2048, WIDE_LEVELS)]
)
@pytest.mark.parametrize("clip", [2.0**-40, 0.3, 4.0, 2.0**70])
def test_an_element_that_no_device_changes_stays_as_it_is(bits, clients, levels, clip):
    """As of a layer that no loss uses, or a 1 that the model reads as a whole number."""
    settings = {"bits": bits, "clients_max": clients, "levels": levels, "clip": clip}
    config = make_config(size=TILE + 3, weight_max=1000, complete_up_to=0, **settings)
    update = torch.zeros(TILE + 3)
    update[::2] = torch.empty(len(update[::2])).uniform_(-clip, clip)
    total = sum(encode(config, update, weight=w).vector for w in (1, 7, 1000))
    # The others have sent zeros, of the weight 1: the middle level.
    total[: config.size] += (clients - 3) * ((config.levels - 1) // 2)
    total[config.size] += clients - 3
    mean = decode(config, total, clients=clients)
    assert torch.count_nonzero(mean.vector[1::2]) == 0
    assert torch.count_nonzero(mean.vector[::2]) > TILE / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_floating_type_is_encoded(dtype):
    config = make_config(size=100)
    update = torch.empty(100, dtype=dtype).uniform_(-1, 1)
    before = update.clone()
    mean = decode(config, total_of(config, (update, 10, {})), clients=1)
    torch.testing.assert_close(mean.vector, update.float(), rtol=0, atol=1e-7)
    assert torch.equal(update, before)


def test_a_non_finite_element_is_named():
    config = make_config(size=TILE + 9)
    update = torch.zeros(TILE + 9)
    update[TILE + 4] = float("nan")
    with pytest.raises(UpdateError, match=f"element {TILE + 4} of the update is nan"):
        encode(config, update, weight=1)


def test_an_exchange_set_is_averaged_in_a_round():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)) for _ in range(6)]
    layout = TensorLayout.of(models[0])
    protocol = ProtocolRound(6, {"c00002": Stage.MASKED_INPUT}, size=layout.size, clip=4.0)
    protocol.encoded = lambda name: encode_and_keep(
        protocol, name, layout.gather(models[int(name[1:])])
    )
    total = protocol.run()
    merged = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    layout.scatter(decode(protocol.config, total.vector, clients=5).vector, merged)
    remaining = [i for i in range(6) if i != 2]
    weights = [protocol.weight(f"c{i:05d}") for i in remaining]
    for name, parameter in merged.named_parameters():
        plain = sum(
            w * dict(models[i].named_parameters())[name]
            for w, i in zip(weights, remaining, strict=True)
        ) / sum(weights)
        torch.testing.assert_close(parameter, plain, rtol=0, atol=1e-5)


UNUSABLE_SLOTS = (OVER_WEIGHT, UNUSABLE)


def adversarial_update(draws, size, clip):
    """Elements at and around the bounds, and any others."""
    ends = torch.tensor([clip, -clip, 1e30, -1e30, 0.0, 1e-30, clip / 3])
    return ends[torch.randint(len(ends), (size,), generator=draws)]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    clients=st.integers(1, 40),
    bits=st.sampled_from([16, 32, 64]),
    exponent=st.integers(-100, 100),
    weight_max=st.sampled_from([1, 2, 7, 1000, 64_000]),
    levels=st.sampled_from([0, 2, 3, 5, 100]),
    equal=st.booleans(),
)
def test_a_sum_of_honest_clients_is_never_refused(
    seed, clients, bits, exponent, weight_max, levels, equal
):
    """Whatever the scale, the weights, the rounding, and how many have no usable update."""
    weight_max = min(weight_max, ((1 << bits) - 1) // max(3, clients))
    draws = torch.Generator().manual_seed(seed)
    clip = 2.0**exponent
    wide = WIDE_LEVELS if bits == 64 and not levels else levels
    config = make_config(
        bits=bits,
        size=9,
        slots=UNUSABLE_SLOTS,
        clip=clip,
        weight_max=weight_max,
        clients_max=max(3, clients),
        levels=min(wide, ((1 << bits) - 1) // max(3, clients)),
    )
    update = adversarial_update(draws, 9, clip)
    contributions = []
    counts = torch.zeros(RANGE_COUNTS, dtype=torch.int64)
    for client in range(clients):
        if not equal:
            update = adversarial_update(draws, 9, clip)
        if client and torch.rand((), generator=draws) < 0.2:
            figures = {"unusable": 1, "over_weight": 0}
            contributions.append((torch.zeros(9), 0, figures))
            continue
        examples = int(2 ** (torch.rand((), generator=draws) * 17))
        over = examples > weight_max
        figures = {"unusable": 0, "over_weight": int(over)}
        contributions.append((update, min(examples, weight_max), figures))
        counts += counts_of(update, [update], examples)
    # Any devices may be lost between the sum of ranges and that of the updates.
    kept = contributions[: 1 + int(torch.randint(clients, (), generator=draws))]
    ranges = Ranges.of(counts, int(counts.sum()) // 4)
    mean = decode(config, total_of(config, *kept), clients=len(kept), ranges=ranges)
    assert mean.weight == sum(weight for _, weight, _ in kept)
    step = 2 * clip / (config.levels - 1) * 2 * len(kept) * weight_max / mean.weight
    assert float(mean.vector.abs().max()) <= clip * (1 + 1e-6) + step


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("bits", [32, 64])
def test_no_element_of_a_mean_is_beyond_the_range(share, bits):
    """One client adds anything in the ring: the mean stays in the range, or is refused."""
    levels = WIDE_LEVELS if bits == 64 else 0
    config = make_config(clients_max=20, weight_max=1000, clip=4.0, bits=bits, levels=levels)
    weight = int(1000 * share)
    honest = total_of(config, *[(torch.full((4,), -0.01), weight, {})] * 20)
    refused = 0
    for mean in (-1e6, -4.1, -4.0, -3.9, 0.0, 3.9, 4.0, 4.1, 80.0, 1e6, 1e18):
        total = honest.clone()
        number = round((20 * 4 + mean * 20 * share) * (config.levels - 1) / 8) % (1 << bits)
        total[0] = number - (1 << bits) if number >= 1 << (bits - 1) else number
        try:
            found = decode(config, total, clients=20).vector
        except AggregationAborted as error:
            assert error.code == "sum-out-of-range"  # noqa: PT017
            refused += 1
        else:
            assert float(found.abs().max()) < 4.001
    assert refused >= 3 or share == 1.0  # then an honest sum can be anywhere in the ring


def test_a_sum_that_awaits_noise_is_not_compared_before_it_has_some():
    """A client of a chosen number would learn on which side of a bound the others' sum is."""
    config = make_config(clients_max=8, weight_max=1, clip=1.0, slots=(WITHIN_CLIP,))
    refused = []
    for others in (-0.5, 0.5):
        vectors = [(torch.full((4,), others), 1, {"within_clip": 1.0})] * 3
        total = total_of(config, *vectors, (torch.ones(4), 1, {"within_clip": 1.0}))
        total[0] += config.levels - 1  # of the last one: three bounds in place of one
        try:
            decode(config, total, clients=4)
        except AggregationAborted:
            refused.append(others)
        total[config.size + 2] += 10
        found = decode(config, total, clients=4, awaits_noise=True)
        assert float(found.vector[0]) == pytest.approx((3 * others + 3) / 4, abs=1e-6)
        assert found.figures == {"within_clip": 14.0}
        total[config.size] += 1  # every vector has the weight 1, whatever the data are
        with pytest.raises(AggregationAborted, match="out of range"):
            decode(config, total, clients=4, awaits_noise=True)
    assert refused == [0.5]


def encode_and_keep(protocol, name, update):
    encoded = encode(protocol.config, update, weight=protocol.weight(name))
    protocol.plain[name] = encoded.vector.clone()
    return encoded


def test_the_device_needs_no_numpy():
    """NumPy is hidden, so any use of it fails."""
    script = """
import sys
sys.modules["numpy"] = None
import warnings
warnings.simplefilter("ignore")  # PyTorch warns that NumPy is missing
import isthmus_privacy.secagg as secagg
import doctest
assert doctest.testmod(secagg, raise_on_error=True).attempted > 10
"""
    subprocess.run([sys.executable, "-c", script], check=True)
