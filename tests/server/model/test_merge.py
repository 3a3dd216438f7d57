"""Merging the updates of the federated and the datacenter regime."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus_server.model import merge

VECTORS = st.integers(1, 40).flatmap(
    lambda size: st.tuples(
        *(st.lists(st.floats(-100, 100, width=32), min_size=size, max_size=size),) * 2
    )
)


@given(VECTORS)
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
