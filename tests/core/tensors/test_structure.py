"""What a model consists of must not change while it runs."""

import pytest
import torch
from torch import nn

from isthmus.tensors.structure import Structure


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.tied = self.body
        self.register_buffer("late", None)


def changed(change):
    model = Net()
    structure = Structure.of(model)
    change(model)
    return structure.explain_change(model)


def put(name, tensor):
    return lambda model: setattr(model, name, tensor)


def untie(model):
    model.tied = nn.Linear(2, 4)


CHANGES = {
    "added the parameter 'head.weight', which would be trained on one participant only": (
        lambda model: model.add_module("head", nn.Linear(4, 2))
    ),
    "removed the parameter 'frozen', which others have": lambda model: delattr(model, "frozen"),
    "put another parameter in the place of 'frozen'": put("frozen", nn.Parameter(torch.ones(4))),
    "put another parameter in the place of 'tied.weight'": untie,
    "changed the shape of the parameter 'frozen' from (4,) to (2,)": (
        lambda model: setattr(model.frozen, "data", torch.ones(2))
    ),
    "changed the dtype of the parameter 'body.weight' from torch.float32 to torch.float16": (
        lambda model: model.body.half()
    ),
    "unfroze the parameter 'frozen', which is not exchanged": (
        lambda model: model.frozen.requires_grad_(True)
    ),
    "removed or reshaped the running statistics 'norm.running_mean'": (
        lambda model: setattr(model.norm, "running_mean", torch.zeros(1))
    ),
    "added the buffer 'table', which would be missing from the model": (
        lambda model: model.register_buffer("table", torch.ones(2))
    ),
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_the_first_change_is_named(sentence):
    assert changed(CHANGES[sentence]).startswith(f"running the model {sentence}")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.init.zeros_(model.body.weight),
        lambda model: model.register_buffer("cache", torch.ones(2), persistent=False),
        put("late", torch.ones(3)),
        lambda model: model.norm.running_mean.add_(1),
        lambda model: model.body.weight.requires_grad_(False),  # see `fingerprint.explain_change`
        lambda model: setattr(model, "activation", nn.ReLU()),
    ],
)
def test_values_caches_and_modules_without_tensors_may_change(change):
    assert changed(change) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_understood():
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    structure = Structure.of(model)
    model(torch.ones(4, 2)).sum().backward()
    assert structure.explain_change(model) is None
