"""Merging the updates of the federated and the datacenter regime."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from isthmus_server.model import merge

VECTORS = st.integers(1, 40).flatmap(
    lambda size: st.tuples(
        *(st.lists(st.floats(-100, 100, width=32), min_size=size, max_size=size),) * 2
    )
)


@given(VECTORS)
@example(([-4.0], [1.1754943508222875e-38]))  # their quotient is above the range of float32
def test_the_projected_datacenter_update_has_no_component_against_the_federated_one(pair):
    datacenter, federated = map(torch.tensor, pair)
    before = merge.dot(datacenter, federated)
    projected = merge.remove_conflict(datacenter.clone(), federated)
    after = merge.dot(projected, federated)
    scale = math.sqrt(merge.dot(datacenter, datacenter) * merge.dot(federated, federated))
    assert after >= -1e-5 * scale - 1e-30
    if before >= 0:
        assert torch.equal(projected, datacenter)
    else:
        assert merge.dot(projected, projected) <= merge.dot(datacenter, datacenter) * (1 + 1e-5)


def test_datacenters_are_averaged_by_examples():
    parts = [(torch.tensor([1.0, 0.0]), 10), (torch.tensor([4.0, 3.0]), 20)]
    assert merge.mean_by_examples(parts).tolist() == [3.0, 2.0]
    no_examples = [(torch.tensor([1.0]), 0), (torch.tensor([2.0]), 0)]
    assert merge.mean_by_examples(no_examples).tolist() == [1.5]


def test_datacenters_have_weights_of_their_own():
    """The mean times its weight is the sum of the vectors by their examples and weights."""
    updates = {"a": (torch.tensor([1.0, 0.0]), 10), "b": (torch.tensor([4.0, 3.0]), 30)}
    mean, weight = merge.weighted_mean(updates, {"a": 0.4, "b": 0.2})
    assert weight == pytest.approx((10 * 0.4 + 30 * 0.2) / 40)
    torch.testing.assert_close(mean * weight, torch.tensor([0.25 * 0.4 + 3 * 0.2, 2.25 * 0.2]))
    alone, weight = merge.weighted_mean({"a": (torch.tensor([0.1, 0.7]), 3)}, {"a": 0.3})
    assert (alone.tolist(), weight) == (torch.tensor([0.1, 0.7]).tolist(), 0.3)


@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 50)), min_size=1, max_size=5))
def test_equal_weights_give_the_mean_by_examples(parts):
    def updates():
        return {str(at): (torch.tensor([value]), count) for at, (value, count) in enumerate(parts)}

    mean, weight = merge.weighted_mean(updates(), dict.fromkeys(updates(), 0.25))
    assert weight == pytest.approx(0.25)
    plain = merge.mean_by_examples(list(updates().values()))
    torch.testing.assert_close(mean, plain, atol=1e-5, rtol=1e-5)


def test_norms_and_cosine():
    norms, cosine = merge.norms_and_cosine(
        {"federated": torch.tensor([3.0, 4.0]), "datacenter": torch.tensor([0.0, 2.0])}
    )
    assert norms == {"federated": 5.0, "datacenter": 2.0}
    assert cosine == pytest.approx(0.8)
    assert (
        merge.norms_and_cosine({"federated": torch.zeros(2), "datacenter": torch.ones(2)})[1]
        is None
    )
    assert merge.norms_and_cosine({"federated": torch.ones(2)})[1] is None


def test_norms_are_summed_in_double_precision():
    large = torch.full((1_500_000,), 0.1)
    exact = math.sqrt(len(large)) * float(torch.tensor(0.1).double())
    assert merge.norms_and_cosine({"federated": large})[0]["federated"] == pytest.approx(
        exact, rel=1e-10
    )
