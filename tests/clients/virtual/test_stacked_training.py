"""The size of stacks, and the optimizers for which gradients need not be written to memory."""

import pytest
import torch
from torch import nn

from isthmus.task.optimizers import TaskOptimizers
from isthmus_clients.virtual.stacks.optimizers import plain_descent
from isthmus_clients.virtual.stacks.sizes import StackSizes


@pytest.mark.parametrize(
    ("device", "mib", "most"),
    [
        ("cpu", 1.3, 4),
        ("cpu", 0.6, 8),
        ("cpu", 0.01, 64),
        ("cpu", 2.5, 2),
        ("cpu", 50, 1),
        ("cuda", 1.3, 64),
        ("cuda", 60, 16),
    ],
)
def test_the_tensors_of_a_step_fit_into_memory_that_is_near(device, mib, most):
    sizes = StackSizes(device)
    assert sizes.most(0) == 4  # it tells how much memory a device takes
    assert sizes.most(int(mib * 2**20)) == most


def test_places_stay_empty_until_recording_another_size_is_cheaper():
    sizes = StackSizes("cpu")
    assert sizes.places(3, steps=10, recorded=()) == 3
    assert sizes.places(4, steps=10, recorded={4}) == 4
    assert sizes.places(5, steps=10, recorded={4}) == 5
    places = [sizes.places(3, steps=10, recorded={4, 8}) for _ in range(27)]
    assert places == [4] * 25 + [3] * 2  # 256 steps of empty places
    assert sizes.places(1, steps=100, recorded={4, 8}) == 1
    assert sizes.places(2, steps=100, recorded={4, 8}) == 4


PARAMETERS = {"weight": nn.Parameter(torch.ones(2, 3)), "bias": nn.Parameter(torch.ones(2))}


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), [0.1, 0.1]),
        (
            lambda p: torch.optim.SGD([{"params": p[1:], "lr": 0.2}, {"params": p[:1]}], 0.1),
            [0.1, 0.2],
        ),
        (lambda p: torch.optim.SGD(p[:1], lr=0.1), None),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), None),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), None),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), None),
        (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), None),
        (lambda p: torch.optim.Adam(p), None),
    ],
)
def test_only_sgd_without_options_is_computed_with_the_gradients(optimizer, rates):
    parameters = list(PARAMETERS.values())
    optimizers = TaskOptimizers(optimizer(parameters), parameters)
    assert plain_descent(optimizers, PARAMETERS) == rates


def test_a_schedule_changes_the_rates_of_a_plain_descent():
    parameters = list(PARAMETERS.values())
    optimizer = torch.optim.SGD(parameters, lr=0.8)
    made = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizers = TaskOptimizers(made, parameters)
    for position in range(3):
        optimizers.go_to(position)
        assert plain_descent(optimizers, PARAMETERS) == [0.8 * 0.5**position] * 2
