"""The training data of a step is a pure function of the step, for datasets and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.warm_ranks import Ranks
from torch.utils.data import IterableDataset, TensorDataset

from isthmus.errors import TaskError
from isthmus.task import load_task
from isthmus_datacenter.training.data import BatchSource, ExampleOrder

HERE = Path(__file__)
TASK = load_task("tasks.py:Table", {}, base=HERE.parents[1])


@pytest.fixture(scope="module")
def in_rank() -> Iterator[Callable[..., Any]]:
    """`in_rank("read_streams", ...)`: the result of a function of this file in a warm rank.

    A rank has not used gRPC, whose threads do not survive the fork of a reader process.
    """
    with Ranks(1) as group:
        yield lambda function, *arguments: group.run(HERE, function, *arguments)[0]


@pytest.mark.parametrize(
    ("examples", "replicas", "batch_size"), [(10, 2, 3), (3, 4, 5), (64, 2, 4)]
)
def test_every_epoch_has_each_example_once(examples: int, replicas: int, batch_size: int) -> None:
    order = ExampleOrder(examples=examples, replicas=replicas, batch_size=batch_size, seed=1)
    size = replicas * batch_size
    steps = -(-3 * examples // size)
    stream = [
        index
        for step in range(steps)
        for replica in range(replicas)
        for index in order.indices(step, step + 1, replica)
    ]
    epochs = [stream[at : at + examples] for at in range(0, 3 * examples, examples)]
    assert all(sorted(epoch) == list(range(examples)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_later_steps_are_the_rest_of_all_steps() -> None:
    order = ExampleOrder(examples=23, replicas=3, batch_size=4, seed=9)
    whole = list(order.indices(0, 20, 2))
    assert list(order.indices(0, 7, 2)) + list(order.indices(7, 20, 2)) == whole
    assert order.indices(0, 20, 2)[3:9] == whole[3:9]
    assert order.examples_between(5, 90) == [order.example(position) for position in range(5, 90)]


def test_seeds_and_replicas_have_different_data() -> None:
    first = ExampleOrder(examples=1000, replicas=2, batch_size=8, seed=0)
    second = ExampleOrder(examples=1000, replicas=2, batch_size=8, seed=1)
    assert list(first.indices(0, 4, 0)) != list(second.indices(0, 4, 0))
    assert not set(first.indices(0, 4, 0)) & set(first.indices(0, 4, 1))


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(number, -number) for number in range(self.count)])


class Seekable(Stream):
    def start_at(self, example: int) -> Iterator[tuple[int, int]]:
        at = example % self.count
        return iter([(number, -number) for number in range(at, self.count)])


def batch_inputs(source: BatchSource, first: int, until: int) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in source.batches(first, until)]


def read_streams(rank: int, seekable: bool, readers: int) -> tuple[Any, Any]:
    """The batches of two replicas, and of a replica that continues."""
    kind = Seekable if seekable else Stream
    order = ExampleOrder(examples=0, replicas=2, batch_size=2, seed=0)
    cpu = torch.device("cpu")
    sources = [BatchSource(TASK, kind(7), order, replica, cpu, readers) for replica in (0, 1)]
    both = [batch_inputs(sources[0], 0, 4), batch_inputs(sources[1], 0, 4)]
    return both, batch_inputs(sources[1], 2, 4)


@pytest.mark.parametrize("seekable", [False, True])
@pytest.mark.parametrize("readers", [0, 1])
def test_a_stream_is_divided_and_resumed_at_the_exact_example(
    seekable: bool, readers: int, in_rank: Callable[..., Any]
) -> None:
    both, rest = in_rank("read_streams", seekable, readers)
    assert both[0] == [[0, 1], [4, 5], [1, 2], [5, 6]]
    assert both[1] == [[2, 3], [6, 0], [3, 4], [0, 1]]
    assert rest == both[1][2:]


def test_an_empty_stream_is_refused() -> None:
    order = ExampleOrder(examples=0, replicas=1, batch_size=2, seed=0)
    with pytest.raises(TaskError, match="an iterable dataset without any example"):
        batch_inputs(BatchSource(TASK, Stream(0), order, 0, torch.device("cpu"), 0), 0, 1)


def read_batches(rank: int) -> list[list[list[int]]]:
    """What is read without and with processes that read."""
    order = ExampleOrder(examples=9, replicas=2, batch_size=2, seed=3)
    data = TensorDataset(torch.arange(9), torch.arange(9))
    sources = [BatchSource(TASK, data, order, 1, torch.device("cpu"), each) for each in (0, 2)]
    return [batch_inputs(source, 1, 6) for source in sources]


def test_reader_processes_do_not_change_the_batches(in_rank: Callable[..., Any]) -> None:
    without, with_readers = in_rank("read_batches")
    assert (len(without), with_readers) == (5, without)
