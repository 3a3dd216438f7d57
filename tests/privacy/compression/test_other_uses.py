"""Codecs for the changes of the model, and for what datacenters send."""

import pytest
import torch
from tests.docs.test_extend import example
from tests.outside_package import OutsidePackage

from isthmus.errors import JobError, UpdateError
from isthmus.job import parse_job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.compression.block_top_k import BlockTopK
from isthmus_privacy.compression.changes import changes_codec
from isthmus_privacy.compression.model_change import ChangeCodec
from isthmus_privacy.compression.single_updates import DatacenterMessages

LAYOUT = TensorLayout.from_shapes({"weight": (70, 70), "mean": (2,)}, statistics=["mean"])

BAD = """
import torch


class Bad:
    is_deterministic = True

    def __init__(self, choice):
        self.kind = choice.settings.get("kind")

    def max_bytes(self, size):
        return 8

    def encode(self, values, facts):
        return bytes(9 if self.kind == "long" else 1)

    def decode(self, payload, facts):
        return torch.full((facts.size,), float("inf"))


class Undecided(Bad):
    is_deterministic = False
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    half = {"isthmus.update_codecs/half": "HalfPrecision"}
    bad = {"isthmus.update_codecs/bad": "Bad", "isthmus.update_codecs/undecided": "Undecided"}
    first = OutsidePackage(tmp_path / "half", "outside_half", example("HalfPrecision"), half)
    second = OutsidePackage(tmp_path / "bad", "bad_codecs", BAD, bad)
    with first.on_path(monkeypatch), second.on_path(monkeypatch):
        yield


def vectors(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYOUT.size, generator=generator) for _ in range(2)]


def datacenters(**compression):
    table = ",".join(f"{name}={value!r}" for name, value in compression.items())
    policy = 'strategy.policy="datacenter"'
    text = 'name = "table"\n[task]\nsource = "task.py:Learn"'
    job = parse_job(text, [policy, f"datacenter.compression={{{table}}}"])
    return DatacenterMessages.of(job, LAYOUT)


def test_a_change_leads_to_the_same_model_everywhere(installed, make_job):
    server, device = (
        changes_codec(make_job("federated.download_codec=half"), LAYOUT) for _ in range(2)
    )
    before, after = vectors()
    payload = server.encode(before, after)
    assert len(payload) == server.nbytes == 8 + 2 * 4900 + 8
    ends = []
    for codec in (server, device):
        model = before.clone()
        assert codec.apply(model, bytes(payload) + b"the next change") == len(payload)
        ends.append(model)
    assert torch.equal(*ends)
    expected = before + (after - before).half().float()
    assert torch.equal(ends[0][:4900], expected[:4900])
    assert torch.equal(ends[0][4900:], after[4900:])


def test_download_bits_is_the_codec_rounded(make_job):
    codec = changes_codec(make_job("federated.download_bits=3"), LAYOUT)
    assert codec == ChangeCodec(LAYOUT.size, LAYOUT.trained_size, 3)


@pytest.mark.parametrize("cut", [3, 8, 100])
def test_a_change_that_was_cut_short_is_refused(installed, make_job, cut):
    codec = changes_codec(make_job("federated.download_codec=half"), LAYOUT)
    payload = codec.encode(*vectors())
    with pytest.raises(ValueError, match="bytes came"):
        codec.apply(torch.zeros(LAYOUT.size), payload[:cut])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["federated.download_codec=undecided"], r"the same bits on every processor"),
        (["federated.download_codec=bad", "federated.download_bits=3"], r"remove one of them"),
        (["federated.download_codec_settings={a=1}"], r"no effect without download_codec"),
        (["federated.download_codec=bad", "federated.mode=buffered"], r"needs mode = 'rounds'"),
    ],
)
def test_a_codec_that_cannot_be_used_for_downloads_is_refused(
    installed, make_job, overrides, sentence
):
    with pytest.raises(JobError, match=sentence):
        changes_codec(make_job(*overrides), LAYOUT)


def test_a_codec_that_fails_on_a_change_is_named(installed, make_job):
    settings = "federated.download_codec_settings={kind='long'}"
    codec = changes_codec(make_job("federated.download_codec=bad", settings), LAYOUT)
    with pytest.raises(UpdateError, match=r"download_codec='bad' encoded 9 bytes where it says 8"):
        codec.encode(*vectors())
    codec = changes_codec(make_job("federated.download_codec=bad"), LAYOUT)
    model = torch.zeros(LAYOUT.size)
    with pytest.raises(UpdateError, match="a change to a model that is not finite"):
        codec.apply(model, codec.encode(*vectors()))
    assert not model.any()  # as it was


def test_block_top_k_has_the_bytes_that_it_had(installed):
    messages = datacenters(keep=64)
    update, _ = vectors()
    blocks = BlockTopK.of(LAYOUT, 64)
    left = update.clone()
    payload = messages.encode(left, 1)
    expected = update.clone()
    assert payload == blocks.encode(expected)
    assert torch.equal(left, expected)
    assert torch.equal(messages.decode(payload, 1), blocks.decode(payload))


def test_what_a_datacenters_codec_takes_away_is_left(installed):
    messages = datacenters(codec="half")
    update, _ = vectors()
    left = update.clone()
    payload = messages.encode(left, 1)
    sent = messages.decode(payload, 1)
    assert torch.equal(sent[:4900], update[:4900].half().float())
    assert torch.equal(sent[4900:], update[4900:])
    assert torch.equal(left, update - sent)
    with pytest.raises(UpdateError, match=r"has 9809 bytes where this exchange set takes at most"):
        messages.check_size(len(payload) + 1)
    with pytest.raises(UpdateError, match=r"compression\.codec='half' cannot decode it"):
        messages.decode(payload[:-1], 1)


def test_a_datacenters_update_has_to_be_finite(installed):
    update = torch.full((LAYOUT.size,), float("nan"))
    with pytest.raises(UpdateError, match="the update is not finite"):
        datacenters(codec="half").encode(update, 1)
    with pytest.raises(UpdateError, match="its compressed update is not finite"):
        datacenters(codec="bad").decode(bytes(9), 1)


@pytest.mark.parametrize(
    ("compression", "sentence"),
    [
        ({"codec": "half", "keep": 32}, "keep has no effect on codec='half'"),
        ({"settings": {}, "keep": 5000}, "keep=5000"),
    ],
)
def test_keys_without_effect_are_refused(compression, sentence):
    with pytest.raises(JobError, match=sentence):
        datacenters(**compression)
