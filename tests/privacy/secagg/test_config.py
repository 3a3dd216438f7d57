"""Configurations of a round: validation, defaults and the hash."""

import dataclasses

import pytest
from tests.privacy.protocol import make_config

from isthmus.errors import PeerMisbehaved
from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.secagg.config import RoundConfig, SetUpBefore, SetUpForTwo
from isthmus_privacy.slots import Slot

SLOTS = (
    Slot(name="hits", maximum=1000.0, exact=True),
    Slot(name="loss", maximum=50.0),
    Slot(name="perplexity", maximum=1e4),
)

NOISE = DistributedNoise(clip=1.0, multiplier=1.0, honest=3, scale=64.0)


@pytest.mark.parametrize(
    ("invalid", "named"),
    [
        ({"bits": 31, "levels": 4}, "bits=31"),
        ({"size": 2**40 + 1}, "size="),
        ({"clients_min": 1}, "clients_min=1"),
        ({"clients_min": 7}, "clients_min=7"),
        ({"clients_max": 2**17}, "clients_max="),
        ({"complete_up_to": 5000}, "complete_up_to=5000"),
        ({"levels": 1}, "levels=1"),
        ({"levels": 2**29}, "levels="),
        ({"clip": 0.0}, "clip=0.0"),
        ({"clip": float("inf")}, "clip=inf"),
        ({"weight_max": 0}, "weight_max=0"),
        ({"weight_max": 2**54}, "weight_max="),
        ({"selected_ppm": 0}, "selected_ppm=0"),
        ({"selected_ppm": 1_000_001}, "selected_ppm=1000001"),
        ({"corrupt_permille": 1000, "dropout_permille": 0}, "corrupt_permille=1000"),
        ({"slots": (Slot(name="a", maximum=float("nan")),)}, "slots="),
        ({"slots": (Slot(name="b", maximum=1.0), Slot(name="a", maximum=1.0))}, "slots="),
        ({"slots": (Slot(name="a", maximum=1.5, exact=True),)}, "slots="),
    ],
)
def test_an_invalid_configuration_names_its_field(invalid, named):
    with pytest.raises(PeerMisbehaved) as caught:
        make_config(**invalid).check()
    assert caught.value.code == "config-malformed"
    assert str(caught.value).startswith(named)


def test_the_default_levels_are_the_finest_that_cannot_wrap():
    for bits in (16, 32, 64):
        for count in (2, 3, 16, 17, 1000, 20_000):
            config = make_config(bits=bits, clients_max=count, clients_min=2)
            assert config.levels * count < 2**bits
            assert config.levels % 2 == 1  # with a level for 0
            assert config.levels == 2**28 - 1 or (config.levels + 2) * count >= 2**bits


def test_every_field_is_hashed():
    config = make_config(slots=SLOTS)
    changed = [
        {"run_id": "b"}, {"round": 9}, {"attempt": 9}, {"model_hash": bytes(32)},
        {"purpose": bytes(31) + b"1"}, {"size": 9},
        {"slots": SLOTS[:1]}, {"clients_max": 9}, {"clients_min": 4}, {"corrupt_permille": 9},
        {"dropout_permille": 9}, {"complete_up_to": 9}, {"bits": 64}, {"levels": 9},
        {"clip": 9.0}, {"whole": True}, {"weight_max": 9}, {"draw": 9}, {"selected_ppm": 9},
        {"codec": UpdateCodec(one_in=2, bits=3)}, {"codec": UpdateCodec(one_in=3, bits=3)},
        {"codec": UpdateCodec(one_in=2, bits=4)}, {"codec": UpdateCodec(one_in=2, bits=3, seed=1)},
        {"codec": UpdateCodec(one_in=2, bits=3, rates=((0, 1, 1),))},
        {"set_up": SetUpForTwo()}, {"set_up": SetUpBefore(bytes(32))},
        {"set_up": SetUpBefore(bytes(31) + b"1")},
        *({"noise": dataclasses.replace(NOISE, **change)} for change in (
            {}, {"clip": 9.0}, {"multiplier": 9.0}, {"honest": 9}, {"scale": 9.0},
        )),
    ]  # fmt: skip
    assert {name for change in changed for name in change} == {
        field.name for field in dataclasses.fields(config)
    }
    hashes = {dataclasses.replace(config, **change).hash for change in changed}
    assert len(hashes | {config.hash}) == len(changed) + 1


def test_a_configuration_with_a_field_that_does_not_exist_is_refused():
    """A server cannot make a device believe in a guarantee that it does not know."""
    with pytest.raises(TypeError, match="epsilon"):
        make_config(epsilon=0.1)
    with pytest.raises(PeerMisbehaved) as caught:
        RoundConfig.from_bytes(make_config(set_up=SetUpForTwo()).to_bytes() + bytes(8))
    assert caught.value.code == "message-trailing"
