"""A device's vector: rounding within its bound and without bias, and noise of its own."""

import itertools
import math

import pytest
import torch

from isthmus_privacy.dp import noisy_vector
from isthmus_privacy.dp.discrete_gaussian import RandomBytes
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.dp.rotation import block_size, rotate, unrotate

SEED = b"s" * 32


@pytest.fixture
def without_noise(monkeypatch):
    """Vectors as they are before noise is added."""
    monkeypatch.setattr(noisy_vector, "add_noise", lambda *_: None)


def encode(noise, update, *, key=None, dtype=torch.int32):
    out = torch.zeros(len(update), dtype=dtype)
    source = None if key is None else RandomBytes(bytes([key]) * 32)
    noisy_vector.encode(noise, update, seed=SEED, out=out, source=source)
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 64, 100, 5000, 65_535, 70_000, (1 << 17) + 1])
def test_a_rotation_keeps_norms_and_sums_and_is_inverted(size):
    generator = torch.manual_seed(size)
    a, b = (torch.randn(size, generator=generator) for _ in range(2))
    rotated = [x.clone() for x in (a, b, a + b)]
    for x in rotated:
        rotate(x, SEED)
    assert torch.allclose(rotated[0] + rotated[1], rotated[2], atol=1e-4)
    assert float(rotated[0].double().norm()) == pytest.approx(float(a.double().norm()), rel=1e-5)
    unrotate(rotated[0], SEED)
    assert torch.allclose(rotated[0], a, atol=1e-5)


@pytest.mark.parametrize("size", [256, 1 << 16])
def test_a_rotation_multiplies_by_the_hadamard_matrix(size):
    """Sylvester's matrix has the sign of the parity of i & j."""
    vector = torch.zeros(size)
    vector[5] = 1.0
    rotate(vector, SEED)
    signs = torch.tensor([(-1.0) ** (i & 5).bit_count() for i in range(size)])
    assert torch.allclose(vector * size**0.5 * vector[0].sign(), signs)


@pytest.mark.parametrize("size", [4096, 6000, 8191])
@pytest.mark.parametrize("kind", ["ones", "first", "last", "rotated"])
def test_every_element_of_any_vector_becomes_small(size, kind):
    """Also of vectors that the matrix makes largest, without the signs."""
    vector = torch.zeros(size)
    if kind == "ones":
        vector.fill_(1.0)
    elif kind == "rotated":
        vector[-4096:] = torch.tensor([(-1.0) ** (i & 77).bit_count() for i in range(4096)])
    else:
        vector[0 if kind == "first" else -1] = 1.0
    vector /= vector.norm()
    rotate(vector, SEED)
    assert block_size(size) == 4096
    # Sub-Gaussian with a deviation of 1 / 64: of 8,191 elements none is above 6 of them, but for
    # a probability of 2.5e-4.
    assert float(vector.abs().max()) < 6 / 64


def test_the_signs_depend_on_the_seed():
    vectors = [torch.ones(4096) for _ in range(2)]
    for vector, seed in zip(vectors, (SEED, b"t" * 32), strict=True):
        rotate(vector, seed)
    assert float(torch.dot(*vectors)) / 4096 == pytest.approx(0, abs=5 / 64)


@pytest.mark.parametrize("size", [1, 3, 64, 1000])
@pytest.mark.parametrize("norm", [0.0, 0.01, 0.999, 1.0, 1e3, 1e30])
def test_rounded_vectors_are_within_the_bound(without_noise, size, norm):
    """For coarse scales too, whose rounding is a large part of the norm."""
    for scale, seed in itertools.product((0.7, 5.0, 300.0), range(5)):
        noise = DistributedNoise(clip=1.0, multiplier=10.0, honest=1, scale=scale)
        update = torch.randn(size, generator=torch.manual_seed(seed))
        update *= norm / max(float(update.norm()), 1e-9)
        square = int(encode(noise, update, key=seed).long().square().sum())
        assert square <= noise.sensitivity(size) ** 2
        assert square == 0 or norm > 0


@pytest.mark.parametrize("bits", [16, 20, 32])
def test_sums_of_equal_updates_do_not_wrap(bits):
    """The longest sum: 100 devices with one update, modulo 2^bits as decoded."""
    size, clients = 5000, 100
    noise = DistributedNoise.fit(
        clip=1.0, multiplier=0.5, honest=80, clients=clients, size=size, bits=bits
    )
    update = torch.randn(size, generator=torch.manual_seed(3))
    update /= update.norm()
    total = torch.zeros(size, dtype=torch.int64)
    for _ in range(clients):
        total += encode(noise, update)
    assert int(total.abs().max()) < 1 << (bits - 1)
    reduced = (total + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    mean = noisy_vector.decode(noise, reduced, seed=SEED, clients=clients)
    deviation = noise.noise_of_mean(size, clients)
    assert float((mean - update).std()) == pytest.approx(deviation, rel=0.07)


def test_a_rounding_outside_the_bound_is_repeated(without_noise, monkeypatch):
    """All elements at one half: their sum has the mean 2048, and here 2000 is the bound."""
    noise = DistributedNoise(clip=1.0, multiplier=1.0, honest=1, scale=32.0)
    rounded, norms = noisy_vector._round, []

    def halves(values, factor, out, source):
        norms.append(rounded(values.fill_(1 / 64), 32.0, out, source))
        return norms[-1]

    monkeypatch.setattr(noisy_vector, "_round", halves)
    bound = 2000.0
    monkeypatch.setattr(DistributedNoise, "sensitivity", lambda *_: math.sqrt(bound))
    out = encode(noise, torch.full((4096,), 1 / 64), key=1)
    assert [norm <= bound for norm in norms] == [False] * (len(norms) - 1) + [True]
    assert len(norms) > 1
    assert int(out.long().square().sum()) == norms[-1]


def test_after_the_last_try_values_are_rounded_towards_zero(without_noise, monkeypatch):
    monkeypatch.setattr(noisy_vector, "_TRIES", 0)
    noise = DistributedNoise(clip=1.0, multiplier=1.0, honest=1, scale=100.0)
    update = torch.randn(64, generator=torch.manual_seed(0))
    norm = math.sqrt(float(encode(noise, update).double().square().sum()))
    assert 90 < norm <= 100


def test_rounding_has_no_bias(without_noise):
    """The mean of 4,000 roundings of each element is within 5 of its standard deviations."""
    noise = DistributedNoise(clip=1.0, multiplier=1.0, honest=1, scale=3.0)
    update = torch.randn(64, generator=torch.manual_seed(1))
    update /= update.norm()
    expected = update * noise.scale
    rotate(expected, SEED)
    source = RandomBytes(SEED)
    out, total = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    for _ in range(4000):
        noisy_vector.encode(noise, update, seed=SEED, out=out, source=source)
        total += out
    # 64 means within 5 deviations: all but 4e-5 of the seeds.
    assert float((total / 4000 - expected).abs().max()) < 5 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_updates_of_any_kind_are_clipped(without_noise, dtype):
    noise = DistributedNoise.fit(clip=2.0, multiplier=1.0, honest=2, clients=2, size=1000, bits=32)
    update = torch.randn(1000, generator=torch.manual_seed(2)).to(dtype)
    before = update.clone()
    out = encode(noise, update)
    mean = noisy_vector.decode(noise, out, seed=SEED, clients=1)
    expected = update.double() * 2 / update.double().norm()
    assert torch.equal(update, before)
    assert float((mean - expected).norm()) < 0.03  # rounding: sqrt(1000 / 6) / scale


def test_the_largest_floats_do_not_overflow(without_noise):
    noise = DistributedNoise.fit(clip=1.0, multiplier=1.0, honest=2, clients=2, size=64, bits=32)
    out = encode(noise, torch.full((64,), 3e38))
    mean = noisy_vector.decode(noise, out, seed=SEED, clients=1)
    assert torch.allclose(mean, torch.full((64,), 1 / 8), atol=0.01)


def test_attempts_with_one_update_have_independent_noise():
    noise = DistributedNoise.fit(clip=1.0, multiplier=1.0, honest=2, clients=2, size=4096, bits=32)
    update = torch.ones(4096)
    first, second = (encode(noise, update).double() for _ in range(2))
    difference = first - second
    sigma = noise.sigma(4096)
    assert float(difference.std()) == pytest.approx(sigma * math.sqrt(2), rel=0.08)
    mean = (first + second) / 2
    correlation = float(torch.dot(difference, mean - mean.mean()))
    # The product of two independent normal variables has the product of their deviations.
    assert abs(correlation) < 7 * math.sqrt(4096) * sigma**2
