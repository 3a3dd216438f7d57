"""The random numbers of a participant's data."""

import random

import numpy as np
import torch

from isthmus.task.own_numbers import own_numbers


def draw():
    return random.random(), np.random.random(), torch.rand(1).item()


def drawn(*about):
    with own_numbers(*about):
        return draw()


def test_all_generators_that_a_task_may_use_are_seeded_and_then_as_before():
    expected = drawn(1, "a")
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = draw()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert drawn(1, "a") == expected
    assert draw() == before
    for one, other in zip(drawn(1, "b"), expected, strict=True):
        assert one != other


def test_with_a_secret_a_server_neither_knows_nor_chooses_them():
    expected = drawn(1, "a", b"secret")
    assert drawn(2, "b", b"secret") == expected
    for about in ((1, "a"), (1, "a", b"another")):
        for one, other in zip(drawn(*about), expected, strict=True):
            assert one != other
