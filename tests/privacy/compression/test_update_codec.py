"""Send fewer and shorter elements of an update, whose sums cannot wrap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.protocol import ProtocolRound, make_config

from isthmus.errors import PeerMisbehaved
from isthmus_privacy.compression.packing import pack, unpack
from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.crypto.masking import RING, TILE, word_bits
from isthmus_privacy.secagg import COMPRESSED_SLOTS, RoundConfig, Stage, decode, encode

FIGURES = {"loss": 2.5, "magnitude": -7.25, "unusable": 0.0}


def compressed(*, clients, bits, one_in=1, always=(), size=50, **changes):
    codec = UpdateCodec(one_in=one_in, bits=bits, always=always)
    config = make_config(
        clients_max=clients,
        size=size,
        codec=codec,
        bits=codec.ring_bits(clients),
        levels=codec.levels,
        slots=COMPRESSED_SLOTS,
        **changes,
    )
    config.check()
    return config


@given(bits=st.integers(2, 32), count=st.integers(0, 70), seed=st.integers(0, 99))
def test_packed_elements_keep_their_low_bits(bits, count, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    vector = words.to(RING[word_bits(bits)])
    packed = pack(vector, bits)
    assert len(packed) == -(-count * bits // 8)
    low = vector.to(torch.int64) & ((1 << bits) - 1)
    again = unpack(packed, count, bits).to(torch.int64) & ((1 << bits) - 1)
    assert again.equal(low)


def test_vectors_of_several_tiles_are_packed_without_gaps():
    vector = torch.arange(2 * TILE + 5) % 32
    payload = pack(vector.to(torch.int8), 5)
    assert len(payload) == -(-len(vector) * 5 // 8)
    assert unpack(payload, len(vector), 5).equal(vector.to(torch.int8))


@given(
    clients=st.integers(3, 300),
    bits=st.integers(2, 8),
    sign=st.sampled_from([-1.0, 1.0]),
)
@settings(deadline=None)
def test_the_largest_updates_of_all_clients_never_wrap(clients, bits, sign):
    config = compressed(clients=clients, bits=bits, size=3, clip=2.0, weight_max=1000)
    encoded = encode(config, torch.full((3,), sign * 1e9), weight=1000, figures=FIGURES)
    mean = decode(config, encoded.vector * clients, clients=clients)
    torch.testing.assert_close(mean.vector, torch.full((3,), 2.0 * sign))
    assert mean.weight == 1000 * clients
    assert mean.figures["loss"] == pytest.approx(2.5, abs=1e-3)
    assert mean.figures["magnitude"] == pytest.approx(-7.25, abs=1e-3)


@st.composite
def ranges(draw, size):
    """Ascending ranges of an update."""
    ends = sorted(draw(st.sets(st.integers(0, size), max_size=8)))
    return tuple(zip(ends[::2], ends[1::2], strict=False))


@given(one_in=st.integers(1, 9), size=st.integers(0, 60), cycle=st.integers(0, 5), data=st.data())
def test_every_element_is_sent_once_in_a_cycle_of_rounds(one_in, size, cycle, data):
    """Those of some ranges are sent in each of its rounds, first."""
    codec = UpdateCodec(one_in=one_in, bits=4, always=data.draw(ranges(size)))
    assert codec.fits(codec.levels, size)
    always = [k for start, end in codec.always for k in range(start, end)]
    rounds = range(cycle * one_in, (cycle + 1) * one_in)
    sent = [codec.coordinates(number, size).tolist() for number in rounds]
    assert all(len(each) == codec.kept(size) for each in sent)
    assert all(each[: len(always)] == always for each in sent)
    others = [k for each in sent for k in each[len(always) :]]
    expected = sorted(set(range(size)) - set(always))
    assert sorted(set(others)) == expected
    if len(expected) % one_in == 0:
        assert len(others) == len(expected)


@pytest.mark.parametrize("always", [((0, 51),), ((4, 4),), ((4, 6), (5, 7)), ((4, 6), (1, 2))])
def test_ranges_that_no_update_has_are_refused_in_one_sentence(always):
    codec = UpdateCodec(one_in=2, bits=3, always=always)
    fields = {"bits": codec.ring_bits(6), "levels": codec.levels, "size": 50}
    config = make_config(clients_max=6, codec=codec, slots=COMPRESSED_SLOTS, **fields)
    with pytest.raises(PeerMisbehaved, match="is not a valid configuration"):
        config.check()


@pytest.mark.parametrize("always", [(), ((3, 5), (40, 50))])
def test_the_mean_is_that_of_what_the_clients_say_they_sent(always):
    config = compressed(clients=4, bits=3, one_in=4, always=always, clip=0.3, weight_max=50)
    updates, weights = [torch.randn(50) * 0.1 for _ in range(3)], [50, 20, 1]
    encoded = [
        encode(config, update, weight=weight, figures=FIGURES)
        for update, weight in zip(updates, weights, strict=True)
    ]
    total = sum((each.vector for each in encoded[1:]), encoded[0].vector.clone())
    mean = decode(config, total, clients=3)
    expected = sum(each.sent for each in encoded) * 50 / sum(weights)
    torch.testing.assert_close(mean.vector, expected)
    assert (mean.vector != 0).sum() <= (22 if always else 13)


def test_masked_vectors_shrink_and_masks_cancel_in_the_bits_that_are_sent():
    codec = UpdateCodec(one_in=2, bits=2)
    changes = {"codec": codec, "bits": codec.ring_bits(6), "levels": codec.levels}
    lost = {"c00004": Stage.MASKED_INPUT}
    protocol = ProtocolRound(6, lost, size=4000, **changes)
    assert RoundConfig.from_bytes(protocol.config.to_bytes()) == protocol.config
    total = protocol.until(Stage.FINISHED).server.unmask()
    low = (1 << protocol.config.bits) - 1
    plain = sum(vector.to(torch.int64) for vector in protocol.plain.values())
    assert (total.vector.to(torch.int64) & low).equal(plain & low)
    assert all(len(payload) < 16_000 / 10 for _, payload in protocol.masked.values())


@pytest.mark.parametrize(
    "changes",
    [{"bits": 4}, {"levels": 8}, {"weight_max": 2**30}],
)
def test_a_configuration_that_would_wrap_is_refused_in_one_sentence(changes):
    codec = UpdateCodec(one_in=2, bits=3)
    fields = {"bits": codec.ring_bits(6), "levels": codec.levels, **changes}
    config = make_config(clients_max=6, codec=codec, slots=COMPRESSED_SLOTS, **fields)
    with pytest.raises(PeerMisbehaved) as refused:
        config.check()
    assert "\n" not in str(refused.value)
