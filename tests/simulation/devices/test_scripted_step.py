"""Recorded steps that run without Python between their operations, with the same bits."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from isthmus_simulation.devices.stacks.recorded_step import descent, simplified
from isthmus_simulation.devices.stacks.scripted_step import scripted

MODELS = {
    "perceptron": nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3)),
    "convolutional": nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ),
    "random": nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)),
}


def step_of(model, count=3):
    """A step that changes stacked parameters, and its arguments."""
    stacked = {name: torch.randn(count, *part.shape) for name, part in model.named_parameters()}
    inputs, targets = torch.randn(count, 4, 1, 8, 8), torch.randint(3, (count, 4))

    def loss(parameters, inputs, targets):
        output = torch.func.functional_call(model, parameters, inputs)
        examples = nn.functional.cross_entropy(output, targets, reduction="none")
        return examples.sum(), examples

    def step(*arguments):
        parameters = dict(zip(stacked, arguments, strict=False))
        each = torch.vmap(torch.func.grad(loss, has_aux=True), randomness="different")
        gradients, examples = each(parameters, *arguments[len(stacked) :])
        return *(gradients[name].contiguous() for name in stacked), examples

    tensors = *stacked.values(), inputs, targets
    recorded = descent(simplified(make_fx(step)(*tensors)), len(stacked))
    return recorded, (*tensors, *[-0.1] * len(stacked))


def after(step, arguments):
    """Its results, and what it has left in its arguments."""
    own = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    torch.manual_seed(7)
    with torch.no_grad():
        results = step(*own)
    return [*results, *(each for each in own if isinstance(each, torch.Tensor))]


@pytest.mark.parametrize("name", MODELS)
def test_a_scripted_step_computes_the_same_bits_also_with_other_numbers(name):
    recorded, arguments = step_of(MODELS[name])
    script = scripted(recorded, arguments)
    assert script is not recorded
    other = [
        each * 2 if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in arguments
    ]
    other[-1] = -0.25
    for given in (arguments, other):
        for one, same in zip(after(script, given), after(recorded, given), strict=True):
            assert torch.equal(one, same)


def test_a_step_with_whole_numbers_stays_in_python():
    recorded, arguments = step_of(MODELS["perceptron"])
    whole = [each if isinstance(each, torch.Tensor) else -1 for each in arguments]
    assert scripted(recorded, whole) is recorded


def test_the_arguments_of_the_comparison_stay_as_they_are():
    recorded, arguments = step_of(MODELS["perceptron"])
    before = [each.clone() for each in arguments if isinstance(each, torch.Tensor)]
    state = torch.random.get_rng_state()
    scripted(recorded, arguments)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(map(torch.equal, before, arguments))


def test_a_step_that_cannot_be_scripted_stays_in_python():
    recorded = make_fx(lambda x: (x + 1,))(torch.ones(2))

    def twice(x, *rest):
        return 2 * x

    next(n for n in recorded.graph.nodes if n.op == "call_function").target = twice
    recorded.recompile()
    assert scripted(recorded, (torch.ones(2),)) is recorded


def test_the_error_of_an_operation_is_that_of_pytorch():
    recorded = make_fx(lambda x, k: (x.gather(0, k),))(torch.ones(2), torch.tensor([1]))
    arguments = torch.ones(2), torch.tensor([1])
    script = scripted(recorded, arguments)
    assert script is not recorded
    with pytest.raises(RuntimeError, match=r"^index 7 is out of bounds for .* size 2$"):
        script(torch.ones(2), torch.tensor([7]))


def test_a_step_of_many_operations_stays_in_python():
    def many(x):
        for number in range(250):
            x = x * (1 + number)
        return (x,)

    recorded = make_fx(many)(torch.ones(2))
    assert scripted(recorded, (torch.ones(2),)) is recorded


def test_a_script_with_other_bits_is_not_used(monkeypatch):
    recorded = make_fx(lambda x: (x + 1,))(torch.ones(2))
    monkeypatch.setattr(
        "isthmus_simulation.devices.stacks.scripted_step._script", lambda *_: lambda x: (x + 2,)
    )
    assert scripted(recorded, (torch.ones(2),)) is recorded
