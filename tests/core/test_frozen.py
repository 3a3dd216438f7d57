"""What is not exchanged is compared when a run is opened."""

import pytest
import torch
from torch import nn

from isthmus.tensors.fingerprint import explain_difference, received, sent


def adapted(seed=0):
    """Two frozen layers and an adapter that is trained."""
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "base": nn.Linear(40, 50),
            "scale": nn.Linear(1, 1, bias=False),
            "adapter": nn.Linear(5, 5),
        }
    )
    for name in ("base", "scale"):
        model[name].requires_grad_(False)
    return model


def test_the_same_everywhere_but_for_the_last_digits():
    there = received(sent(adapted()))
    assert {name: len(values) for name, values in there.items()} == {
        "base.bias": 16,
        "base.weight": 16,
        "scale.weight": 1,
    }
    here = adapted()
    here["base"].weight.mul_(1 + 1e-6)
    assert explain_difference(here, there) is None
    assert explain_difference(adapted().to(torch.float64), there) is None


@pytest.mark.parametrize("change", [1.01, float("nan")])
def test_another_base_has_other_values(change):
    here = adapted()
    here["base"].weight.mul_(change)
    said = explain_difference(here, received(sent(adapted())))
    assert said.startswith("the frozen parameter 'base.weight' has other values here than there")


def test_what_is_trained_may_differ():
    here = adapted()
    nn.init.zeros_(here["adapter"].weight)
    assert explain_difference(here, received(sent(adapted()))) is None


def test_what_is_frozen_on_one_side_only():
    here = adapted()
    here["scale"].requires_grad_(True)
    said = explain_difference(here, received(sent(adapted())))
    assert said == "parameter 'scale.weight' is frozen there and not here"


def test_a_server_that_says_nothing_of_it_is_believed():
    assert explain_difference(adapted(1), {}) is None
