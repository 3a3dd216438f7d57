"""The order of the data is a pure function of the step."""

from __future__ import annotations

import pytest

from isthmus_datacenter.data import Order


@pytest.mark.parametrize(("examples", "ranks", "batch_size"), [(10, 2, 3), (3, 4, 5), (64, 2, 4)])
def test_every_epoch_has_each_example_once(examples: int, ranks: int, batch_size: int) -> None:
    order = Order(examples=examples, ranks=ranks, batch_size=batch_size, seed=1)
    size = ranks * batch_size
    steps = -(-3 * examples // size)
    stream = [
        index
        for step in range(steps)
        for rank in range(ranks)
        for index in order.steps(step, step + 1, rank)
    ]
    epochs = [stream[at : at + examples] for at in range(0, 3 * examples, examples)]
    assert all(sorted(epoch) == list(range(examples)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_resumed_stretch_is_the_rest_of_the_whole() -> None:
    order = Order(examples=23, ranks=3, batch_size=4, seed=9)
    whole = list(order.steps(0, 20, 2))
    assert list(order.steps(0, 7, 2)) + list(order.steps(7, 20, 2)) == whole
    assert order.steps(0, 20, 2)[3:9] == whole[3:9]


def test_seeds_and_ranks_see_different_data() -> None:
    one = Order(examples=1000, ranks=2, batch_size=8, seed=0)
    other = Order(examples=1000, ranks=2, batch_size=8, seed=1)
    assert list(one.steps(0, 4, 0)) != list(other.steps(0, 4, 0))
    assert not set(one.steps(0, 4, 0)) & set(one.steps(0, 4, 1))
