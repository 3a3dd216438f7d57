"""The sampler: its tables are exact as integers, and its samples have the exact distribution.

Seeds of statistical tests are fixed, so they cannot fail by chance. A statistic is accepted within
5 standard deviations of its mean: with another seed, a correct sampler would fail a test with a
probability below 1e-3 for chi-square of 9 degrees of freedom, and below 1e-5 for 60 or more.
"""

import collections
import itertools
import math
from decimal import Decimal, localcontext

import pytest
import torch
from tests.privacy.dp import exact_sampler

from isthmus_privacy.crypto.masking import TILE
from isthmus_privacy.dp import discrete_gaussian
from isthmus_privacy.dp.discrete_gaussian import RandomBytes, add_noise

COLUMNS = 4096
PRECISION = 100
"""Decimal digits: 2^-332."""


def samples(sigma, count, key=bytes(32)):
    noise = torch.zeros(count, dtype=torch.int32)
    add_noise(noise, sigma, RandomBytes(key))
    return noise


def exact_weights(sigma, values):
    """exp(-x^2 / (2 sigma^2)), not normalised."""
    with localcontext() as context:
        context.prec = PRECISION
        return {x: (-Decimal(x * x) / (2 * Decimal(sigma) ** 2)).exp() for x in values}


@pytest.mark.parametrize("sigma", [1.0, 4.0, 36.6, 169.9])
def test_a_table_has_the_exact_probabilities(sigma):
    values = range(-COLUMNS // 2 + 1, COLUMNS // 2)
    weights = exact_weights(sigma, values)
    masses = dict(enumerate(discrete_gaussian._masses(sigma), start=-COLUMNS // 2))
    total = sum(masses.values())
    with localcontext() as context:
        context.prec = PRECISION
        # The exact normalisation: what is beyond the table is below 2^-108 of it.
        normal = sum(weights.values())
        errors = [abs(Decimal(masses[x]) / total - weights[x] / normal) for x in values]
        assert sum(errors) < Decimal(2) ** -140
        assert 2 * weights[values[-1]] * 100 / normal < Decimal(2) ** -100


@pytest.mark.parametrize("sigma", [1.0, 36.6, 169.9])
def test_the_columns_of_a_table_add_up_to_its_probabilities(sigma):
    table = discrete_gaussian._table(sigma)
    masses = collections.Counter()
    columns = zip(table.thresholds.tolist(), table.remainders, table.alias.tolist(), strict=True)
    for i, (first, further, alias) in enumerate(columns):
        threshold = ((first + (1 << 19)) << 128) + further
        masses[i] += threshold
        masses[alias] += (1 << 148) - threshold
    assert [masses[i] for i in range(COLUMNS)] == discrete_gaussian._masses(sigma)


@pytest.mark.parametrize("sigma", [171.0, 345.6, 20_000.0, 1e6])
def test_a_sum_of_samples_has_the_exact_distribution(sigma):
    """The ratio of the probability of x1 + k x2 to the exact weight does not depend on x."""
    (one, s1), (k, *_) = discrete_gaussian._decompose(sigma)[:2]
    s2 = math.sqrt((sigma / k) ** 2 - 4)
    assert (one, s1) == (1, 2.0 * k)
    with localcontext() as context:
        context.prec = PRECISION
        ratios = []
        for x in (0, 1, k // 2, k, int(sigma), int(3 * sigma) + 1):
            # The sum over x2 with x1 = x - k x2, of which 40 terms around the largest matter.
            centre = round(x * s2 * s2 * k / (s1 * s1 + s2 * s2 * k * k))
            total = Decimal(0)
            for j in range(centre - 40, centre + 41):
                exponent = Decimal((x - k * j) ** 2) / Decimal(s1) ** 2
                exponent += Decimal(j * j) / Decimal(s2) ** 2
                total += (-exponent / 2).exp()
            variance = Decimal(s1) ** 2 + k * k * Decimal(s2) ** 2
            ratios.append(total * (Decimal(x * x) / (2 * variance)).exp())
            assert abs(variance.sqrt() / Decimal(sigma) - 1) < Decimal("1e-15")
        assert max(ratios) / min(ratios) - 1 < Decimal(2) ** -110


@pytest.mark.parametrize(
    ("sigma", "count"), [(3.0, 500_000), (36.6, 500_000), (169.9, 200_000), (300.0, 500_000)]
)
def test_samples_have_the_exact_distribution(sigma, count):
    """Chi-square over all values that are expected at least 20 times."""
    observed = collections.Counter(samples(sigma, count).tolist())
    weights = exact_weights(sigma, range(-int(13 * sigma), int(13 * sigma) + 1))
    total = sum(weights.values())
    expected = {x: float(w / total) * count for x, w in weights.items() if w / total * count >= 20}
    chi2 = sum((observed[x] - e) ** 2 / e for x, e in expected.items())
    rest, outside = count - sum(expected.values()), count - sum(observed[x] for x in expected)
    chi2 += (outside - rest) ** 2 / rest
    freedom = len(expected)
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("sigma", [3664.1, 30_000.0, 1e6, 6e7])
def test_large_samples_are_normal_and_have_no_period(sigma):
    """Chi-square of 64 ranges of equal probability, and of the residues of every factor."""
    count = 500_000
    noise = samples(sigma, count)
    # The distance of the discrete Gaussian from the normal distribution rounded to integers.
    assert 1 / (24 * sigma**2) < 1e-8
    uniform = torch.special.ndtr(noise.double() / sigma)
    statistics = [(torch.histc(uniform, 64, 0.0, 1.0), 64)]
    for factor, _ in discrete_gaussian._decompose(sigma)[1:]:
        if factor <= 10_000:
            statistics.append((torch.bincount(noise.long() % factor, minlength=factor), factor))
    for counts, bins in statistics:
        chi2 = float((counts - count / bins).double().square().sum() / (count / bins))
        assert abs(chi2 - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("sigma", [3.0, 250.0])
def test_samples_agree_with_the_exact_sampler(sigma):
    """Two-sample chi-square with Canonne, Kamath and Steinke's sampler, which has no tables."""
    ours, count = samples(sigma, 10_000).tolist(), 10_000
    exact = exact_sampler.samples(sigma, count, seed=1)
    edges = [round(sigma * z) for z in (-1.6, -1.1, -0.7, -0.35, 0, 0.35, 0.7, 1.1, 1.6)]
    bins = [
        collections.Counter(sum(x > edge for edge in edges) for x in values)
        for values in (ours, exact)
    ]
    chi2 = sum((bins[0][i] - bins[1][i]) ** 2 / (bins[0][i] + bins[1][i]) for i in range(10))
    assert abs(chi2 - 9) < 5 * math.sqrt(18)


class ScriptedBytes(RandomBytes):
    """The same word for every element of the first fill, then numbers for the ties."""

    def __init__(self, word, numbers):
        self.word, self.numbers = word.to_bytes(4, "little"), iter(numbers)

    def fill(self, buffer):
        buffer[:] = self.word * (len(buffer) // 4)

    def number(self, size):
        assert size == 16
        return next(self.numbers)


def test_a_tie_is_decided_by_further_bits():
    table = discrete_gaussian._table(36.6)
    column = next(i for i, a in enumerate(table.alias.tolist()) if a != i and table.remainders[i])
    word = (int(table.thresholds[column]) % (1 << 20)) << 12 | column
    remainder = table.remainders[column]
    noise = torch.zeros(3, dtype=torch.int32)
    add_noise(noise, 36.6, ScriptedBytes(word, [remainder - 1, remainder, (1 << 128) - 1]))
    own, other = column - COLUMNS // 2, int(table.alias[column]) - COLUMNS // 2
    assert noise.tolist() == [own, other, other]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, TILE - 1, TILE, TILE + 1])
def test_noise_is_added_modulo_the_ring(dtype, count):
    key, end = b"k" * 32, torch.iinfo(dtype).max
    vector = torch.full((count,), end, dtype=dtype)
    add_noise(vector, 500.0, RandomBytes(key))
    expected = samples(500.0, count, key).to(dtype) + end
    assert torch.equal(vector, expected)


def test_samples_of_neighbouring_elements_and_tiles_are_not_correlated():
    noise = samples(100.0, 4 * TILE).double() / 100
    for lag in (1, 2, 4096, TILE, 2 * TILE):
        products = noise[:-lag] * noise[lag:]
        assert abs(float(products.mean())) < 5 / math.sqrt(len(products))


def test_each_call_has_noise_of_its_own():
    draws = [torch.zeros(1000, dtype=torch.int32) for _ in range(3)]
    for draw in draws:
        add_noise(draw, 100.0)
    for a, b in itertools.pairwise(draws):
        assert int((a == b).sum()) < 50


@pytest.mark.parametrize("sigma", [0.5, float("nan"), 2.0**27])
def test_a_deviation_outside_the_range_is_refused(sigma):
    with pytest.raises(ValueError, match="is not in"):
        add_noise(torch.zeros(1, dtype=torch.int32), sigma)
