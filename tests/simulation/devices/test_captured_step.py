"""Recorded steps that a GPU repeats as one graph."""

import torch
from tests.machine import needs_gpu
from torch.fx.experimental.proxy_tensor import make_fx

from isthmus_simulation.devices.stacks.captured_step import captured

pytestmark = needs_gpu


def test_a_captured_step_computes_the_same_with_other_numbers():
    def step(x, y):
        return (x @ y).relu(), x.sum(0)

    first = torch.randn(4, 5, device="cuda"), torch.randn(5, 6, device="cuda")
    recorded = make_fx(step)(*first)
    graph = captured(recorded, first)
    assert graph is not recorded
    for given in (first, [2 * each - 1 for each in first]):
        for one, same in zip(graph(*given), recorded(*given), strict=True):
            torch.testing.assert_close(one, same)


def test_a_step_that_waits_for_the_gpu_is_launched_kernel_by_kernel():
    x = torch.tensor([0.0, 2.0, 3.0], device="cuda")
    recorded = torch.fx.symbolic_trace(Nonzero())
    assert captured(recorded, (x,)) is recorded
    assert recorded(x)[0].tolist() == [1, 2]


class Nonzero(torch.nn.Module):
    """How many elements its result has is known once it was computed."""

    def forward(self, x):
        return (torch.ops.aten.nonzero.default(x).flatten(),)
