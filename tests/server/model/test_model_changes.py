"""Rounded changes of the global model, which devices with an earlier model can apply."""

import pytest
import torch

from isthmus.errors import UpdateError
from isthmus.job import ServerOptimizer
from isthmus.task import load_task
from isthmus.transport.blobs import describe
from isthmus_privacy.compression.model_change import ChangeCodec
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.model.model_changes import MAX_CHANGES


@pytest.fixture
def make_model(write_task, tmp_path):
    def make(bits=3, lr=1.0):
        write_task("pass")
        task = load_task("task.py:Learn", {}, base=tmp_path)
        optimizer = ServerOptimizer(name="SGD", options={"lr": lr, "momentum": 0.5})
        model = GlobalModel(task, 0, optimizer)
        if bits is not None:
            model.round_changes(ChangeCodec(model.layout.size, model.layout.trained_size, bits))
        return model

    return make


def gradients(model, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(model.layout.size, generator=generator) for _ in range(count)]


def test_a_device_computes_the_models_of_later_rounds_bit_for_bit(make_model):
    model = make_model()
    codec = ChangeCodec(model.layout.size, model.layout.trained_size, 3)
    earlier = [bytes(model.payload)]
    for number, gradient in enumerate(gradients(model, 7), 1):
        model.step(gradient)
        offers = model.offered_changes
        assert len(offers) == min(number, MAX_CHANGES)
        for offer, payload in zip(offers, reversed(earlier), strict=False):
            assert offer.message.base == describe(payload).sha256
            assert offer.message.blob == describe(offer.payload)
            device = bytearray(payload)
            rest = memoryview(offer.payload)
            while rest:
                rest = rest[codec.apply(model.layout.decode(device), rest) :]
            assert device == model.payload
        earlier.append(bytes(model.payload))


def test_what_rounding_takes_away_is_not_lost(make_model):
    rounded, exact = make_model(bits=2, lr=0.01), make_model(bits=None, lr=0.01)
    for gradient in gradients(rounded, 200):
        rounded.step(gradient.clone())
        exact.step(gradient.clone())
    moved = (exact.vector - exact.initial()).norm()
    assert float((rounded.vector - exact.vector).norm()) < 0.2 * float(moved)
    assert exact.offered_changes == []


def test_a_model_that_was_replaced_is_sent_whole(make_model):
    model = make_model()
    first, second = gradients(model, 2)
    model.step(first)
    model.replace(torch.zeros(model.layout.size))
    assert model.offered_changes == []
    fresh = make_model()
    fresh.replace(torch.zeros(model.layout.size))
    for each in (model, fresh):
        each.reset_optimizer()
        each.step(second.clone())
    # What the model lacked before it was replaced is not added to the new one.
    assert model.sha256 == fresh.sha256
    assert len(model.offered_changes) == 1


def test_a_restarted_server_continues_with_the_same_models(make_model):
    whole = make_model()
    first, second, third = gradients(whole, 3)
    whole.step(first.clone())
    whole.step(second.clone())
    tensors, numbers = whole.optimizer_state()
    stored = {name: tensor.clone() for name, tensor in tensors.items()}
    again = make_model()
    again.replace(whole.vector)
    again.load_optimizer_state(stored, numbers)
    assert again.offered_changes == []  # devices receive the whole model once
    for each in (whole, again):
        each.step(third.clone())
    assert again.sha256 == whole.sha256


def test_a_step_to_a_model_that_is_not_finite_is_refused_as_without_changes(make_model):
    model = make_model()
    with pytest.raises(UpdateError, match="not finite"):
        model.step(torch.full((model.layout.size,), float("inf")))
