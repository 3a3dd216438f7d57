"""Sums with noise through the whole protocol: the mean of clipped updates, with any devices lost.

Seeds of updates are fixed, those of the noise are not: bounds are seven standard deviations of what
is measured, which a correct program exceeds in fewer than one in a billion runs of this file.
"""

import itertools
import random

import pytest
import torch
from tests.privacy.protocol import ProtocolRound, make_config, names

from isthmus.errors import AggregationAborted, UpdateError
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.encoding import decode, encode
from isthmus_privacy.secagg.messages import Stage
from isthmus_privacy.slots import TRAINING_SLOTS

SIZE = 5000


def noise_for(clients, honest, *, multiplier=1.0, size=SIZE, bits=32):
    return DistributedNoise.fit(
        clip=1.0, multiplier=multiplier, honest=honest, clients=clients, size=size, bits=bits
    )


class NoisyRound(ProtocolRound):
    """Updates of which some are clipped; keeps the exact clipped ones."""

    def __init__(self, *args, update_norm=1.0, **changes):
        super().__init__(*args, weight_max=1, **changes)
        self.clipped = {}
        self.update_norm = update_norm

    def encoded(self, name):
        update = torch.randn(self.config.size, generator=torch.manual_seed(int(name[1:])))
        update *= self.update_norm * (0.3 + int(name[1:]) % 3) / update.norm()
        self.clipped[name] = update / max(1.0, float(update.norm()))
        encoded = encode(self.config, update, weight=1)
        self.plain[name] = encoded.vector.clone()
        return encoded


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("dropouts", [{}, {"c00001": Stage.SHARE_KEYS, "c00004": Stage.UNMASKING}])
def test_the_decoded_mean_is_that_of_the_clipped_updates(bits, dropouts):
    round_ = NoisyRound(
        6, dropouts, size=SIZE, bits=bits, clients_min=4, noise=noise_for(6, 4, bits=bits)
    )
    total = round_.run()
    mean = decode(round_.config, total.vector, clients=len(total.clients))
    expected = sum(round_.clipped[name] for name in total.clients) / len(total.clients)
    error = (mean.vector - expected).double()
    assert mean.noise == pytest.approx(1.0 / 4**0.5 / len(total.clients) ** 0.5, rel=0.02)
    # 5,000 elements: the standard deviation of a standard deviation is 1 %; seven of them.
    assert float(error.std()) == pytest.approx(mean.noise, rel=0.07)
    assert abs(float(error.mean())) < 7 * mean.noise / SIZE**0.5
    assert (mean.weight, mean.clients, mean.figures) == (len(total.clients),) * 2 + ({},)
    assert mean.clipped is None
    assert RoundConfig.from_bytes(round_.config.to_bytes()) == round_.config


def deviation(vector):
    return float(vector.double().square().mean()) ** 0.5


@pytest.mark.parametrize(("corrupt", "dropped"), [(0, 2), (1, 1)])
def test_no_dropout_takes_the_noise_of_a_small_cohort_below_its_target(corrupt, dropped):
    """Every pattern, and every choice of colluding survivors, who know their own noise."""
    honest = 6 - dropped - corrupt
    noise = noise_for(6, honest)
    target = noise.sensitivity(SIZE)
    patterns = [
        lost for count in range(dropped + 1) for lost in itertools.combinations(names(6), count)
    ]
    for lost in patterns:
        round_ = NoisyRound(
            6,
            dict.fromkeys(lost, Stage.MASKED_INPUT),
            update_norm=0.0,
            size=SIZE,
            noise=noise,
            corrupt_permille=100 * corrupt,
            clients_min=6 - dropped,
        )
        assert round_.config.honest_survivors == honest
        total = round_.run()
        assert deviation(total.vector) == pytest.approx(
            noise.sigma(SIZE) * len(total.clients) ** 0.5, rel=0.07
        )
        for colluding in itertools.combinations(total.clients, corrupt):
            known = sum(round_.plain[name] for name in colluding)
            assert deviation(total.vector - known) > 0.93 * target


def test_no_sampled_dropout_takes_the_noise_of_a_large_cohort_below_its_target():
    """40 devices of which 12 drop out and 4 collude, 200 patterns."""
    config = make_config(
        size=SIZE,
        clients_max=40,
        clients_min=28,
        weight_max=1,
        corrupt_permille=100,
        dropout_permille=300,
        noise=noise_for(40, 24),
    )
    assert config.honest_survivors == 24
    shares = torch.stack([encode(config, torch.zeros(SIZE), weight=1).vector for _ in range(40)])
    drawn = random.Random(0)
    for _ in range(200):
        honest = drawn.sample(range(40), 24)
        total = shares[honest].sum(0, dtype=torch.int64)
        assert deviation(total) > 0.93 * config.noise.sensitivity(SIZE)


def test_an_unusable_update_is_noise_like_that_of_any_other():
    """A weight of 0 sends zeros, whatever the vector: its noise does not show that."""
    config = make_config(size=SIZE, weight_max=1, noise=noise_for(6, 4))
    unusable = encode(config, torch.full((SIZE,), 1e9), weight=0)
    assert deviation(unusable.vector) == pytest.approx(config.noise.sigma(SIZE), rel=0.07)


def test_a_repeated_attempt_has_noise_of_its_own():
    """The key that makes other vectors repeatable does not make these so."""
    config = make_config(size=SIZE, weight_max=1, noise=noise_for(6, 4, multiplier=0.01))
    update = torch.ones(SIZE)
    first, second = (
        encode(config, update, weight=1, dither_key=bytes(32)).vector.double() for _ in range(2)
    )
    # Rounding differs in each, with a variance of up to 1/4.
    expected = (2 * config.noise.sigma(SIZE) ** 2 + 1 / 3) ** 0.5
    assert deviation(first - second) == pytest.approx(expected, rel=0.07)


@pytest.mark.parametrize(("size", "multiplier"), [(4, 1.0), (4, 0.02), (5000, 1.0), (5000, 0.02)])
def test_one_device_adds_to_a_sum_no_more_than_bounds_and_noise(size, multiplier):
    """Up to about the clipping bounds of all devices, which it can cancel, and what noise hides."""
    noise = noise_for(20, 12, size=size, multiplier=multiplier)
    config = make_config(size=size, clients_max=20, weight_max=1, noise=noise)
    total = sum(encode(config, torch.zeros(size), weight=1).vector for _ in range(20))
    decode(config, total, clients=20)
    added = torch.zeros_like(total)
    largest = 0.0
    # In the rotated vector, in which every direction is as good as any other.
    for factor in torch.arange(0, 10, 0.05).tolist():
        added[0] = int(factor * 20 * noise.clip * noise.scale)
        try:
            decode(config, total + added, clients=20)
        except AggregationAborted as error:
            assert error.code == "sum-out-of-range"  # noqa: PT017
            break
        largest = factor
    spread = noise.noise_of_mean(size, 20)
    hidden = 4 * spread**2 * (size * 29) ** 0.5 + 30 * spread + 120 * spread**2
    assert 0.9 < largest < (1 + hidden) ** 0.5 + 0.1


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), 1 << 28])
def test_a_sum_that_no_honest_devices_can_have_is_refused(value):
    config = make_config(weight_max=1, noise=noise_for(6, 4, size=4))
    total = torch.full((4,), value, dtype=torch.int32)
    with pytest.raises(AggregationAborted, match="sum of 4 clients is out of range"):
        decode(config, total, clients=4)


@pytest.mark.parametrize("size", [1, 15, 1000])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_the_largest_honest_sums_are_not_refused(size, scale):
    """All devices send the same update, at their bound, which is also that of the sum."""
    for multiplier in (1e-3, 0.3, 10.0):
        noise = DistributedNoise.fit(
            clip=scale, multiplier=multiplier, honest=12, clients=20, size=size, bits=64
        )
        config = make_config(size=size, clients_max=20, weight_max=1, bits=64, noise=noise)
        update = torch.ones(size) * scale * 1e3
        for clients in (1, 14, 20):
            vectors = [encode(config, update, weight=1).vector for _ in range(clients)]
            decode(config, sum(vectors), clients=clients)


def test_noise_needs_updates_without_figures():
    config = make_config(weight_max=1, noise=noise_for(6, 4, size=4))
    config.check_form(TRAINING_SLOTS, whole=0)
    with pytest.raises(UpdateError, match="were given for the slots"):
        encode(config, torch.zeros(4), weight=1, figures={"loss": 0.5})
