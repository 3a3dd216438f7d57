"""What a device sends of an evaluation with noise: bounded numbers, whatever its data."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import isthmus
from isthmus.errors import TaskError
from isthmus.task import Task
from isthmus.task.measurements.bounded_means import BoundedMeans, measured_norm, numbers_of
from isthmus.task.measurements.metrics import STEPS


class Unbounded(Task):
    """The loss of an example is its input."""

    def model(self):
        return torch.nn.Identity()

    local_data = optimizer = None  # nobody asks for them here

    def loss(self, output, target):
        return output.flatten()


class Given(Unbounded):
    def device_metrics(self):
        return {
            "loss": isthmus.Mean(-1, 3),
            "auc": isthmus.BinnedScores(of=lambda output, target: (0 * target, target)),
        }


def numbers(values):
    data = [(torch.tensor([value]), torch.tensor(0.0)) for value in values]
    return numbers_of(BoundedMeans(Given({})).measure(torch.nn.Identity(), data, 2))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-1.0], -1.0),
        ([3.0], 1.0),
        ([0.0, 2.0], 0.0),
        ([-100.0], -1.0),
        ([1e30, -1.0], 0.0),  # each value is within the bounds before the mean
        ([math.nan], 1.0),
        ([math.inf, -1.0], 0.0),
    ],
)
def test_a_device_sends_its_own_mean_within_the_bounds(values, expected):
    assert numbers(values).tolist() == pytest.approx([expected], abs=2 / STEPS)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_what_a_device_sends_is_never_longer_than_its_norm(values):
    sent = numbers(values)
    assert bool(sent.isfinite().all())
    assert float(sent.norm()) <= measured_norm(len(sent))


def test_metrics_without_bounds_are_left_out_and_named():
    vector = BoundedMeans(Given({}))
    assert vector.left_out == ["auc"]
    assert vector.size == 1
    assert vector.figure_names == ["devices_loss", "devices_loss_noise"]


def test_a_loss_without_bounds_is_not_measured():
    with pytest.raises(TaskError, match="Unbounded declares none; add one to device_metrics"):
        BoundedMeans(Unbounded({}))


@given(st.floats(-2, 2))
def test_the_noise_of_a_metric_is_not_cut_off(value):
    figures = BoundedMeans(Given({})).figures_of_mean(torch.tensor([value]), deviation=0.25)
    assert figures["devices_loss"] == pytest.approx(1 + 2 * value, abs=1e-6)
    assert figures["devices_loss_noise"] == 0.5


class Weighted(Unbounded):
    def metrics(self, output, target):
        return {"error": (output.flatten(), target)}

    def device_metrics(self):
        return {"error": isthmus.Mean(0, 4, weighted=True)}


@pytest.mark.parametrize(
    ("rows", "mean"),
    [
        ([(1.0, 3.0), (4.0, 0.5)], 5 / 3.5),
        ([(1.0, 3.0), (math.nan, 1.0)], 7 / 4),  # not a number: as the upper bound
        ([(4.0, 0.0)], 2.0),  # no weight: the middle
    ],
)
def test_a_device_sends_its_own_weighted_mean(rows, mean):
    data = [(torch.tensor([value]), torch.tensor(weight)) for value, weight in rows]
    sent = numbers_of(BoundedMeans(Weighted({})).measure(torch.nn.Identity(), data, 2))
    # The step of values of up to 4 is 4 / STEPS, half of that of the numbers from -1 to 1.
    assert sent.tolist() == pytest.approx([mean / 2 - 1], abs=4 / STEPS)


def test_an_owner_sees_the_mean_without_noise():
    own = BoundedMeans(Given({})).own_figures(torch.tensor([STEPS // 2]))
    assert own == {"loss": -1 + 2 * 1.5}
