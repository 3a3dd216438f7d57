"""Parameters of distributed noise: what they guarantee, and how they are chosen."""

import math

import pytest
from tests.privacy.protocol import make_config

from isthmus.job.federated import MAX_SECURE_COHORT
from isthmus.job.privacy import LARGEST_CLIP, LARGEST_NOISE, SMALLEST_CLIP
from isthmus_privacy.dp import discrete_gaussian
from isthmus_privacy.dp.distributed import WRAP, DistributedNoise, fit_ring
from isthmus_privacy.secagg.config import RoundConfig

MILLION = 1_000_000


def published_scale(clients, size, bits, multiplier):
    """The scale of google-research's distributed_dp: 4 deviations of the sum fit the ring.

    Noise is for 80 % of the clients, as with a tenth that drops out and a tenth that colludes.
    """
    local = multiplier / math.sqrt(0.8 * clients)
    room = math.sqrt(2.0 ** (2 * bits) - 16 * clients)
    return room / (8 * math.sqrt(clients**2 / size + clients * local**2))


def epsilon(rho, delta):
    """The bound of Renyi divergences (Canonne, Kamath, Steinke 2020) over whole orders."""
    orders = range(2, 129)
    return min(a * rho + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in orders)


@pytest.mark.parametrize(
    ("clients", "size", "bits", "multiplier", "sums", "inflation", "expected"),
    [
        (100, 2**20, 16, 1.0, 1, 1.003, 5.2376),
        (100, 2**20, 20, 4.0, 100, 1.000, 15.3312),
        (1000, 2**24, 20, 1.0, 1, 1.000, 5.2234),
        (1000, 2**24, 16, 4.0, 100, 1.502, 26.52),
    ],
)
def test_rounding_inflates_the_sensitivity_as_published(
    clients, size, bits, multiplier, sums, inflation, expected
):
    noise = DistributedNoise(
        clip=1.0,
        multiplier=multiplier,
        honest=clients,
        scale=published_scale(clients, size, bits, multiplier),
    )
    assert noise.inflation(size) == pytest.approx(inflation, abs=6e-4)
    # There, the noise is relative to the norm before rounding, here to the one after it.
    rho = sums * noise.inflation(size) ** 2 * noise.zcdp_rho(size, clients=clients)
    assert epsilon(rho, 1e-6) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("multiplier", [0.1, 1.0, 7.5])
@pytest.mark.parametrize(("clients", "size"), [(3, 10), (100, MILLION), (2000, 10 * MILLION)])
def test_one_sum_costs_what_its_multiplier_says(multiplier, clients, size):
    noise, bits = fit_ring(
        clip=0.3, multiplier=multiplier, honest=clients - 1, clients=clients, size=size
    )
    expected = 1 / (2 * multiplier**2)
    assert noise.zcdp_rho(size, clients=clients) == pytest.approx(expected, rel=1e-12)
    assert noise.zcdp_rho(size, clients=clients) >= expected * (1 - 1e-12)
    assert noise.sigma(size) ** 2 * noise.honest == pytest.approx(
        (multiplier * noise.sensitivity(size)) ** 2
    )
    assert noise.wrap_probability(size, clients=clients, bits=bits) <= WRAP
    assert noise.inflation(size) <= 1.05


def test_noise_of_a_small_deviation_costs_more():
    """tau is what differs between a sum of discrete Gaussians and one of them."""
    noise = DistributedNoise(clip=1.0, multiplier=0.5, honest=10, scale=0.8)
    assert noise.sigma(100) < 1
    tau = 10 * sum(
        math.exp(-2 * (math.pi * noise.sigma(100)) ** 2 * k / (k + 1)) for k in range(1, 10)
    )
    assert tau > 1e-4
    assert math.sqrt(2 * noise.zcdp_rho(100, clients=10)) == pytest.approx(2 + tau * 10, rel=1e-12)


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0])
def test_the_divergence_of_a_sum_is_what_is_claimed(order):
    """Renyi divergence of the noise of four honest devices, from itself moved by one update.

    Computed from the probabilities of the sampler's table. With three of the four the claim is
    exceeded, so the test would notice a deviation that is too small by a seventh.
    """
    noise = DistributedNoise(clip=1.0, multiplier=1.5, honest=4, scale=8.0)
    moved, sigma = int(noise.sensitivity(1)), noise.sigma(1)
    masses = discrete_gaussian._masses(sigma)
    # Beyond 12 deviations probabilities are below the last digit of the largest.
    share = [masses[2048 + x] / sum(masses) for x in range(-int(12 * sigma), int(12 * sigma) + 1)]
    for devices in (4, 3):
        total = [1.0]
        for _ in range(devices):
            total = [
                sum(total[i - j] * p for j, p in enumerate(share) if 0 <= i - j < len(total))
                for i in range(len(total) + len(share) - 1)
            ]
        powers = (
            p**order * q ** (1 - order)
            for p, q in zip(total[moved:], total[:-moved], strict=True)
            if min(p, q) > 1e-25
        )
        divergence = math.log(sum(powers)) / (order - 1)
        claimed = order * noise.zcdp_rho(1, clients=6)
        assert moved == 8
        if devices == 4:
            assert 0.87 * claimed < divergence <= claimed
        else:
            assert divergence > 1.1 * claimed


def test_the_smallest_ring_is_chosen():
    small = fit_ring(clip=1.0, multiplier=1.0, honest=80, clients=100, size=MILLION)
    large = fit_ring(clip=1.0, multiplier=4.0, honest=800, clients=1000, size=MILLION)
    assert (small[1], large[1]) == (16, 32)
    assert small[0].inflation(MILLION) < 1.02
    with pytest.raises(ValueError, match="does not fit a ring of 32 bits"):
        fit_ring(clip=1.0, multiplier=1e9, honest=80, clients=100, size=MILLION)
    with pytest.raises(ValueError, match="above 0"):
        fit_ring(clip=1.0, multiplier=0.0, honest=80, clients=100, size=MILLION)


def test_a_finer_scale_than_the_chosen_may_wrap():
    noise = DistributedNoise.fit(
        clip=1.0, multiplier=4.0, honest=80, clients=100, size=MILLION, bits=16
    )
    finer = DistributedNoise(clip=1.0, multiplier=4.0, honest=80, scale=1.1 * noise.scale)
    assert finer.wrap_probability(MILLION, clients=100, bits=16) > WRAP
    assert finer.wrap_probability(MILLION, clients=40_000, bits=16) == 1.0


@pytest.mark.parametrize("corrupt", [0, 100, 200])
@pytest.mark.parametrize("dropout", [0, 100, 300])
def test_every_roster_has_the_honest_survivors_that_noise_counts_on(corrupt, dropout):
    config = make_config(
        clients_min=7, clients_max=60, corrupt_permille=corrupt, dropout_permille=dropout
    )
    found = [config.graph(clients).honest_min for clients in range(7, 61)]
    assert config.honest_survivors <= min(found)
    assert config.honest_survivors >= 7 - 12


def test_a_configuration_without_noise_is_encoded_as_before_but_for_one_byte():
    plain = make_config()
    noisy = make_config(
        weight_max=1,
        noise=DistributedNoise(clip=1.0, multiplier=2.0, honest=3, scale=64.0),
    )
    assert plain.to_bytes().endswith(b"\0")
    assert plain.length == 4 + 2
    assert noisy.length == 4
    assert RoundConfig.from_bytes(noisy.to_bytes()) == noisy
    assert RoundConfig.from_bytes(plain.to_bytes()).noise is None


@pytest.mark.parametrize("clip", [SMALLEST_CLIP, 1.0, LARGEST_CLIP])
@pytest.mark.parametrize("multiplier", [0.01, LARGEST_NOISE])
@pytest.mark.parametrize("size", [1, MILLION, 100 * MILLION])
@pytest.mark.parametrize("clients", [3, MAX_SECURE_COHORT])
def test_every_clipping_bound_that_a_job_may_have_fits_a_ring(clip, multiplier, size, clients):
    honest = clients // 2 + 1
    noise, _ = fit_ring(clip=clip, multiplier=multiplier, honest=honest, clients=clients, size=size)
    noise.check(size, clients=clients, honest=honest, bits=32, alone=True)
