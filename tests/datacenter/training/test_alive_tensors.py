"""Tensors are counted from the operator that returns them until they are freed."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from isthmus_datacenter.training.alive_tensors import AliveTensors


def test_what_is_freed_or_resized_is_counted_no_more() -> None:
    given = torch.zeros(10)
    alive = AliveTensors()
    alive.add([given, given[2:]])
    assert alive.total == 40
    with alive:
        alive.now("begin")
        made = given + 1
        view = made[:3]
        alive.now("freed")
        del made
        assert alive.total == 80  # the view has the storage
        view.untyped_storage().resize_(0)
        assert alive.total == 40
        del view
    assert alive.total == 40
    assert alive.peaks == {("begin", None): 80, ("freed", None): 80}


def test_the_same_is_counted_without_values() -> None:
    def counted() -> tuple[int, int, dict[object, int]]:
        layer = nn.Linear(8, 8)
        layer.bias.requires_grad_(False)
        inputs = torch.ones(4, 8)
        alive = AliveTensors()
        alive.add([layer.weight, layer.bias, inputs])
        with alive:
            alive.now("forward")
            # A module that is called twice, and has a frozen parameter.
            total = layer(layer(inputs)).square().sum()
            kept = alive.kept(layer.parameters())
            alive.now("backward")
            total.backward()
        return kept, alive.total, {**alive.peaks}

    with FakeTensorMode():
        without = counted()
    assert counted() == without
    kept, total, _ = without
    assert kept == 4 * (2 * 32 + 1)  # the output of each call, and the sum
    assert total == 4 * (64 + 8 + 32 + 64 + 1)  # what was there, the gradient, and the sum


def test_what_a_backward_pass_makes_is_not_kept_by_a_forward_pass() -> None:
    weight = nn.Parameter(torch.ones(5))
    alive = AliveTensors()
    with alive:
        (weight * 2).sum().backward()
        assert alive.kept([]) == 0
        assert alive.total == 20  # the gradient
