"""Which tensors are exchanged, which stay on devices, and which are frozen."""

import pytest
import torch
from torch import nn

from isthmus.errors import JobError
from isthmus.job.exchange import ExchangeSection
from isthmus.tensors.division import divide
from isthmus.tensors.exchange_set import TensorLayout

AFFINE = ("1.bias", "1.weight")
STATISTICS = ("1.running_mean", "1.running_var")


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def division(on_device=False, **keys):
    built = model()
    return built, divide(built, ExchangeSection(**keys), on_device=on_device)


def trained(module):
    return {name for name, each in module.named_parameters() if each.requires_grad}


def test_without_keys_everything_is_exchanged():
    built, divided = division()
    assert divided.exchanged == TensorLayout.of(model())
    assert divided.personal.size == 0
    assert len(trained(built)) == 6


def test_what_is_not_included_is_frozen_with_its_statistics():
    built, divided = division(include=["2.*"])
    assert divided.exchanged.names == ("2.bias", "2.weight")
    assert trained(built) == {"2.bias", "2.weight"}
    built.train()
    built(torch.randn(4, 2))
    assert built[1].running_mean.eq(0).all()


def test_exclude_wins():
    built, divided = division(on_device=True, include=["*"], personal=["2.*"], exclude=["*.bias"])
    assert divided.personal.names == ("2.weight",)
    assert not [name for name in divided.exchanged.names if name.endswith("bias")]
    assert trained(built) == {"0.weight", "1.weight", "2.weight"}


def test_personal_parameters_are_trained_on_devices_only():
    assert "2.weight" not in trained(division(personal=["2.*"])[0])
    built, divided = division(on_device=True, personal=["2.*"])
    assert trained(built) == trained(model())
    assert divided.personal.names == ("2.bias", "2.weight")


def test_local_buffers_are_whole_normalisation_layers():
    """As in FedBN: their parameters and their statistics."""
    _, divided = division(buffers="local")
    assert divided.personal.names == AFFINE + STATISTICS
    assert divided.personal.statistics == STATISTICS
    assert divided.exchanged.names == ("0.bias", "0.weight", "2.bias", "2.weight")


@pytest.mark.parametrize("key", ["include", "exclude", "personal"])
def test_a_pattern_that_matches_nothing_is_refused(key):
    with pytest.raises(JobError, match=rf"^exchange.{key}: 'hed\.\*' matches no trainable"):
        division(**{key: ["2.*", "hed.*"]})


def test_divisions_that_cannot_hold_are_refused():
    with pytest.raises(JobError, match="divide the running mean and variance of '1'"):
        division(personal=["1.running_mean"])
    with pytest.raises(JobError, match="leaves no parameter to exchange"):
        division(personal=["*.weight", "*.bias"])
    with pytest.raises(JobError, match="this model has none"):
        divide(nn.Linear(2, 2), ExchangeSection(buffers="local"))
