"""Noise that is correlated over rounds: what a device can change, and what is left in the model."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus_privacy.dp.correlated import CorrelatedNoise


def toeplitz(column):
    """The lower triangular Toeplitz matrix with this first column."""
    rows = len(column)
    matrix = torch.zeros(rows, rows, dtype=torch.float64)
    for row in range(rows):
        matrix[row, : row + 1] = column[: row + 1].flip(0)
    return matrix


def inverse_of(plan):
    """The matrix by which the draws of all rounds become their noise."""
    column = torch.zeros(plan.rows, dtype=torch.float64)
    column[: plan.bands] = torch.tensor(plan.coefficients, dtype=torch.float64)
    return toeplitz(column)


def allowed(rows, separation, participations):
    """All sets of rounds that a device may take part in."""
    for count in range(1, participations + 1):
        for rounds in itertools.combinations(range(rows), count):
            if all(b - a >= separation for a, b in itertools.pairwise(rounds)):
                yield list(rounds)


@given(
    rows=st.integers(1, 9),
    separation=st.integers(1, 9),
    participations=st.integers(1, 5),
    bands=st.integers(1, 9),
)
def test_no_device_changes_more_than_the_sensitivity(rows, separation, participations, bands):
    """Every set of rounds that a device may take part in, and some set changes that much."""
    taken = min(participations, math.ceil(rows / separation))
    plan = CorrelatedNoise(rows, separation, taken, min(bands, rows))
    matrix = torch.linalg.inv(inverse_of(plan))
    # The products of columns are positive: one unit vector in all rounds is the worst update.
    assert (matrix.T @ matrix >= -1e-12).all()
    changes = [
        float(matrix[:, rounds].sum(1).norm()) for rounds in allowed(rows, separation, taken)
    ]
    assert max(changes) == pytest.approx(plan.sensitivity)


def test_the_noise_of_a_round_is_that_of_the_matrix():
    plan = CorrelatedNoise(rows=20, separation=5, participations=4, bands=8)
    draws = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise = torch.stack([plan.noise(row, lambda each: draws[each].clone()) for row in range(20)])
    torch.testing.assert_close(noise, inverse_of(plan) @ draws)


# Rounds, separation, participations, bands; then by jax-privacy 2.0.0 the sensitivity of
# `toeplitz.inverse_coef`, and the root mean square of `toeplitz.per_query_error`.
JAX_PRIVACY = [
    (60, 7, 5, 16, 4.792681150250, 1.487536921779),
    (200, 10, 20, 8, 7.670225473340, 2.402731315054),
    (365, 30, 4, 32, 3.752120385822, 1.921623155736),
    (1000, 50, 20, 32, 7.958727456893, 2.633327107979),
    (1000, 100, 10, 64, 5.780706062396, 2.139158008224),
    (1000, 500, 2, 256, 2.541351669414, 1.759533341264),
]


@pytest.mark.parametrize(
    ("rows", "separation", "participations", "bands", "sensitivity", "error"), JAX_PRIVACY
)
def test_a_second_library_has_the_same_sensitivity_and_error(
    rows, separation, participations, bands, sensitivity, error
):
    plan = CorrelatedNoise(rows, separation, participations, bands)
    assert plan.sensitivity == pytest.approx(sensitivity, rel=1e-9)
    independent = math.sqrt((rows + 1) / 2 * participations)
    assert plan.gain == pytest.approx(independent / (error * sensitivity), rel=1e-9)


@pytest.mark.parametrize(
    ("rows", "separation", "participations", "gain"),
    [(1000, 50, 20, 4.77), (1000, 100, 10, 5.72), (1000, 500, 2, 7.08), (1000, 1, 1000, 1.0)],
)
def test_less_noise_is_left_than_of_independent_draws(rows, separation, participations, gain):
    """Known gains; without a separation there is none, and the best plan is independent noise."""
    plan = CorrelatedNoise.best(rows=rows, separation=separation, participations=participations)
    assert plan.gain == pytest.approx(gain, abs=0.1)
    assert (plan.bands == 1) == (separation == 1)


def test_the_gain_is_that_of_the_matrices():
    plan = CorrelatedNoise(rows=60, separation=12, participations=5, bands=8)
    models = toeplitz(torch.ones(60, dtype=torch.float64))
    left = (models @ inverse_of(plan)).norm() / math.sqrt(60) * plan.sensitivity
    independent = models.norm() / math.sqrt(60) * math.sqrt(5)
    assert plan.gain == pytest.approx(float(independent / left))


@pytest.mark.parametrize(
    "numbers",
    [
        {"rows": 0, "separation": 1},
        {"rows": 10, "separation": 0},
        {"rows": 10, "separation": 2, "participations": 0},
    ],
)
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match=r"not possible|takes part in nothing"):
        CorrelatedNoise.best(**numbers)
