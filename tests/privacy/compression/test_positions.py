"""Positions of elements that are sent take few bits, and every other message is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UpdateError
from isthmus_privacy.compression.positions import Positions


def random_positions(positions, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = positions.count, positions.length
    chosen = torch.rand(shape, generator=generator).topk(positions.keep, dim=1).indices
    return chosen.sort(dim=1).values


@st.composite
def shapes(draw):
    length = draw(st.sampled_from([1, 2, 7, 64, 100, 1280, 4095, 4096]))
    keep = draw(st.one_of(st.just(length), st.integers(1, length)))
    return Positions(draw(st.sampled_from([1, 2, 64])), length, keep)


@given(shapes(), st.integers(0, 999))
@settings(deadline=None, max_examples=60)
def test_positions_come_back_from_as_many_bytes_as_announced(positions, seed):
    at = random_positions(positions, seed)
    payload = positions.encode(at)
    assert len(payload) == positions.nbytes
    assert positions.decode(bytes(payload)).equal(at)


@pytest.mark.parametrize(("length", "low_bits"), [(4095, 8), (4096, 8), (1 << 20, 16)])
def test_low_bits_that_fill_a_word_have_no_sign(length, low_bits):
    positions = Positions(1, length, 8)
    assert positions._low_bits == low_bits
    at = random_positions(positions, 0)
    assert positions.decode(positions.encode(at)).equal(at)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("keep", [1, 64, 144, 4000, 4096])
def test_the_first_and_the_last_elements_can_be_sent(first, keep):
    positions = Positions(2, 4096, keep)
    at = torch.arange(keep).repeat(2, 1) + (0 if first else 4096 - keep)
    assert positions.decode(positions.encode(at)).equal(at)


@pytest.mark.parametrize("keep", [64, 144, 512])
def test_they_take_less_than_a_bit_more_than_any_code_needs(keep):
    sets = math.lgamma(4097) - math.lgamma(keep + 1) - math.lgamma(4097 - keep)
    least = sets / math.log(2) / keep
    assert 8 * Positions(64, 4096, keep).nbytes / (64 * keep) < least + 0.7


SMALL = Positions(1, 100, 4)
"""Four low bits of each position, then a one for each and six zeros."""


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (b"\x00\x00\xff\x03", "has not 4 positions"),
        (b"\x00\x00\x00\x00", "has not 4 positions"),
        (b"\x00\x00\x0f\x00", "not increasing"),
        (b"\x10\xf2\x07\x02", "outside of its block"),
    ],
)
def test_another_message_is_refused_in_one_sentence(payload, sentence):
    assert len(payload) == SMALL.nbytes
    with pytest.raises(UpdateError, match=sentence) as refused:
        SMALL.decode(payload)
    assert "\n" not in str(refused.value)


@given(shapes(), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_any_bytes_are_refused_or_decoded_to_positions(positions, seed):
    generator = torch.Generator().manual_seed(seed)
    payload = positions.encode(random_positions(positions, seed))
    for at in torch.randint(max(1, len(payload)), (2,), generator=generator).tolist():
        payload[at : at + 1] = bytes([int(torch.randint(256, (), generator=generator))])
    try:
        decoded = positions.decode(payload[: positions.nbytes])
    except UpdateError:
        return
    assert decoded.shape == (positions.count, positions.keep)
    assert bool(((decoded >= 0) & (decoded < positions.length)).all())
    assert bool((decoded.diff(dim=1) > 0).all())
