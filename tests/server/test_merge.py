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
def test_what_is_left_after_projecting_does_not_point_against_the_fleet(pair):
    theirs, fleet = map(torch.tensor, pair)
    before = merge.dot(theirs, fleet)
    projected = merge.project(theirs.clone(), fleet)
    after = merge.dot(projected, fleet)
    scale = math.sqrt(merge.dot(theirs, theirs) * merge.dot(fleet, fleet))
    assert after >= -1e-5 * scale - 1e-30
    if before >= 0:
        assert torch.equal(projected, theirs)
    else:
        assert merge.dot(projected, projected) <= merge.dot(theirs, theirs) * (1 + 1e-5)


def test_several_datacenters_weigh_by_their_examples():
    parts = [(torch.tensor([1.0, 0.0]), 10), (torch.tensor([4.0, 3.0]), 20)]
    assert merge.mean(parts).tolist() == [3.0, 2.0]
    nothing_counted = [(torch.tensor([1.0]), 0), (torch.tensor([2.0]), 0)]
    assert merge.mean(nothing_counted).tolist() == [1.5]


def test_norms_and_cosine():
    norms, cosine = merge.geometry(
        {"federated": torch.tensor([3.0, 4.0]), "datacenter": torch.tensor([0.0, 2.0])}
    )
    assert norms == {"federated": 5.0, "datacenter": 2.0}
    assert cosine == pytest.approx(0.8)
    assert merge.geometry({"federated": torch.zeros(2), "datacenter": torch.ones(2)})[1] is None
    assert merge.geometry({"federated": torch.ones(2)})[1] is None


def test_a_norm_is_exact_where_single_precision_would_lose_it():
    large = torch.full((1_500_000,), 0.1)
    exact = math.sqrt(len(large)) * float(torch.tensor(0.1).double())
    assert merge.geometry({"federated": large})[0]["federated"] == pytest.approx(exact, rel=1e-10)
