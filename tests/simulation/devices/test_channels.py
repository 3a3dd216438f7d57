"""Convolutions and pools of stacked models are those of each model alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from isthmus import Task
from isthmus_simulation.devices.stacks.channels import StackedChannels
from isthmus_simulation.devices.stacks.gradients import Gradients

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


class Model(nn.Module):
    """Two convolutions, around what a test does."""

    def __init__(self, between, is_frozen=False):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 2)
        self.norm, self.between = nn.GroupNorm(2, 4), between
        self.first.requires_grad_(not is_frozen)

    def forward(self, images):
        return self.second(self.between(self, self.first(images)))


class Squares(Task):
    """The loss is the mean square of the results; nothing else of the task is used."""

    def model(self):
        raise NotImplementedError

    def local_data(self, participant):
        raise NotImplementedError

    def optimizer(self, parameters, participant):
        raise NotImplementedError

    def loss(self, output, target):
        return output.reshape(len(output), -1).square().mean(1)


def is_by_channels(model):
    """Whether a step of the model is recorded so, after it was checked."""
    gradients = Gradients(Squares({}), model)
    stacked = {
        name: part.detach().expand(COUNT, *part.shape).clone()
        for name, part in model.named_parameters()
        if part.requires_grad
    }
    images, targets = torch.randn(1, COUNT, 4, 2, 6, 6), torch.zeros(1, COUNT, 4)
    weights = torch.full((1, COUNT, 4), 0.25)
    gradients.check(1, stacked, images, targets, weights)
    return gradients._by_channels


def pooled(images):
    return functional.max_pool2d(images, 2)


def changed_in_place(model, images):
    return pooled(images.relu().add_(1.0))


def changed_result(model, images):
    rectified = functional.relu(images)
    rectified += 1.0
    return pooled(rectified)


def changed_source(model, images):
    rectified = functional.relu(images)
    images.mul_(2.0)
    return pooled(rectified)


def without_gradient(model, images):
    with torch.no_grad():
        rectified = functional.relu(images)
    return pooled(rectified) + pooled(images)


def with_a_hook(model, images):
    rectified = functional.relu(images)
    if rectified.requires_grad:
        rectified.register_hook(lambda gradient: 2.0 * gradient)
    return pooled(rectified)


def used_twice(model, images):
    rectified = functional.relu(images)
    return pooled(rectified) + (rectified * images).sum((2, 3), keepdim=True)


def viewed(model, images):
    flat = pooled(functional.relu(images)).view(len(images), -1)
    return flat.tanh().view(len(images), 4, 3, 3)


def normalised(model, images):
    return pooled(functional.relu(model.norm(images)))


def of_each_image(model, images):
    return torch.vmap(lambda image: model.first(image[None, :2])[0])(images)


@pytest.mark.parametrize(
    "between", [without_gradient, used_twice, viewed, normalised, of_each_image]
)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_models_of_many_kinds_are_computed_by_channels(between, is_frozen):
    assert is_by_channels(Model(between, is_frozen))


@pytest.mark.parametrize("between", [changed_in_place, changed_result, changed_source])
def test_a_pool_sees_what_has_changed_since_the_relu(between):
    assert is_by_channels(Model(between, is_frozen=True))


def by_derivatives(model, images):
    def energy(each):
        return functional.max_pool2d(functional.relu(each), 2).square().sum()

    steps = torch.func.grad(lambda each: torch.func.grad(energy)(each).square().sum())(images)
    return pooled(images + steps)


def test_second_derivatives_are_recorded_by_the_rules_of_pytorch():
    assert not is_by_channels(Model(by_derivatives))


def test_a_hook_of_a_relu_is_called():
    is_by_channels(Model(with_a_hook))  # refuses another gradient than that of a model alone


def test_another_gradient_records_the_step_by_the_rules_of_pytorch():
    def hidden(model, images):
        rectified = functional.relu(images)
        images.data.mul_(2.0)  # which PyTorch does not count as a change
        return pooled(rectified)

    assert not is_by_channels(Model(hidden, is_frozen=True))


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
