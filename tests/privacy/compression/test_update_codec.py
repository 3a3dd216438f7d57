"""Send fewer and shorter elements of an update, whose sums cannot wrap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.protocol import ProtocolRound, make_config

from isthmus.errors import PeerMisbehaved
from isthmus_privacy.compression.packing import pack, unpack
from isthmus_privacy.compression.round_vector import RoundVector
from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.crypto.masking import RING, TILE, word_bits
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.encoding import decode, encode
from isthmus_privacy.secagg.messages import Stage
from isthmus_privacy.slots import COMPRESSED_SLOTS

FIGURES = {
    "loss": 2.5,
    "magnitude": -7.25,
    "other_weight": 0.0,
    "over_range": 0.0,
    "over_weight": 0.0,
    "unusable": 0.0,
}


def compressed(*, clients, bits, one_in=1, rates=(), size=50, **changes):
    codec = UpdateCodec(one_in=one_in, bits=bits, rates=rates)
    config = make_config(
        clients_max=clients,
        size=size,
        codec=codec,
        bits=codec.ring_bits(clients),
        levels=codec.highest,
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
    mean = decode(config, encoded.vector * clients, encoded.ring.figures * clients, clients=clients)
    torch.testing.assert_close(mean.vector, torch.full((3,), 2.0 * sign))
    assert mean.weight == 1000 * clients
    assert mean.figures["loss"] == pytest.approx(2.5, abs=1e-3)
    assert mean.figures["magnitude"] == pytest.approx(-7.25, abs=1e-3)


@st.composite
def ranges(draw, size):
    """Ascending ranges of an update, each with the number of its blocks."""
    ends = sorted(draw(st.sets(st.integers(0, size), max_size=8)))
    pairs = zip(ends[::2], ends[1::2], strict=False)
    return tuple((*each, draw(st.sampled_from([1, 2, 3, 6]))) for each in pairs)


@given(
    one_in=st.sampled_from([1, 2, 4, 9]),
    size=st.integers(0, 60),
    cycle=st.integers(0, 5),
    data=st.data(),
)
def test_every_element_is_sent_once_in_as_many_rounds_as_its_number(one_in, size, cycle, data):
    """An incomplete block sends some of its elements more often."""
    codec = UpdateCodec(one_in=one_in, bits=4, rates=data.draw(ranges(size)))
    assert codec.fits(codec.highest, size)
    numbers = {k: n for start, end, n in codec.rates for k in range(start, end)}
    of = {number: [] for number in (one_in, 1, 2, 3, 6)}
    for element in range(size):
        of[numbers.get(element, one_in)].append(element)
    for number, elements in of.items():
        rounds = range(cycle * number, (cycle + 1) * number)
        each = [codec.coordinates(round_, size).tolist() for round_ in rounds]
        assert all(len(set(sent)) == len(sent) == codec.kept(size) for sent in each)
        counts = [sum(element in sent for sent in each) for element in elements]
        assert set(counts[: len(elements) // number * number]) <= {1}
        assert all(counts)


def test_orders_of_blocks_differ_and_do_not_depend_on_other_ranges():
    """Elements of a range with a number of its own do not move those of others."""
    codec = UpdateCodec(one_in=4, bits=3)
    orders = {tuple(codec.coordinates(round_, 400).tolist()) for round_ in range(4)}
    assert len(orders) == 4
    assert len({k % 4 for k in codec.coordinates(0, 400).tolist()}) == 4
    behind = UpdateCodec(one_in=4, bits=3, rates=((400, 500, 1),))
    assert behind.coordinates(1, 500).tolist()[100:] == codec.coordinates(1, 400).tolist()


@pytest.mark.parametrize(
    "rates",
    [
        ((0, 51, 1),),
        ((4, 4, 1),),
        ((4, 6, 1), (5, 7, 1)),
        ((4, 6, 1), (1, 2, 1)),
        ((4, 6, 0),),
        ((4, 6, 257),),
    ],
)
def test_ranges_that_no_update_has_are_refused_in_one_sentence(rates):
    codec = UpdateCodec(one_in=2, bits=3, rates=rates)
    fields = {"bits": codec.ring_bits(6), "levels": codec.highest, "size": 50}
    config = make_config(clients_max=6, codec=codec, slots=COMPRESSED_SLOTS, **fields)
    with pytest.raises(PeerMisbehaved, match="is not a valid configuration"):
        config.check()


@pytest.mark.parametrize("rates", [(), ((3, 5, 1), (40, 50, 1))])
def test_the_mean_is_that_of_what_the_clients_say_they_sent(rates):
    config = compressed(clients=4, bits=3, one_in=4, rates=rates, clip=0.3, weight_max=50)
    updates, weights = [torch.randn(50) * 0.1 for _ in range(3)], [50, 20, 1]
    encoded = [
        encode(config, update, weight=weight, figures=FIGURES)
        for update, weight in zip(updates, weights, strict=True)
    ]
    total = config.new_vector()
    for each in encoded:
        total.add(each.ring.payload())
    mean = decode(config, total.elements, total.figures, clients=3)
    expected = sum(each.sent for each in encoded) * 50 / sum(weights)
    torch.testing.assert_close(mean.vector, expected)
    assert (mean.vector != 0).sum() <= (22 if rates else 13)


def test_masked_vectors_shrink_and_masks_cancel_in_the_bits_that_are_sent():
    codec = UpdateCodec(one_in=2, bits=2)
    changes = {"codec": codec, "bits": codec.ring_bits(6), "levels": codec.highest}
    lost = {"c00004": Stage.MASKED_INPUT}
    protocol = ProtocolRound(6, lost, size=4000, **changes)
    assert RoundConfig.from_bytes(protocol.config.to_bytes()) == protocol.config
    total = protocol.until(Stage.FINISHED).server.unmask()
    low = (1 << protocol.config.bits) - 1
    plain = sum(vector.to(torch.int64) for vector in protocol.plain.values())
    assert (total.vector.to(torch.int64) & low).equal(plain & low)
    mean = decode(protocol.config, total.vector, total.ring.figures, clients=len(protocol.plain))
    assert mean.weight == sum(map(protocol.weight, protocol.plain))
    assert all(len(payload) < 16_000 / 10 for _, payload in protocol.masked.values())


def test_a_masked_vector_hides_its_weight_and_figures():
    """The server learns their sums, and not those of their digits."""
    codec = UpdateCodec(one_in=2, bits=2)
    changes = {"codec": codec, "bits": codec.ring_bits(6), "levels": codec.highest}
    protocol = ProtocolRound(6, size=40, **changes).until(Stage.CONSISTENCY_CHECK)
    count = protocol.config.figures.length
    sent = [payload[-4 * count :] for _, payload in protocol.masked.values()]
    words = torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.int32)
    assert len(words) == 6 * count
    # Of uniform words two are equal, or one is as small, once in a million runs; three never are.
    assert len(words.unique()) > len(words) - 3
    assert int((words.long().abs() <= protocol.config.weight_max).sum()) < 3


def test_figures_have_masks_of_their_own():
    vector = RoundVector(length=64, bits=32, figures=64)
    vector.mask([bytes(range(32))], [])
    assert not set(vector.elements.tolist()) & set(vector.figures.tolist())
    vector.mask([], [bytes(range(32))])
    assert not vector.elements.any()
    assert not vector.figures.any()


@pytest.mark.parametrize(
    "changes",
    [{"bits": 4}, {"levels": 8}, {"weight_max": 2**30}],
)
def test_a_configuration_that_would_wrap_is_refused_in_one_sentence(changes):
    codec = UpdateCodec(one_in=2, bits=3)
    fields = {"bits": codec.ring_bits(6), "levels": codec.highest, **changes}
    config = make_config(clients_max=6, codec=codec, slots=COMPRESSED_SLOTS, **fields)
    with pytest.raises(PeerMisbehaved) as refused:
        config.check()
    assert "\n" not in str(refused.value)
