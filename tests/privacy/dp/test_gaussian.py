"""Noise of a trusted server: normal, independent by row and key, and always the same."""

import math

import pytest
import torch

from isthmus_privacy.dp.gaussian import GaussianDraws

SIZE = 400_000


@pytest.fixture(scope="module")
def draws():
    """The key is fixed, so the figures below are too."""
    return GaussianDraws(bytes(range(32)), SIZE)


def test_a_row_is_standard_normal(draws):
    """The largest gap to the distribution function: a random sample exceeds this once in 1,000."""
    row = draws.row(3).sort().values
    expected = (1 + torch.erf(row / math.sqrt(2))) / 2
    steps = torch.arange(SIZE + 1, dtype=torch.float64) / SIZE
    gap = torch.maximum((steps[1:] - expected).abs().max(), (expected - steps[:-1]).abs().max())
    assert gap * math.sqrt(SIZE) < 1.95  # Kolmogorov: P = 2 exp(-2 x 1.95^2)
    assert abs(float(row.square().mean()) - 1) < 3.3 * math.sqrt(2 / SIZE)


@pytest.mark.parametrize("lag", [0, 1, SIZE // 2, 16_352])
def test_numbers_are_independent_of_each_other_and_of_other_rows(draws, lag):
    """Also at the distances at which the two numbers of a pair are."""
    one = draws.row(1)
    other = draws.row(2) if lag == 0 else one.roll(lag)
    assert abs(float((one * other).mean())) < 3.3 / math.sqrt(SIZE)


def test_rows_are_the_same_whenever_they_are_drawn_and_others_with_another_key(draws):
    again = GaussianDraws(bytes(range(32)), SIZE)
    assert torch.equal(draws.row(7), again.row(7))
    assert not torch.equal(draws.row(7), GaussianDraws(bytes(32), SIZE).row(7))


@pytest.mark.parametrize("size", [0, 1, 2, 32_705])
def test_rows_have_any_length(size):
    row = GaussianDraws(bytes(32), size).row(0)
    assert row.shape == (size,)
    assert bool(row.isfinite().all())
