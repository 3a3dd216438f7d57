"""The examples of local steps are those of shuffled epochs, however few of one are used."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from isthmus.task.definition import Task
from isthmus.task.scoring.order import EpochOrder
from isthmus_clients.training.example_order import local_seed, number, step_indices


class Plain(Task):
    def model(self): ...

    def local_data(self, participant): ...

    def optimizer(self, parameters, participant): ...


def order(examples, batch_size):
    return EpochOrder(Plain({}), TensorDataset(torch.zeros(1)), examples, batch_size)


def by_whole_epochs(seed, examples, size, steps):
    generator = torch.Generator().manual_seed(number(seed))
    batches = []
    while len(batches) < steps:
        batches += torch.randperm(examples, generator=generator).split(size)
    return [batch.tolist() for batch in batches[:steps]]


@pytest.mark.parametrize(
    ("examples", "size", "steps"),
    [(1000, 8, 2), (1000, 8, 250), (40, 16, 7), (5, 8, 3), (64, 8, 8)],
)
def test_a_number_of_steps_goes_through_as_many_epochs_as_it_takes(examples, size, steps):
    seed = local_seed(1, 2, "a")
    settings = SimpleNamespace(local_steps=steps, local_epochs=None, batch_size=size)
    indices = list(step_indices(seed, order(examples, size), settings))
    assert indices == by_whole_epochs(seed, examples, size, steps)


def test_two_batches_of_a_large_data_set_take_the_time_of_two_batches():
    settings = SimpleNamespace(local_steps=2, local_epochs=None, batch_size=8)
    began = time.process_time()
    batches = list(step_indices(local_seed(1, 2, "a"), order(10**12, 8), settings))
    assert [len(batch) for batch in batches] == [8, 8]
    assert time.process_time() - began < 5  # a permutation would not fit into memory
