"""Scores of models on a device: bounded, without units, and different for different losses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from isthmus.task import Task
from isthmus_clients.training.model_scores import LossScale, mean_score, unit_scores

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


class Classes(Task):
    """Its model hands the inputs on."""

    def model(self):
        return nn.Identity()

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    local_data = eval_data = optimizer = None  # nobody asks for them here


class Own(Classes):
    def score(self, output, target):
        return (output.argmax(1) != target).float()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_unit_has_the_score_of_its_task_or_its_loss(batch_size):
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2, 0, 1])
    model, data = nn.Identity().train(), TensorDataset(logits, target)
    losses, are_losses = unit_scores(Classes({}), model, data, batch_size)
    assert are_losses
    assert torch.allclose(
        losses, nn.functional.cross_entropy(logits, target, reduction="none").double()
    )
    assert model.training
    wrong, are_losses = unit_scores(Own({}), model, data, batch_size)
    assert not are_losses
    assert torch.equal(wrong, (logits.argmax(1) != target).double())
