"""Codecs of secure sums from a package: what devices agree on, what is summed, what is refused."""

import dataclasses
import re

import pytest
import torch
from tests.docs.test_extend import example
from tests.outside_package import OutsidePackage
from tests.privacy.protocol import make_config

from isthmus.errors import JobError, PeerMisbehaved, UpdateError, UserError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_privacy.compression import sum_codecs
from isthmus_privacy.compression.sum_codecs import check_sums, sum_codec
from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.encoding import decode, encode
from isthmus_privacy.slots import COMPRESSED_SLOTS

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (20, 5)})
FIGURES = dict.fromkeys((slot.name for slot in COMPRESSED_SLOTS), 0.0)

WRONG = """
import torch


class Wrong:
    is_summable = True

    def __init__(self, choice):
        self.kind = choice.settings["kind"]
        self.calls = 0

    def length(self, size):
        return size + 1 if self.kind == "long" else size

    def project(self, values, facts):
        self.calls += 1
        if self.kind == "shape":
            return values[1:]
        if self.kind == "raises":
            return {}["no"]
        if self.kind == "infinite":
            return values / 0
        if self.kind == "in-place":
            return values.mul_(0.5).clone()
        if self.kind == "random":
            return values * self.calls
        return values.abs() if self.kind == "absolute" else values

    def restore(self, values, facts):
        return {"sign": values.sign(), "grows": 3 * values}.get(self.kind, values)


class Single:
    def __init__(self, choice):
        pass


class Half:
    is_summable = True

    def __init__(self, choice):
        pass

    def length(self, size):
        return size
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example of the documentation, and wrong ones, in this process."""
    sum_codecs._loaded.cache_clear()
    entries = {
        f"isthmus.update_codecs/{name}": name.capitalize() for name in ("wrong", "single", "half")
    }
    wrong = OutsidePackage(tmp_path / "wrong", "wrong_sums", WRONG, entries)
    entry = {"isthmus.update_codecs/projection": "Projection"}
    source = example("Projection")
    right = OutsidePackage(tmp_path / "right", "outside_projection", source, entry)
    with wrong.on_path(monkeypatch), right.on_path(monkeypatch):
        yield
    sum_codecs._loaded.cache_clear()


@pytest.fixture
def job_of(make_job):
    """A job with a codec of secure sums."""

    def make(codec="projection", settings="{one_in=3}", *overrides):
        compression = f"federated.compression={{codec='{codec}',settings={settings},bits=4}}"
        return make_job("federated.secure_aggregation=true", compression, *overrides)

    return make


def config_of(codec, **changes):
    fields = {
        "codec": codec,
        "size": LAYOUT.size,
        "bits": codec.ring_bits(6),
        "levels": codec.highest,
        "slots": COMPRESSED_SLOTS,
    }
    return make_config(**{**fields, **changes})


def test_a_sum_of_encoded_updates_is_the_encoded_sum(installed, job_of):
    job = job_of()
    check_sums(job, LAYOUT)
    codec = sum_codec(job, LAYOUT, 12)
    config = config_of(codec)
    config.check()
    figures = 4 * (2 + len(COMPRESSED_SLOTS))
    assert config.payload_bytes - figures < 103 * codec.ring_bits(6) / 8 / 2
    generator = torch.Generator().manual_seed(1)
    updates = [0.1 * torch.randn(LAYOUT.size, generator=generator) for _ in range(4)]
    encoded = [encode(config, each, weight=10, figures=FIGURES) for each in updates]
    total = sum(each.vector.long() for each in encoded)
    figures = sum(each.ring.figures.long() for each in encoded).int()
    mean = decode(config, total, figures, clients=4)
    # Computed here by the codec alone, without whole numbers.
    by_codec = codec.in_round(config.round, LAYOUT.size)
    exact = by_codec.restore(by_codec.project(sum(updates) / 4))
    torch.testing.assert_close(mean.vector, exact, atol=3e-4, rtol=0)
    # What a device keeps is what the sum lacks of its update.
    sent = sum(each.sent for each in encoded) / 4
    torch.testing.assert_close(mean.vector, sent, atol=1e-6, rtol=0)
    # A device without an update asks the codec nothing.
    nothing = encode(config, torch.zeros(1).expand(LAYOUT.size), weight=0, figures=FIGURES)
    assert set(nothing.vector.tolist()) == {codec.highest // 2}


def test_what_devices_agree_on_names_the_codec(installed, job_of):
    codec = sum_codec(job_of(), LAYOUT, 4)
    assert (codec.name, codec.version) == ("projection", "outside_projection 1.0")
    assert codec.settings == '{"one_in": 3}'
    config = config_of(codec)
    assert RoundConfig.from_bytes(config.to_bytes()) == config
    hashes = {config.hash}
    for change in ({"name": "other"}, {"settings": "{}"}, {"version": "p 2"}, {"seed": 1}):
        hashes.add(config_of(dataclasses.replace(codec, **change)).hash)
    assert len(hashes) == 5
    # Isthmus' own has the bytes that it had before other codecs could be named.
    own = config_of(UpdateCodec(one_in=2, bits=3), bits=6, levels=6)
    assert b"update-codec-3" in own.to_bytes()
    assert b"provided" not in own.to_bytes()
    assert RoundConfig.from_bytes(own.to_bytes()) == own


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"version": "p 2"}, {"settings": "{}"}, {"length": 5}, {"bits": 3}],
)
def test_a_device_refuses_another_codec_than_the_jobs(installed, job_of, change):
    job = job_of()
    codec = sum_codec(job, LAYOUT, 4)
    run = ActiveRun("run", job, LAYOUT)
    run.check_codec(config_of(codec))
    with pytest.raises(PeerMisbehaved) as refused:
        run.check_codec(config_of(dataclasses.replace(codec, **change)))
    assert refused.value.code == "codec-differs"


@pytest.mark.parametrize(
    "overrides",
    [
        ["federated.secure_aggregation=true", "federated.compression.codec=absent"],
        ["federated.codec=absent"],
        ["federated.download_codec=absent"],
    ],
)
def test_a_device_without_the_codec_refuses_the_run(make_job, tmp_path, overrides):
    job = make_job(*overrides).model_dump_json()
    opened = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
    with pytest.raises(UserError, match=r"codec='absent' is unknown; installed are block-top-k"):
        ActiveRun.of(opened)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("long", "makes 104 elements of an update of 103; it has to be 1 to as many"),
        ("shape", "returned no vector of 103 elements"),
        ("raises", "cannot encode the update: KeyError: 'no'"),
        ("infinite", "returned elements that are not finite"),
        ("in-place", r"changes the update in project()"),
        ("random", "does not project an update twice in the same way"),
        ("absolute", r"project() is not linear"),
        ("sign", r"restore() is not linear"),
        ("grows", "lacks of an update is 2 times as long as the update, and would grow"),
    ],
)
def test_a_codec_that_is_not_what_it_says_is_refused(installed, job_of, kind, sentence):
    shown = "^federated.compression.codec='wrong'"
    with pytest.raises((JobError, UpdateError), match=f"{shown}.*{re.escape(sentence)}"):
        check_sums(job_of("wrong", f"{{kind='{kind}'}}"), LAYOUT)


@pytest.mark.parametrize(
    ("codec", "sentence"),
    [
        ("rounded", r"does not say that its numbers can be summed \(is_summable = True\)"),
        ("single", r"does not say that its numbers can be summed \(is_summable = True\)"),
        ("half", r"is not a codec for secure sums: it has no project\(\)"),
    ],
)
def test_a_codec_that_cannot_be_summed_is_refused(installed, job_of, codec, sentence):
    with pytest.raises(JobError, match=sentence):
        check_sums(job_of(codec, "{}"), LAYOUT)


@pytest.mark.parametrize(
    ("compression", "sentence"),
    [
        ("{codec='projection', one_in=3}", "one_in has no effect on codec='projection'"),
        ("{settings={one_in=3}}", "settings has no effect on codec='sampled'"),
    ],
)
def test_keys_without_effect_are_refused(make_job, compression, sentence):
    with pytest.raises(JobError, match=sentence):
        make_job("federated.secure_aggregation=true", f"federated.compression={compression}")


def test_a_codec_draws_by_the_round(installed, job_of):
    codec = sum_codec(job_of(), LAYOUT, 4)
    update = torch.arange(103.0)
    first, again, second = (codec.in_round(n, 103).project(update) for n in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
