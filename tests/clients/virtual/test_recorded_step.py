"""Recorded steps compute the same after they were made faster."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from isthmus_clients.virtual.recorded_step import aten, simplified


def test_a_recorded_step_without_idle_operations_gives_the_same_bits():
    def step(inputs, weight):
        wide = torch.ops.aten.expand(torch.ops.aten.mul.Scalar(inputs, 1), [3, 4])
        return torch.ops.aten.view(wide, [3, 4]) @ weight, inputs * 2

    def careful(inputs, weight):
        return torch.ops.aten.mul.Scalar(inputs, 1).add_(1.0), inputs @ weight

    given = torch.randn(3, 4), torch.randn(4, 2)
    recorded = make_fx(step)(*given)
    expected, before = recorded(*given), len(recorded.graph.nodes)
    faster = simplified(recorded)
    assert before - len(faster.graph.nodes) == 3
    assert all(torch.equal(*pair) for pair in zip(faster(*given), expected, strict=True))
    kept = simplified(make_fx(careful)(*given))  # without its copy it would change its argument
    assert torch.equal(kept(*given)[1], given[0] @ given[1])


def gradients_of_stacks(model, count=3, shape=(4, 3, 8, 8)):
    """A recorded step: the gradients of `count` stacked models, and what it was recorded with."""
    stacked = {name: torch.randn(count, *part.shape) for name, part in model.named_parameters()}

    def loss(parameters, inputs):
        each = torch.vmap(lambda p, x: torch.func.functional_call(model, p, x).square().sum())
        return each(parameters, inputs).sum()

    def step(parameters, inputs):
        gradients = torch.func.grad(loss)(parameters, inputs)
        return {name: part.contiguous() for name, part in gradients.items()}

    given = stacked, torch.randn(count, *shape)
    return make_fx(step)(*given), given


def targets(recorded):
    return [node.target for node in recorded.graph.nodes]


@pytest.mark.parametrize("channels", [1, 16])
def test_the_gradients_of_a_convolutional_model_are_the_same(channels):
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9 * channels, 5)
    )
    recorded, given = gradients_of_stacks(model)
    expected = recorded(*given)
    assert aten.max_pool2d_with_indices.default in targets(recorded)
    faster = simplified(recorded)
    assert aten.max_pool2d_with_indices.default not in targets(faster)
    for name, gradient in faster(*given).items():
        assert gradient.is_contiguous()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-3)


def test_a_maximum_keeps_nan_and_the_first_of_equal_values():
    pool = nn.MaxPool2d(2, stride=1, padding=1, return_indices=True)
    inputs = torch.tensor([1.0, 1.0, 0.0, float("nan")]).repeat(2, 16, 4, 1)
    recorded = make_fx(lambda each: pool(each))(inputs)
    expected = recorded(inputs)
    torch.testing.assert_close(simplified(recorded)(inputs), expected, equal_nan=True)


def test_the_gradient_of_a_linear_layer_is_not_copied():
    recorded, given = gradients_of_stacks(nn.Sequential(nn.Linear(8, 5, bias=False)), shape=(4, 8))
    expected = recorded(*given)
    assert aten.clone.default in targets(recorded)
    faster = simplified(recorded)
    assert aten.clone.default not in targets(faster)
    torch.testing.assert_close(faster(*given), expected)


def test_a_product_that_is_used_twice_is_copied():
    def step(left, right):
        product = torch.bmm(left, right).transpose(1, 2)
        return product.contiguous(), product + 1

    given = torch.randn(3, 2, 4), torch.randn(3, 4, 5)
    recorded = make_fx(step)(*given)
    expected = recorded(*given)
    torch.testing.assert_close(simplified(recorded)(*given), expected)
