"""The size of stacks, and the optimizers for which gradients need not be written to memory."""

import pytest
import torch
from torch import nn

from isthmus.task.optimizers import TaskOptimizers
from isthmus_simulation.devices.stacks.optimizers import plain_descent
from isthmus_simulation.devices.stacks.sizes import most_devices, places


@pytest.mark.parametrize(
    ("device", "mib", "most"),
    [
        ("cpu", 1.3, 4),
        ("cpu", 0.6, 12),
        ("cpu", 0.01, 64),
        ("cpu", 2.5, 3),
        ("cpu", 50, 1),
        ("cuda", 1.3, 64),
        ("cuda", 60, 16),
    ],
)
def test_the_tensors_of_a_step_fit_into_memory_that_is_near(device, mib, most):
    assert most_devices(device, 0) == 4  # it tells how much memory a device takes
    assert most_devices(device, int(mib * 2**20)) == most


@pytest.mark.parametrize(
    ("devices", "most", "expected"), [(1, 4, 4), (4, 4, 4), (5, 64, 8), (61, 64, 64), (2, 3, 3)]
)
def test_stacks_have_few_sizes_so_that_few_steps_are_recorded(devices, most, expected):
    assert places(devices, most) == expected


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
