"""Convolutions and pools of stacked models are those of each model alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from isthmus_clients.virtual.stacks.channels import StackedChannels

aten = torch.ops.aten
COUNT = 3


def gradients_of(model, stacked, inputs):
    """A recorded step, its results, and the gradients of each model alone."""

    def loss(own, images):
        return torch.func.functional_call(model, own, images).square().sum()

    step = torch.vmap(torch.func.grad(loss))
    with StackedChannels():
        recorded = make_fx(step)(stacked, inputs)
    alone = []
    for k in range(COUNT):
        own = {name: part[k].clone().requires_grad_() for name, part in stacked.items()}
        found = torch.autograd.grad(loss(own, inputs[k]), list(own.values()))
        alone.append(dict(zip(own, found, strict=True)))
    return recorded, recorded(stacked, inputs), alone


def check(model, channels, size, batch=4, frozen=()):
    named = dict(model.named_parameters())
    stacked = {
        name: torch.randn(COUNT, *part.shape) for name, part in named.items() if name not in frozen
    }
    inputs = torch.randn(COUNT, batch, channels, size, size)
    recorded, found, alone = gradients_of(model, stacked, inputs)
    for name in stacked:
        for k in range(COUNT):
            expected = alone[k][name]
            scale = float(expected.abs().max().clamp(min=1e-3))
            torch.testing.assert_close(
                found[name][k] / scale, expected / scale, rtol=1e-4, atol=1e-4
            )
    return recorded


@st.composite
def models(draw):
    """A convolution, often a ReLU and a pool after it."""
    groups, channels, outputs = (draw(st.integers(1, 3)) for _ in range(3))
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(st.integers(1, 2))
    layers = [
        nn.Conv2d(
            groups * channels,
            groups * outputs,
            kernel,
            stride=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
            padding=draw(st.integers(0, 2)),
            dilation=dilation,
            groups=groups,
            bias=draw(st.booleans()),
        )
    ]
    if draw(st.booleans()):
        layers.append(nn.ReLU(inplace=draw(st.booleans())))
    if draw(st.booleans()):
        size = draw(st.integers(2, 3))
        pool = nn.MaxPool2d(
            size,
            stride=draw(st.one_of(st.none(), st.integers(1, 3))),
            padding=draw(st.integers(0, size // 2)),
            ceil_mode=draw(st.booleans()),
        )
        layers.append(pool)
    return nn.Sequential(*layers), groups * channels


@settings(deadline=None, max_examples=30)
@given(models(), st.integers(1, 4))
def test_stacked_models_have_the_gradients_of_single_ones(drawn, batch):
    model, channels = drawn
    check(model, channels, 9, batch)


def test_a_convolutional_model_copies_no_images_between_its_layers():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 9, 5),
    )
    recorded = check(model, 1, 12)
    copies = [node for node in recorded.graph.nodes if node.target is aten.clone.default]
    largest = max(node.meta["val"].numel() for node in copies)
    assert largest == COUNT * 4 * 16 * 9  # what the linear layer gets; the images have more
    rectified = [n for n in recorded.graph.nodes if n.target is aten.relu.default and n.users]
    assert [node.meta["val"].shape[-1] for node in rectified] == [6, 3]  # after the pools


def test_frozen_parameters_are_those_of_all_models():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2))
    for frozen in (["0.weight"], ["0.bias"], ["0.weight", "0.bias"], ["3.weight", "3.bias"]):
        check(model, 2, 8, frozen=frozen)


class Twice(nn.Module):
    """Uses the results of a ReLU in two ways."""

    def __init__(self, change):
        super().__init__()
        self.convolution, self.change = nn.Conv2d(2, 4, 3), change

    def forward(self, images):
        before = self.convolution(images)
        after = nn.functional.relu(before)
        if self.change:
            before = before.mul_(2.0)
        pooled = nn.functional.max_pool2d(after, 2, 2)
        return (pooled.sum((1, 2, 3)) + (after * before).sum((1, 2, 3))).tanh()


@pytest.mark.parametrize("change", [False, True])
def test_results_of_a_relu_that_are_used_elsewhere_too(change):
    if change:  # autograd refuses it for a single model, whose gradient needs the ReLU's input
        model = Twice(change)
        stacked = {n: torch.randn(COUNT, *p.shape) for n, p in model.named_parameters()}
        images = torch.randn(COUNT, 4, 2, 8, 8)

        def outputs(own, images):
            return torch.func.functional_call(model, own, images)

        with torch.no_grad():
            expected = torch.vmap(outputs)(stacked, images)
            with StackedChannels():
                found = torch.vmap(outputs)(stacked, images)
        torch.testing.assert_close(found, expected)
    else:
        check(Twice(change), 2, 8)


def test_a_maximum_keeps_nan_and_the_first_of_equal_values():
    inputs = torch.tensor([1.0, 1.0, 0.0, float("nan")]).repeat(COUNT, 2, 16, 4, 1)
    pool = torch.vmap(nn.MaxPool2d(2, stride=1, padding=1))
    gradient = torch.func.grad(lambda each: pool(each).square().nansum())
    expected = pool(inputs), gradient(inputs)
    with StackedChannels():
        found = pool(inputs), gradient(inputs)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_other_calls_are_those_of_pytorch():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding="same"), nn.AvgPool2d(2))
    check(model, 2, 8)
    pool = nn.MaxPool2d(2, return_indices=True)
    images = torch.randn(COUNT, 4, 2, 8, 8)
    with StackedChannels():
        found = torch.vmap(pool)(images)
        assert torch.equal(nn.functional.relu(input=images), images.relu())
    torch.testing.assert_close(found, torch.vmap(pool)(images))
