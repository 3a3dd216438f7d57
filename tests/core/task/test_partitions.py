"""Partitions of one data set among devices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus import Participant, Partitioner, TaskError

KINDS = ["iid", "quantity:0.5", "dirichlet:0.3", "classes:2", "by-key"]


def rows(split, count):
    return [
        split.rows_of(Participant(name=f"client-{index}", regime="federated", shard=(index, count)))
        for index in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(count=st.integers(1, 10), seed=st.integers(0, 5))
def test_every_row_is_on_one_device_and_every_device_has_rows(kind, count, seed):
    split = Partitioner(kind, labels=torch.arange(80) % 10, seed=seed)
    dealt = rows(split, count)
    assert sorted(torch.cat(dealt).tolist()) == list(range(80))
    assert all(len(each) for each in dealt)
    again = rows(Partitioner(kind, labels=torch.arange(80) % 10, seed=seed), count)
    assert all(torch.equal(*pair) for pair in zip(dealt, again, strict=True))


def test_a_smaller_alpha_is_more_uneven():
    labels = torch.arange(4000) % 10

    def largest_share(alpha):
        dealt = rows(Partitioner(f"dirichlet:{alpha}", labels=labels, seed=3), 8)
        return sum(
            float(torch.bincount(labels[each], minlength=10).max() / len(each)) for each in dealt
        ) / len(dealt)

    assert largest_share(0.1) > 0.4 > 0.2 > largest_share(100)


def test_a_device_has_few_classes_and_a_key_one_device():
    labels = torch.arange(1000) % 10
    few = rows(Partitioner("classes:2", labels=labels), 20)
    assert all(len(labels[each].unique()) <= 3 for each in few)
    keys = ["ann", "bob", "eve", "dan"] * 5
    split = Partitioner("by-key", labels=keys)
    owners = [{keys[row] for row in each.tolist()} for each in rows(split, 2)]
    assert owners[0] | owners[1] == set(keys)
    assert not owners[0] & owners[1]


@pytest.mark.parametrize(
    ("kind", "named", "sentence"),
    [
        ("dirichlet", {"labels": [1]}, "'dirichlet' needs a positive number"),
        ("dirichlet:-1", {"labels": [1]}, "needs a positive number"),
        ("iid:3", {"rows": 4}, "'iid:3' takes no number"),
        ("random", {"rows": 4}, "there is no partition 'random'; there are iid, quantity:NUMBER"),
        ("by-key", {"rows": 4}, "'by-key' needs labels"),
        ("iid", {}, "'iid' needs rows or labels"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(kind, named, sentence):
    with pytest.raises(TaskError, match=sentence):
        Partitioner(kind, **named)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("iid", "6 rows cannot be divided among 7 devices"),
        ("by-key", "6 rows cannot be divided among 7 devices"),
        ("classes:4", "6 rows cannot be cut into 8 pieces, 4 for each of 2 devices"),
    ],
)
def test_too_many_devices_for_the_rows_are_refused(kind, sentence):
    count = 2 if kind == "classes:4" else 7
    with pytest.raises(TaskError, match=sentence):
        rows(Partitioner(kind, labels=torch.arange(6)), count)


def test_a_device_without_a_shard_is_refused():
    with pytest.raises(TaskError, match="client-a has no shard; start it with --shard"):
        Partitioner("iid", rows=3).rows_of(Participant(name="client-a", regime="federated"))
