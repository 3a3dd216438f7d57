"""Send the largest elements of each block of an update, and refuse every other message."""

import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.errors import UpdateError
from isthmus_privacy.compression.block_top_k import BLOCK, BlockTopK

SMALL = BlockTopK(size=BLOCK + 103, trained=BLOCK + 100, keep=64)


def random_update(codec, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(codec.size, generator=generator) ** 3


def parts_of(codec, vector):
    return list(torch.split(vector[: codec.trained], BLOCK))


@given(
    trained=st.sampled_from([1, 7, 63, 64, 65, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 70]),
    statistics=st.integers(0, 5),
    keep=st.sampled_from([1, 3, 64, 700, BLOCK]),
    seed=st.integers(0, 999),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    levels=st.sampled_from([0, 1, 2]),
)
@example(trained=7, statistics=0, keep=BLOCK, seed=0, scale=1e-30, levels=2)
@settings(deadline=None, max_examples=30)
def test_what_is_sent_and_what_is_left_add_up_to_the_update(
    trained, statistics, keep, seed, scale, levels
):
    codec = BlockTopK(size=trained + statistics, trained=trained, keep=keep)
    update = random_update(codec, seed) * scale
    if levels:  # many equal magnitudes
        update = (update / scale).round().clamp(-levels, levels) * scale
    left = update.clone()
    payload = codec.encode(left)
    sent = codec.decode(payload)
    assert len(payload) == codec.nbytes
    torch.testing.assert_close(sent + left, update, rtol=1e-6, atol=1e-6 * scale)
    assert (left[trained:] == 0).all()
    assert sent[trained:].equal(update[trained:])
    for block, part in zip(parts_of(codec, update), parts_of(codec, sent), strict=True):
        count = -(-len(block) * keep // BLOCK)
        where = part != 0
        assert where.sum() <= count
        assert part[where].abs().unique().numel() <= 2
        # Among few elements zeros are sent too, as the lower magnitude.
        assert ((part.sign() == block.sign()) | (block == 0))[where].all()
        rest = block[~where].abs().max() if bool((~where).any()) else torch.zeros(())
        assert (block[where].abs() >= rest).all()


def test_the_same_update_gives_the_same_bytes_with_any_number_of_threads():
    codec = BlockTopK(size=70 * BLOCK + 5, trained=70 * BLOCK + 5, keep=64)
    update = random_update(codec).round()
    before = torch.get_num_threads()
    payloads = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        payloads.append(codec.encode(update.clone()))
    torch.set_num_threads(before)
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize(("keep", "times"), [(64, 195), (144, 101)])
def test_a_message_is_many_times_smaller_than_a_model(keep, times):
    for blocks in (1, 2, 26, 64, 65, 6104):
        codec = BlockTopK(size=blocks * BLOCK, trained=blocks * BLOCK, keep=keep)
        assert 4 * codec.size / codec.nbytes > times


@pytest.mark.parametrize("scale", [3e38, 3.4e38])
def test_magnitudes_near_the_largest_number_stay_finite(scale):
    codec = BlockTopK(size=3, trained=3, keep=BLOCK)
    update = scale * torch.tensor([1.0, -1.0, 0.5])
    sent = codec.decode(codec.encode(update))
    assert bool(torch.isfinite(sent).all())
    assert bool(torch.isfinite(update).all())


def test_what_is_left_is_sent_later():
    """With error feedback the sum of all messages follows the sum of all updates."""
    codec = BlockTopK(size=2 * BLOCK, trained=2 * BLOCK, keep=64)
    step = random_update(codec, seed=3)
    left, received = torch.zeros(codec.size), torch.zeros(codec.size)
    for _ in range(40):
        left += step
        received += codec.decode(codec.encode(left))
    torch.testing.assert_close(received + left, 40 * step, rtol=1e-4, atol=1e-3)
    assert (received - 40 * step).norm() < (40 * step).norm() / 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [5, BLOCK + 3])
def test_an_update_that_is_not_finite_is_not_sent(value, at):
    update = random_update(SMALL)
    update[at] = value
    with pytest.raises(UpdateError, match="not finite"):
        SMALL.encode(update)


def changed(at, data):
    payload = SMALL.encode(random_update(SMALL))
    payload[at : at + len(data)] = data
    return payload


MARKS = 2 * 2 + 64 * 5 // 8
"""Where the ones and zeros of positions begin, after two magnitudes and five bits of each."""
SECOND = MARKS + 24 + 64 * 2 // 8
"""Where the last block begins, which has 100 elements."""


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (b"", "has 0 bytes where this exchange set takes"),
        (bytes(SMALL.nbytes - 1), "bytes where"),
        (bytes(SMALL.nbytes + 1), "bytes where"),
        (changed(0, b"\xc0\x7f"), "a magnitude .* not finite"),
        (changed(SECOND + 2, b"\x80\x7f"), "a magnitude .* not finite"),
        (changed(0, b"\x80\xbf"), "not in order"),
        (changed(0, b"\x00\x7f"), "not in order"),
        (changed(MARKS, bytes(24)), "has not 64 positions"),
        (changed(MARKS, b"\xff" * 8 + bytes(16)), "not increasing"),
        (changed(SMALL.nbytes - 4, struct.pack("<f", float("nan"))), "a running statistic"),
    ],
)
def test_a_malformed_message_is_refused_in_one_sentence(payload, sentence):
    with pytest.raises(UpdateError, match=sentence) as refused:
        SMALL.decode(payload)
    assert "\n" not in str(refused.value)


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_any_bytes_are_refused_or_decoded_to_a_finite_update(seed):
    generator = torch.Generator().manual_seed(seed)
    payload = SMALL.encode(random_update(SMALL))
    for at in torch.randint(len(payload), (3,), generator=generator).tolist():
        payload[at] = int(torch.randint(256, (), generator=generator))
    try:
        update = SMALL.decode(payload)
    except UpdateError:
        return
    assert update.shape == (SMALL.size,)
    assert bool(torch.isfinite(update).all())
