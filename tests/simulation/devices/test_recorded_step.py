"""Recorded steps compute the same after they were made faster."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from isthmus_simulation.devices.stacks.recorded_step import aten, descent, simplified, step_bytes


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
    faster = simplified(recorded)
    for name, gradient in faster(*given).items():
        assert gradient.is_contiguous()
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-3)


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


CLASSIFIER = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3, bias=False))


class Factors(nn.Module):
    """Its gradients are products with parameters, and one parameter is used twice."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        self.first, self.second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, inputs):
        twice = inputs @ self.down @ self.up @ self.down @ self.up
        return twice + self.first + self.second + (self.first * self.second).sum()


def recorded_loss(model, *, weights=None, count=3):
    """A recorded step with flat arguments and results: gradients of `count` models, and losses."""
    names = [name for name, _ in model.named_parameters()]
    parameters = [torch.randn(count, *part.shape) for part in model.parameters()]
    inputs, target = torch.randn(count, 5, 8), torch.randint(0, 3, (count, 5))

    def each(parameters, inputs, target):
        output = torch.func.functional_call(
            model, dict(zip(names, parameters, strict=True)), inputs
        )
        losses = nn.functional.cross_entropy(output, target, weight=weights, reduction="none")
        return losses.reshape(len(inputs), -1).mean(1)

    def step(*arguments):
        def loss(parameters):
            losses = torch.vmap(each)(parameters, *arguments[-2:])
            return losses.mean(1).sum(), losses

        gradients, losses = torch.func.grad(loss, has_aux=True)(list(arguments[:-2]))
        return *(gradient.contiguous() for gradient in gradients), losses

    given = *parameters, inputs, target
    return make_fx(step)(*given), given


@pytest.mark.parametrize("weights", [None, torch.arange, torch.ones])
@pytest.mark.parametrize("model", [CLASSIFIER, Factors()])
def test_a_step_with_a_loss_has_the_same_results_from_fewer_calls(model, weights):
    classes = 3 if model is CLASSIFIER else 8
    of_classes = None if weights is None else weights(classes).float()
    recorded, given = recorded_loss(model, weights=of_classes)
    expected, before = recorded(*given), len(recorded.graph.nodes)
    faster = simplified(recorded)
    torch.testing.assert_close(faster(*given), expected)
    if model is CLASSIFIER and weights is None:
        assert len(faster.graph.nodes) < 0.7 * before


def test_results_share_no_memory_that_somebody_may_change():
    def step(left, right):
        doubled = left * 2
        zeros = torch.zeros_like(left)
        return doubled, left * 2, right.view(-1), zeros, zeros.view(-1), doubled.view(-1)

    given = torch.ones(2, 3), torch.ones(2, 3)
    faster = simplified(make_fx(step)(*given))
    first = faster(*given)
    for result in first:
        result.add_(5)
    again = faster(*given)
    expected = step(torch.ones(2, 3), torch.ones(2, 3))
    torch.testing.assert_close(again, expected)
    assert all(torch.equal(each, torch.ones(2, 3)) for each in given)
    assert all(float(each.min()) > 4 for each in first)


def test_random_numbers_are_drawn_anew():
    def step(inputs):
        return inputs * torch.rand(3), inputs * torch.rand(3), torch.rand_like(torch.ones(3))

    recorded = simplified(make_fx(step)(torch.ones(3)))
    drawn = [*recorded(torch.ones(3)), *recorded(torch.ones(3))]
    assert len({tuple(each.tolist()) for each in drawn}) == 6


@pytest.mark.parametrize("model", [CLASSIFIER, Factors()])
def test_a_descent_subtracts_what_the_gradients_are(model):
    recorded, given = recorded_loss(model)
    *gradients, losses = recorded(*given)
    rates = [0.1 * (number + 1) for number in range(len(gradients))]
    expected = [
        parameter - rate * gradient
        for parameter, rate, gradient in zip(given, rates, gradients, strict=False)
    ]
    step = descent(simplified(recorded), len(gradients))
    fused = targets(step).count(aten.baddbmm_.default)
    assert fused == (2 if model is CLASSIFIER else 0)  # its factors are parameters that change
    changed = [each.clone() for each in given]
    (found,) = step(*changed, *(-rate for rate in rates))
    torch.testing.assert_close(found, losses)
    torch.testing.assert_close(changed[: len(gradients)], expected)


def test_the_bytes_of_a_step_are_those_that_exist_at_the_same_time():
    def step(inputs):
        wide = inputs.unsqueeze(1).expand(100, 50, 100).exp()  # 2 MB
        narrow = wide.sum(1)
        return narrow.view(-1) * 2, narrow.neg()

    recorded = make_fx(step)(torch.randn(100, 100))
    assert step_bytes(recorded) == 4 * (100 * 100 + 100 * 50 * 100 + 100 * 100)
