"""Scores of models on a device: bounded, without units, and different for different losses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus_clients.training.model_scores import LossScale, mean_score

LOSSES = st.lists(st.floats(0.01, 1e3), min_size=1, max_size=20)


def scores(first, losses):
    return LossScale.of(torch.tensor(first, dtype=torch.float64)).scores(
        torch.tensor(losses, dtype=torch.float64)
    )


@given(first=LOSSES, losses=LOSSES, factor=st.sampled_from([0.1, 10.0, 1e6]))
def test_the_scale_of_the_loss_changes_no_score(first, losses, factor):
    scaled = scores([factor * x for x in first], [factor * x for x in losses])
    assert torch.allclose(scores(first, losses), scaled, rtol=1e-9)


def test_the_first_models_mean_loss_is_in_the_middle_and_large_losses_differ():
    assert scores([1.0, 3.0], [0.0, 2.0, 38.0, 1998.0]).tolist() == [0, 0.5, 0.95, 0.999]


def test_losses_below_zero_begin_at_the_first_models_lowest():
    assert scores([-4.0, 0.0], [-5.0, -4.0, -2.0, 2.0]).tolist() == [0, 0, 0.5, 0.75]


@pytest.mark.parametrize("first", [[math.nan], [math.inf, 1.0], [0.0]])
def test_losses_that_are_not_finite_count_as_the_worst_score(first):
    got = mean_score(scores(first, [math.nan, math.inf, 0.0, 1e-12]))
    assert 0.5 <= got <= 0.75


def test_scores_outside_of_their_range_are_clamped():
    assert mean_score(torch.tensor([-3.0, 0.5, 7.0, math.nan])) == pytest.approx(2.5 / 4)
