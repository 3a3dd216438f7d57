"""Which parameters of an update compression sends more often than others."""

import pytest

from isthmus.errors import JobError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.sending_rates import MAX_RANGES, check_compression, sending_rates

LAYOUT = TensorLayout.from_shapes(
    {"a.bias": (3,), "a.weight": (3, 4), "b.bias": (2,), "b.empty": (0,), "n.mean": (5,)},
    ["n.mean"],
)


@pytest.mark.parametrize(
    ("one_in_of", "ranges"),
    [
        ({}, ()),
        ({"*.bias": 1}, ((0, 3, 1), (15, 17, 1))),
        ({"b.*": 3, "*.mean": 1}, ((15, 17, 3),)),
        ({"*.mean": 1}, ()),
        ({"a.weight": 2, "a.*": 2}, ((0, 15, 2),)),
        ({"a.weight": 2, "a.*": 1}, ((0, 15, 1),)),
        ({"a.weight": 1, "a.*": 2}, ((0, 3, 2), (3, 15, 1))),
        ({"b.empty": 1}, ()),
        ({"*": 4}, ((0, 17, 4),)),
    ],
)
def test_neighbours_with_the_same_number_are_one_range_and_the_smallest_counts(one_in_of, ranges):
    assert sending_rates(LAYOUT, one_in_of) == ranges


def test_a_pattern_that_matches_nothing_is_a_sentence():
    with pytest.raises(JobError, match=r"one_in_of: 'norm' matches no exchanged tensor; correct"):
        sending_rates(LAYOUT, {"*.bias": 1, "norm": 1})


def test_brackets_of_a_name_are_explained():
    layout = TensorLayout.from_shapes({"w[0]": (2,)})
    with pytest.raises(JobError, match=r"'w\[0\]' matches no .*; \[ begins a set of characters"):
        sending_rates(layout, {"w[0]": 1})
    assert sending_rates(layout, {"w[[]0]": 1}) == ((0, 2, 1),)


def test_running_statistics_that_are_averaged_are_a_sentence():
    with pytest.raises(JobError, match=r"statistics of .* such as 'n\.mean'; set"):
        check_compression(LAYOUT, {"*.bias": 1}, "average")
    check_compression(LAYOUT, {"*.bias": 1}, "recompute")
    with pytest.raises(JobError, match="matches no exchanged tensor"):
        check_compression(LAYOUT, {"norm": 1}, "recompute")


def test_too_many_ranges_are_a_sentence():
    shapes = {f"{k:05}.{name}": (1,) for k in range(MAX_RANGES + 1) for name in ("bias", "weight")}
    layout = TensorLayout.from_shapes(shapes)
    assert len(sending_rates(layout, {"*": 1})) == 1
    with pytest.raises(JobError, match=f"in {MAX_RANGES + 1} places of the update"):
        sending_rates(layout, {"*.bias": 1})
