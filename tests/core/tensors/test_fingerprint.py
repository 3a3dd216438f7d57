"""Fingerprints find frozen parameters that differ between participants."""

import pytest
import torch
from torch import nn

from isthmus.tensors.fingerprint import explain_change, explain_difference, fingerprint
from isthmus.transport.requests import fingerprint_messages, fingerprint_of


def sent_fingerprint(model):
    """The fingerprint of a model as another participant receives it."""
    return fingerprint_of(fingerprint_messages(fingerprint(model)))


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


def test_models_that_differ_in_the_last_digits_have_equal_fingerprints():
    there = sent_fingerprint(adapted())
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
def test_a_changed_frozen_parameter_is_named(change):
    here = adapted()
    here["base"].weight.mul_(change)
    difference = explain_difference(here, sent_fingerprint(adapted()))
    assert difference.startswith(
        "the frozen parameter 'base.weight' has other values here than there"
    )


def test_trained_parameters_may_differ():
    here = adapted()
    nn.init.zeros_(here["adapter"].weight)
    assert explain_difference(here, sent_fingerprint(adapted())) is None


def test_a_parameter_frozen_on_one_side_only_is_named():
    here = adapted()
    here["scale"].requires_grad_(True)
    difference = explain_difference(here, sent_fingerprint(adapted()))
    assert difference == "parameter 'scale.weight' is frozen there and not here"


def test_an_empty_fingerprint_matches_every_model():
    assert explain_difference(adapted(1), {}) is None


def test_a_parameter_that_training_freezes_is_named():
    model = adapted()
    before = fingerprint(model)
    assert explain_change(model, before) is None
    model["adapter"].bias.requires_grad_(False)
    assert explain_change(model, before).startswith("training froze 'adapter.bias', ")


def test_values_of_parameters_with_more_elements_than_float32_can_count_are_taken():
    """Such as the embedding of a language model; here all elements are one in memory."""
    for count in (2**24, 2**24 + 2, 131_072 * 520, 128_256 * 4096):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(1).expand(count), requires_grad=False)
        assert fingerprint(model) == {"weight": [1.0] * 16}
