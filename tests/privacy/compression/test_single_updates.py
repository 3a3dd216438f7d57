"""Messages with encoded single updates: what comes back, and what is refused."""

import pytest
import torch
from tests.outside_package import OutsidePackage

from isthmus.errors import JobError, UpdateError, UserError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.compression.codecs import load_codec
from isthmus_privacy.compression.single_updates import UpdateMessages

LAYOUT = TensorLayout.from_shapes({"mean": (2,), "weight": (70, 70)}, statistics=["mean"])

OUTSIDE = """
import torch


class Odd:
    def __init__(self, choice):
        self.kind = choice.settings["kind"]

    def max_bytes(self, size):
        return 4 * size

    def encode(self, values, facts):
        return b"" if self.kind != "encode" else 1 / 0

    def decode(self, payload, facts):
        return torch.zeros(facts.size + 1) if self.kind == "shape" else {}[self.kind]


def number(choice):
    return 7
"""


def messages(make_job, codec, **settings):
    table = ",".join(f"{name}={value!r}" for name, value in settings.items())
    job = make_job(f"federated.codec={codec}", f"federated.codec_settings={{{table}}}")
    return UpdateMessages.of(job, LAYOUT)


def update():
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("codec", "settings", "error", "share"),
    [
        ("rounded", {}, 0.02, 0.26),
        ("rounded", {"bits": 4}, 0.2, 0.14),
        ("block-top-k", {"keep": 2048}, 0.5, 0.1),
    ],
)
def test_an_update_comes_back_nearly_and_its_statistics_exactly(
    make_job, codec, settings, error, share
):
    codec = messages(make_job, codec, **settings)
    original = update()
    message = codec.encode(original.clone(), 3)
    assert len(message) <= codec.max_bytes
    assert len(message) - len(LAYOUT.header) - 8 < share * 4 * LAYOUT.size
    decoded = codec.decode(memoryview(message), 3)
    trained = LAYOUT.trained_size
    assert torch.equal(decoded[trained:], original[trained:])
    lost = (decoded - original)[:trained].norm() / original[:trained].norm()
    assert lost < error


@pytest.mark.parametrize("codec", ["rounded", "block-top-k"])
def test_other_bytes_are_refused(make_job, codec):
    codec = messages(make_job, codec)
    message = codec.encode(update(), 1)
    other = bytearray(message)
    other[0] ^= 1
    for wrong, sentence in [
        (other, r"it is not an encoded update of this exchange set"),
        (message[:10], r"it is not an encoded update of this exchange set"),
        (message[:-1], r"federated\.codec='[a-z-]+' cannot decode it: .* bytes"),
        (message + b"\0", r"federated\.codec='[a-z-]+' cannot decode it: .* bytes"),
    ]:
        with pytest.raises(UpdateError, match=sentence):
            codec.decode(memoryview(bytes(wrong)), 1)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("encode", r"federated\.codec='odd' cannot encode the update: ZeroDivisionError"),
        ("decode", r"federated\.codec='odd' cannot decode it: KeyError: 'decode'"),
        ("shape", r"federated\.codec='odd' decoded no vector of 4900 elements"),
    ],
)
def test_a_codec_that_breaks_its_contract_is_named(make_job, tmp_path, monkeypatch, kind, sentence):
    entries = {"isthmus.update_codecs/odd": "Odd"}
    with OutsidePackage(tmp_path, "odd_codecs", OUTSIDE, entries).on_path(monkeypatch):
        codec = messages(make_job, "odd", kind=kind)
        with pytest.raises(UpdateError, match=sentence):
            codec.decode(memoryview(codec.encode(update(), 1)), 1)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["federated.codec=ruonded"], r"codec='ruonded' is unknown; did you mean rounded\?"),
        (["federated.codec=rounded", "federated.codec_settings.bits=9"], r"codec_settings\.bits=9"),
        (
            ["federated.codec=number"],
            r"'number' is not a codec for single updates: it has no max_bytes\(\)",
        ),
    ],
)
def test_a_codec_that_cannot_be_used_is_reported(
    make_job, tmp_path, monkeypatch, overrides, sentence
):
    entries = {"isthmus.update_codecs/number": "number"}
    package = OutsidePackage(tmp_path, "no_codecs", OUTSIDE, entries)
    with package.on_path(monkeypatch), pytest.raises(UserError, match=sentence):
        load_codec(make_job(*overrides).federated.update_codec)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["federated.secure_aggregation=true"],
            r"codec='rounded' encodes single updates, and federated\.secure_aggregation is on",
        ),
        (["federated.mode=buffered"], r"codec='rounded' needs mode = 'rounds' and no flower"),
        (["federated.flower.strategy.name=FedAvg"], r"needs mode = 'rounds' and no flower"),
        (
            ["privacy={mechanism='gaussian', epsilon=8.0, delta=1e-6}"],
            r"federated\.codec='rounded' encodes updates after they are clipped",
        ),
    ],
)
def test_where_a_codec_cannot_work_the_job_is_refused(make_job, overrides, sentence):
    with pytest.raises(JobError, match=sentence):
        make_job("federated.codec=rounded", *overrides)
