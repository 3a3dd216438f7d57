"""Sums of devices' counts have the metrics of their pooled data, as exactly as is stated."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, roc_auc_score

import isthmus
from isthmus.errors import TaskError
from isthmus.task.measurements.metrics import (
    LARGEST,
    LARGEST_WEIGHT,
    BinnedScores,
    Confusion,
    Mean,
    whole,
)

VALUES = st.lists(st.floats(-3.0, 3.0), min_size=1, max_size=20)


def summed(metric, *devices):
    """The sum of the counts of devices with these arguments of `add`."""
    total = torch.zeros(metric.size, dtype=torch.int64)
    for device in devices:
        tally = metric.empty()
        metric.add(tally, *device)
        total += metric.counts(tally)
    return total


@given(devices=st.lists(VALUES, min_size=1, max_size=5))
def test_a_mean_differs_from_the_pooled_one_by_at_most_half_a_step(devices):
    metric = Mean(-2.0, 2.0, bins=0)
    total = summed(metric, *([torch.tensor(each, dtype=torch.float64)] for each in devices))
    pooled = torch.tensor(list(itertools.chain(*devices)), dtype=torch.float64).clamp(-2, 2).mean()
    error = abs(metric.figures("m", total)["m"] - float(pooled))
    assert error <= metric.step / 2 + 1e-15
    assert metric.step == 2.0 / 2**28


@given(devices=st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1), min_size=1, max_size=5))
def test_a_share_equals_the_pooled_one(devices):
    total = summed(Mean(), *([torch.tensor(each)] for each in devices))
    pooled = list(itertools.chain(*devices))
    assert Mean().figures("m", total)["m"] == sum(pooled) / len(pooled)


def test_a_mean_is_nan_where_a_pooled_one_would_be():
    total = summed(Mean(bins=0), [torch.tensor([0.5, math.nan])], [torch.tensor([1.0])])
    assert math.isnan(Mean(bins=0).figures("m", total)["m"])


def test_quantiles_over_devices_are_exact_to_half_a_bin():
    means = [0.03, 0.11, 0.22, 0.35, 0.48, 0.52, 0.66, 0.71, 0.93, 1.0]
    total = summed(Mean(), *([torch.tensor([x])] for x in means * 5))
    figures = Mean(bins=20).figures("m", total)
    for suffix, exact in (("p10", 0.03), ("p50", 0.48), ("p90", 0.93)):
        assert figures[f"m_{suffix}"] == pytest.approx(exact, abs=0.5 / 20)


@pytest.mark.parametrize(("devices", "shown"), [(9, []), (10, ["m_p50"]), (49, ["m_p50"])])
def test_a_quantile_has_five_devices_on_either_side(devices, shown):
    """Else it would be close to the value of one of them; nor is it in what reports have."""
    metric = Mean(bins=1000)
    total = summed(metric, *([torch.tensor([x / devices])] for x in range(devices)))
    assert [name for name in metric.figures("m", total) if name != "m"] == shown
    assert len(metric.published(total)) == 4


def test_values_out_of_bounds_are_counted():
    metric = Mean(-1, 1, bins=0)
    total = summed(metric, [torch.tensor([5.0, 0.5])], [torch.tensor([-1.0, -2.0])])
    assert metric.figures("m", total) == {"m": -0.125, "m_clipped": 2}
    scores = BinnedScores(of=lambda output, target: (output, target), bins=10)
    logits = [torch.tensor([-3.0, 0.2, 4.0]), torch.tensor([0, 0, 1])]
    assert scores.figures("auc", summed(scores, logits))["auc_clipped"] == 2


def test_an_infinite_value_is_not_the_bound():
    total = summed(Mean(bins=0), [torch.tensor([0.5, math.inf])])
    assert math.isnan(Mean(bins=0).figures("m", total)["m"])


def test_a_confusion_matrix_equals_the_pooled_one():
    generator = torch.Generator().manual_seed(1)
    devices = [torch.randint(0, 4, (2, 30), generator=generator) for _ in range(3)]
    metric = Confusion(4, of=lambda output, target: (output, target))
    total = summed(metric, *devices)
    predicted, truth = torch.cat(devices, dim=1).tolist()
    assert total.view(4, 4).tolist() == confusion_matrix(truth, predicted).tolist()
    recall = balanced_accuracy_score(truth, predicted)
    assert metric.figures("c", total)["c_recall"] == pytest.approx(recall)


@pytest.mark.parametrize("bins", [10, 100])
def test_the_area_under_the_curve_is_exact_to_its_stated_error(bins):
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(3, 200, generator=generator)
    labels = torch.rand(3, 200, generator=generator) < scores
    metric = BinnedScores(of=lambda output, target: (output, target), bins=bins)
    figures = metric.figures("auc", summed(metric, *zip(scores, labels, strict=True)))
    exact = roc_auc_score(labels.flatten(), scores.flatten())
    assert abs(figures["auc"] - exact) <= figures["auc_error"] <= 1 / bins
    rounded = (scores.flatten() * bins).long()
    assert figures["auc"] == pytest.approx(roc_auc_score(labels.flatten(), rounded), abs=1e-12)


def test_figures_that_no_unit_gives_are_absent():
    one_label = [torch.tensor([0.5]), torch.tensor([1])]
    scores = BinnedScores(of=lambda output, target: (output, target))
    assert scores.figures("auc", summed(scores, one_label)) == {}
    assert Mean().figures("m", torch.zeros(23, dtype=torch.int64)) == {}


@pytest.mark.parametrize(
    ("metric", "values", "reason"),
    [
        (Confusion(2, of=max), (torch.tensor([2]), torch.tensor([0])), "takes 0 to 1"),
        (Confusion(2, of=max), (torch.tensor([1]), torch.tensor([0, 1])), "one shape"),
        (Confusion(2, of=max), (torch.tensor([0.5]), torch.tensor([0])), "give whole numbers"),
        (Confusion(2, of=max), (torch.tensor([1]), torch.tensor([math.nan])), "is not a number"),
        (BinnedScores(of=max), (torch.tensor([math.nan]), torch.tensor([0])), "give finite"),
        (BinnedScores(of=max), (torch.tensor([0.5]), torch.tensor([math.nan])), "give finite"),
    ],
)
def test_values_that_cannot_be_counted_are_refused(metric, values, reason):
    with pytest.raises(TaskError, match=reason):
        metric.add(metric.empty(), *values)


def test_counts_that_could_not_be_summed_are_refused():
    with pytest.raises(TaskError, match="so much validation data"):
        whole(torch.tensor([LARGEST * 2.0], dtype=torch.float64))


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (0.0, math.inf), (math.nan, 1.0), (0, 1.7e308)])
def test_bounds_that_are_not_usable_are_refused(bounds):
    with pytest.raises(TaskError, match="low must be below high"):
        isthmus.Mean(*bounds)


@pytest.mark.parametrize(
    "make",
    [
        lambda: isthmus.Mean(bins=2.5),
        lambda: isthmus.Confusion(0, of=max),
        lambda: isthmus.BinnedScores(of=max, bins=0),
        lambda: isthmus.Column(0, 1, bins=2.5),
        lambda: isthmus.Column(-1e308, 1e308),
        lambda: isthmus.Category((1, True, 0)),
        lambda: isthmus.Category((1, 1.0)),
    ],
)
def test_declarations_that_are_not_usable_are_refused(make):
    with pytest.raises(TaskError, match="is not usable"):
        make()


WEIGHTED = st.lists(
    st.tuples(st.floats(-2.0, 2.0), st.floats(1 / 64, 1000.0)), min_size=1, max_size=9
)


@given(devices=st.lists(WEIGHTED, min_size=1, max_size=5))
def test_a_weighted_mean_equals_that_of_the_pooled_data(devices):
    metric = Mean(-2.0, 2.0, bins=0, weighted=True)
    columns = [torch.tensor(each, dtype=torch.float64).unbind(1) for each in devices]
    values, weights = (torch.cat(each) for each in zip(*columns, strict=True))
    mean = metric.figures("m", summed(metric, *columns))["m"]
    pooled = float((values * weights).sum() / weights.sum())
    # Half a step of the sum and of the weight of each device.
    assert abs(mean - pooled) <= len(devices) * metric.step / float(weights.sum()) + 1e-15


@given(
    devices=st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 9999)), min_size=1),
        min_size=1,
        max_size=5,
    )
)
def test_a_share_with_whole_weights_equals_the_pooled_one(devices):
    metric = Mean(weighted=True)
    columns = [torch.tensor(each, dtype=torch.float64).unbind(1) for each in devices]
    pooled = list(itertools.chain(*devices))
    expected = sum(value * weight for value, weight in pooled) / sum(each[1] for each in pooled)
    assert metric.figures("m", summed(metric, *columns))["m"] == expected


def test_what_is_clipped_or_not_finite_counts_by_weight():
    metric = Mean(weighted=True, bins=0)
    clipped = summed(metric, (torch.tensor([3.0, 0.5]), torch.tensor([0.5, 1.0]).double()))
    assert metric.figures("m", clipped) == {"m": (0.5 + 0.5) / 1.5, "m_clipped": 0.5}
    light = torch.tensor([1.0, 1e-12]).double()
    assert math.isnan(
        metric.figures("m", summed(metric, (torch.tensor([1, math.nan]), light)))["m"]
    )


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([4e6, 2e5], "add up to 4.2e.06, and at most 4194304 can be summed"),
        ([1e-3, 1e-9], "add up to 0.001, and less than 0.00390625 cannot be counted exactly"),
    ],
)
def test_a_device_with_weights_that_steps_do_not_hold_is_refused(weights, reason):
    with pytest.raises(TaskError, match=reason):
        summed(Mean(weighted=True), (torch.ones(2), torch.tensor(weights).double()))


def test_the_largest_weight_of_a_device_can_be_sent():
    metric = Mean(-1, 1, bins=0, weighted=True)
    total = summed(metric, (torch.tensor([-1.0]), torch.tensor([LARGEST_WEIGHT]).double()))
    assert total.tolist() == [-LARGEST, LARGEST, 0, 0]


def test_weights_belong_to_the_values():
    with pytest.raises(TaskError, match=r"True or False; return the weights from metrics\(\)"):
        Mean(weighted=torch.ones(3))


ANY = st.lists(
    st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, -0.7, 0.9])), max_size=20
)
WEIGHTS = st.floats(1 / 256, 1e3)


@given(data=st.data(), bins=st.sampled_from([0, 7]), weighted=st.booleans())
def test_counts_of_data_are_never_refused(data, bins, weighted):
    metric = Mean(-0.7, 0.9, bins=bins, weighted=weighted)
    devices = []
    for values in data.draw(st.lists(ANY, min_size=1, max_size=5)):
        device = [torch.tensor(values, dtype=torch.float64)]
        if weighted:
            size = len(values)
            weights = data.draw(st.lists(WEIGHTS, min_size=size, max_size=size))
            device.append(torch.tensor(weights, dtype=torch.float64))
        devices.append(device)
        metric.check(summed(metric, device), 1)
    metric.check(summed(metric, *devices), len(devices))


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([0, -1, 0, 0, 0, 0], "a count is below 0"),
        ([0, 4, 3, 2, 0, 0], "more values are clipped or not finite than there are"),
        ([5 * 2**28, 4, 0, 0, 0, 0], "the mean is not from 0 to 1"),
        ([-(2**28), 4, 0, 0, 0, 0], "the mean is not from 0 to 1"),
        ([2**28, 4, 0, 0, 1, 1], "a device has more than one mean"),
    ],
)
def test_counts_that_no_data_have_are_refused(counts, why):
    metric = Mean(bins=2)
    with pytest.raises(ValueError, match=why):
        metric.check(torch.tensor(counts), 1)
    for other in (
        Confusion(2, lambda output, target: (output, target)),
        BinnedScores(None, bins=2),
    ):
        with pytest.raises(ValueError, match="a count is below 0"):
            other.check(torch.full((other.size,), -1), 3)
