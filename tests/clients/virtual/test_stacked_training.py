"""The size of stacks, and the optimizers for which gradients need not be written to memory."""

import pytest
import torch
from torch import nn

from isthmus.task.optimizers import TaskOptimizers
from isthmus_clients.virtual.stacked import plain_descent
from isthmus_clients.virtual.stacked_training import StackSizes


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


def stepped(optimizer):
    optimizer.register_step_pre_hook(lambda *given: None)
    return optimizer


def replaced(optimizer):
    optimizer.step = lambda: None
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "is_plain"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.SGD([{"params": [p[0]]}, {"params": [p[1]], "lr": 0.2}], 0.1), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), False),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), False),
        (lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), False),
        (lambda p: torch.optim.Adam(p), False),
        (lambda p: type("Own", (torch.optim.SGD,), {})(p, lr=0.1), False),
        (lambda p: stepped(torch.optim.SGD(p, lr=0.1)), False),
        (lambda p: replaced(torch.optim.SGD(p, lr=0.1)), False),
    ],
)
def test_only_sgd_without_options_is_computed_with_the_gradients(optimizer, is_plain):
    parameters = list(PARAMETERS.values())
    groups = plain_descent(TaskOptimizers(optimizer(parameters), parameters), PARAMETERS)
    assert (groups is not None) == is_plain


def test_a_schedule_changes_the_rates_of_a_plain_descent():
    parameters = list(PARAMETERS.values())
    optimizer = torch.optim.SGD(parameters, lr=0.8)
    made = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizers = TaskOptimizers(made, parameters)
    groups = plain_descent(optimizers, PARAMETERS)
    for position in range(3):
        optimizers.go_to(position)
        assert [group["lr"] for group in groups] == [0.8 * 0.5**position] * 2
