"""Statistics of devices equal those of their pooled data, as exactly as the kinds state."""

import math

import numpy as np
import pytest
import torch

from isthmus import Category, Column, TaskError
from isthmus.task import Participant
from isthmus.task.measurements.statistics import StatisticsVector

DEVICE = Participant(name="a", regime="federated")


def shards(devices=7, seed=3):
    """Values of each device; some are missing, and some are beyond the bounds."""
    draw = np.random.default_rng(seed)
    parts = [draw.normal(40, 12, draw.integers(20, 60)).round(1) for _ in range(devices)]
    for part in parts:
        part[0] = np.nan
    parts[2][1], parts[3][1] = 1000, -1000
    return parts


def test_a_column_equals_that_of_the_pooled_data():
    column = Column(0, 90, bins=90)
    parts = shards()
    total = sum(column.count(torch.tensor(part)) for part in parts)
    pooled = np.concatenate(parts)
    values = pooled[~np.isnan(pooled)].clip(0, 90)

    figures = column.describe(total, minimum=5)

    assert figures["count"] == len(values)
    assert figures["missing"] == 7
    assert figures["clipped"] is None  # two values, and at least five are shown
    assert figures["mean"] == pytest.approx(values.mean(), rel=0, abs=45 / 2**29)
    assert figures["variance"] == pytest.approx(values.var(), rel=0, abs=3 * 45**2 / 2**29)
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        expected = np.quantile(values, share, method="inverted_cdf")
        assert abs(figures["quantiles"][name] - expected) <= 0.5 + 1e-9
    histogram = figures["histogram"]
    counts, _ = np.histogram(values, histogram["edges"])
    assert histogram["counts"] == counts.tolist()
    assert min(histogram["counts"]) >= 5
    assert sum(histogram["counts"]) == len(values)


def test_counts_of_data_are_never_refused():
    kinds = [(Column(0, 90, bins=90), shards()), (Category((20.1, 30.5)), shards())]
    kinds.append((Column(-1e-3, 1e9, bins=1), [[], [1e9] * 999, [-5.0, np.nan, np.inf]]))
    for column, parts in kinds:
        total = torch.zeros(column.size, dtype=torch.int64)
        for part in parts:
            counts = column.count(torch.tensor(part))
            column.check(counts, 1)
            total += counts
        column.check(total, len(parts))


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ([-4, 0, 0, 0, 0, -4, 0], "a count is below 0"),
        ([4, 0, 5, 0, 0, 4, 0], "the bins have other values than the column"),
        ([4, 0, 0, 0, 0, 4, 1], "the bins have other values than the column"),
        ([4, 0, 0, 5 * 2**28, 0, 4, 0], "the mean is not from 0 to 90"),
        ([4, 0, 0, -5 * 2**28, 0, 4, 0], "the mean is not from 0 to 90"),
        ([4, 0, 0, 0, 5 * 2**28, 4, 0], "the mean is not from 0 to 90"),
        ([4, 0, 0, 0, -1, 4, 0], "a count is below 0"),
    ],
)
def test_counts_that_no_data_have_are_refused(counts, why):
    with pytest.raises(ValueError, match=why):
        Column(0, 90, bins=2).check(torch.tensor(counts), 3)
    with pytest.raises(ValueError, match="a count is below 0"):
        Category(("a",)).check(torch.tensor([3, -1]), 3)


def test_the_largest_bounds_have_a_variance():
    column = Column(-9e149, 9e149, bins=2)
    assert column.describe(column.count(torch.tensor([-1e150, 1e150])), 1)["variance"] < math.inf


def test_whole_numbers_in_the_middles_of_bins_have_exact_quantiles():
    column, values = Column(-0.5, 9.5, bins=10), torch.arange(10).repeat(20)
    figures = column.describe(column.count(values), minimum=5)
    assert figures["quantiles"] == {"p10": 0, "p25": 2, "p50": 4, "p75": 7, "p90": 8}


def test_few_values_are_not_described():
    column = Column(0, 1)
    figures = column.describe(column.count(torch.tensor([0.5, 0.25])), minimum=5)
    assert figures == {"count": None, "missing": 0, "clipped": 0}
    few = column.describe(column.count(torch.full((20,), 0.5)), minimum=5)
    assert few["quantiles"].keys() == {"p25", "p50", "p75"}  # a tenth of 20 is less than 5


@pytest.mark.parametrize(
    ("counts", "values", "other"),
    [
        ((50, 20, 0, 7), {"a": 50, "b": 20, "c": 0}, 7),
        ((50, 20, 1, 0), {"a": 50, "b": None, "c": None}, 0),  # else the total tells the 1
        ((50, 3, 2, 0), {"a": 50, "b": None, "c": None}, 0),
    ],
)
def test_counts_of_few_are_not_shown_and_do_not_follow_from_the_total(counts, values, other):
    column = Category(("a", "b", "c"))
    rows = [value for value, count in zip("abcd", counts, strict=True) for _ in range(count)]
    total = column.count(rows)
    assert total.tolist() == list(counts)
    assert column.describe(total, 5) == {"count": sum(counts), "values": values, "other": other}


def test_a_category_of_few_is_not_described():
    column = Category((0, 1))
    assert column.describe(column.count(torch.tensor([0, 1])), 5) == {"count": None}


class Declares:
    """As much of a task as the vector uses."""

    def __init__(self, columns, data=None):
        self.columns, self.data = columns, data

    def statistics_columns(self):
        return self.columns

    def statistics_data(self, participant):
        return self.data


def test_without_statistics_data_the_inputs_of_local_data_are_the_columns():
    rows = [(torch.tensor([1.0, 20.0]), 0), (torch.tensor([3.0, 40.0]), 1)]
    vector = StatisticsVector(Declares({"x": Column(0, 4), "y": Column(0, 60)}))
    described = vector.describe(vector.measure(DEVICE, rows), minimum=1)
    assert (described["x"]["mean"], described["y"]["mean"]) == (2, 30)


@pytest.mark.parametrize(
    ("columns", "data", "message"),
    [
        ({}, {}, "declares no columns"),
        ({"x": 3}, {}, "must return a dictionary of"),
        ({"x": Column(0, 1, bins=1 << 14)}, {}, "use fewer bins"),
        ({"x": Column(0, 1)}, {"y": [1.0]}, "has no column 'x'"),
        ({"x": Column(0, 1)}, {"x": [[1.0]]}, r"shape is \(1, 1\)"),
        ({"x": Column(0, 1)}, None, r"declares 1 columns, and the inputs of local_data\(\)"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_one_sentence(columns, data, message):
    rows = [(torch.zeros(2), 0)]
    with pytest.raises(TaskError, match=message):
        StatisticsVector(Declares(columns, data)).measure(DEVICE, rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Column(1, 0),
        lambda: Column(-1e200, 1e200),
        lambda: Category(()),
        lambda: Category("aa"),
    ],
)
def test_kinds_that_cannot_be_used_are_refused(make):
    with pytest.raises(TaskError, match="is not usable"):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_are_compared_in_the_dtype_of_the_data(dtype):
    values = torch.tensor([0.1] * 6 + [0.5] * 7, dtype=dtype)
    assert Category((0.1, 0.5)).count(values).tolist() == [6, 7, 0]
    assert Category((0.1, 0.5)).count(values.float().numpy()).tolist()[1] == 7


def test_categories_of_whole_numbers_and_texts():
    assert Category((0, 1, 0.5)).count(torch.tensor([0, 1, 1])).tolist() == [1, 2, 0, 0]
    assert Category(("a", 1)).count(["a", "b", 1]).tolist() == [1, 1, 1]
    assert Category(("a", 1)).count(torch.tensor([1, 2])).tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"its shape is \(3, 1\), not \(rows,\)"):
        Category((0, 1)).count(torch.ones(3, 1))


def test_equal_values_have_no_deviation_within_any_bounds():
    column = Column(0, 1e6)
    figures = column.describe(column.count(torch.full((1000,), 1e-6)), minimum=5)
    assert figures["deviation"] == 0
    assert figures["variance_error"] == 3 * 5e5**2 / 2**29
