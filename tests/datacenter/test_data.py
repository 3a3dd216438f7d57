"""The order of the data is a pure function of the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from isthmus.errors import TaskError
from isthmus_datacenter.training.data import BatchSource, ExampleOrder


@pytest.mark.parametrize(("examples", "ranks", "batch_size"), [(10, 2, 3), (3, 4, 5), (64, 2, 4)])
def test_every_epoch_has_each_example_once(examples: int, ranks: int, batch_size: int) -> None:
    order = ExampleOrder(examples=examples, replicas=ranks, batch_size=batch_size, seed=1)
    size = ranks * batch_size
    steps = -(-3 * examples // size)
    stream = [
        index
        for step in range(steps)
        for rank in range(ranks)
        for index in order.indices(step, step + 1, rank)
    ]
    epochs = [stream[at : at + examples] for at in range(0, 3 * examples, examples)]
    assert all(sorted(epoch) == list(range(examples)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_resumed_stretch_is_the_rest_of_the_whole() -> None:
    order = ExampleOrder(examples=23, replicas=3, batch_size=4, seed=9)
    whole = list(order.indices(0, 20, 2))
    assert list(order.indices(0, 7, 2)) + list(order.indices(7, 20, 2)) == whole
    assert order.indices(0, 20, 2)[3:9] == whole[3:9]
    assert order.examples_between(5, 90) == [order.example(place) for place in range(5, 90)]


def test_seeds_and_ranks_see_different_data() -> None:
    one = ExampleOrder(examples=1000, replicas=2, batch_size=8, seed=0)
    other = ExampleOrder(examples=1000, replicas=2, batch_size=8, seed=1)
    assert list(one.indices(0, 4, 0)) != list(other.indices(0, 4, 0))
    assert not set(one.indices(0, 4, 0)) & set(one.indices(0, 4, 1))


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(number, -number) for number in range(self.count)])


class Seekable(Stream):
    def start_at(self, example: int) -> Iterator[tuple[int, int]]:
        at = example % self.count
        return iter([(number, -number) for number in range(at, self.count)])


def seen(feed: BatchSource, first: int, until: int) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in feed.batches(first, until)]


@pytest.mark.parametrize("kind", [Stream, Seekable])
@pytest.mark.parametrize("readers", [0, 1])
def test_a_stream_is_shared_and_resumed_to_the_example(kind: Any, readers: int) -> None:
    order = ExampleOrder(examples=0, replicas=2, batch_size=2, seed=0)
    cpu = torch.device("cpu")
    feeds = [BatchSource(kind(7), order, replica, cpu, readers) for replica in (0, 1)]
    assert seen(feeds[0], 0, 4) == [[0, 1], [4, 5], [1, 2], [5, 6]]
    assert seen(feeds[1], 0, 4) == [[2, 3], [6, 0], [3, 4], [0, 1]]
    assert seen(feeds[1], 2, 4) == [[3, 4], [0, 1]]


def test_a_stream_with_nothing_in_it() -> None:
    order = ExampleOrder(examples=0, replicas=1, batch_size=2, seed=0)
    with pytest.raises(TaskError, match="an iterable dataset without any example"):
        seen(BatchSource(Stream(0), order, 0, torch.device("cpu"), 0), 0, 1)


def test_readers_change_nothing() -> None:
    order = ExampleOrder(examples=9, replicas=2, batch_size=2, seed=3)
    data = TensorDataset(torch.arange(9), torch.arange(9))
    alone, helped = (BatchSource(data, order, 1, torch.device("cpu"), count) for count in (0, 2))
    assert seen(alone, 1, 6) == seen(helped, 1, 6)
