"""Which elements of an update compression sends in every round."""

import pytest

from isthmus.errors import JobError
from isthmus.tensors.always_sent import MAX_RANGES, always_sent, check_compression
from isthmus.tensors.exchange_set import TensorLayout

LAYOUT = TensorLayout.from_shapes(
    {"a.bias": (3,), "a.weight": (3, 4), "b.bias": (2,), "b.empty": (0,), "n.mean": (5,)},
    ["n.mean"],
)


@pytest.mark.parametrize(
    ("patterns", "ranges"),
    [
        ([], ()),
        (["*.bias"], ((0, 3), (15, 17))),
        (["b.*", "*.mean"], ((15, 17),)),
        (["*.mean"], ()),
        (["a.weight", "a.*"], ((0, 15),)),
        (["b.empty"], ()),
        (["*"], ((0, 17),)),
    ],
)
def test_neighbouring_tensors_are_one_range(patterns, ranges):
    assert always_sent(LAYOUT, patterns) == ranges


def test_a_pattern_that_matches_nothing_is_a_sentence():
    with pytest.raises(JobError, match=r"always: 'norm' matches no exchanged tensor; correct"):
        always_sent(LAYOUT, ["*.bias", "norm"])


def test_running_statistics_that_are_averaged_are_a_sentence():
    with pytest.raises(JobError, match=r"statistics of .* such as 'n\.mean'; set"):
        check_compression(LAYOUT, ["*.bias"], "average")
    check_compression(LAYOUT, ["*.bias"], "recompute")
    with pytest.raises(JobError, match="matches no exchanged tensor"):
        check_compression(LAYOUT, ["norm"], "recompute")


def test_too_many_ranges_are_a_sentence():
    shapes = {f"{k:05}.{name}": (1,) for k in range(MAX_RANGES + 1) for name in ("bias", "weight")}
    layout = TensorLayout.from_shapes(shapes)
    assert len(always_sent(layout, ["*"])) == 1
    with pytest.raises(JobError, match=f"in {MAX_RANGES + 1} places of the update"):
        always_sent(layout, ["*.bias"])
