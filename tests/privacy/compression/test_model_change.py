"""Changes of a model with few bits: every receiver computes the same bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_privacy.compression.model_change import BLOCK, MAX_BITS, ChangeCodec

TILE = 32 * BLOCK

BITS = st.integers(2, MAX_BITS)


def models(codec, seed, scale=0.01):
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(codec.size, generator=generator)
    return before, before + scale * torch.randn(codec.size, generator=generator)


def applied(codec, before, payload):
    vector = before.clone()
    codec.apply(vector, payload)
    return vector


@given(BITS, st.integers(0, 3000), st.integers(0, 5), st.integers(0, 9))
@settings(deadline=None)
def test_a_change_has_few_bits_and_leads_close_to_the_new_model(bits, trained, more, seed):
    codec = ChangeCodec(trained + more, trained, bits)
    before, after = models(codec, seed)
    payload = codec.encode(before, after)
    assert len(payload) == codec.nbytes
    reached = applied(codec, before, payload)
    assert reached[trained:].equal(after[trained:])  # statistics are sent whole
    left = (after - reached)[:trained]
    assert float(left.norm()) <= 0.9 * float((after - before)[:trained].norm()) + 1e-6


def test_more_bits_leave_less():
    lefts = []
    for bits in range(2, MAX_BITS + 1):
        codec = ChangeCodec(20_000, 20_000, bits)
        before, after = models(codec, 1)
        reached = applied(codec, before, codec.encode(before, after))
        lefts.append(float((after - reached).norm() / (after - before).norm()))
    assert lefts == sorted(lefts, reverse=True)
    assert lefts[0] < 0.5
    assert lefts[-1] < 0.02


@pytest.mark.parametrize("size", [TILE - 1, TILE, TILE + BLOCK + 3, 2 * TILE + 5])
def test_tiles_and_blocks_do_not_show(size):
    """The result does not depend on what else is in the vector, beyond its block."""
    whole = ChangeCodec(size, size, 3)
    before, after = models(whole, 2)
    reached = applied(whole, before, whole.encode(before, after))
    end = size - size % BLOCK
    part = ChangeCodec(end, end, 3)
    again = applied(part, before[:end], part.encode(before[:end], after[:end]))
    assert again.equal(reached[:end])


def test_the_number_of_threads_changes_no_bit():
    codec, threads = ChangeCodec(300_000, 299_000, 3), torch.get_num_threads()
    before, after = models(codec, 3)
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            payload = codec.encode(before, after)
            results.append((bytes(payload), applied(codec, before, payload)))
    finally:
        torch.set_num_threads(threads)
    assert all(payload == results[0][0] for payload, _ in results)
    assert all(vector.equal(results[0][1]) for _, vector in results)


def test_a_model_that_has_not_changed_stays_as_it_is():
    codec = ChangeCodec(2 * BLOCK, 2 * BLOCK, 2)
    before, _ = models(codec, 4)
    assert applied(codec, before, codec.encode(before, before)).equal(before)


def test_what_is_added_to_the_next_change_arrives():
    """With error feedback the model follows, however few the bits are."""
    codec = ChangeCodec(5000, 5000, 2)
    target, model = torch.zeros(5000), torch.zeros(5000)
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        target += 0.1 + torch.randn(5000, generator=generator)
        codec.apply(model, codec.encode(model, target))
    assert float((target - model).norm()) < 1.5 * 5000**0.5
    assert float(target.norm()) > 5 * 5000**0.5


@pytest.mark.parametrize("size", [0, 7, 17])
def test_a_payload_that_is_too_short_is_refused(size):
    codec = ChangeCodec(15, 15, 3)
    payload = codec.encode(torch.zeros(15), torch.ones(15))
    assert len(payload) == 18
    with pytest.raises(ValueError, match=f"a change of {size} bytes came; it has 18 or fewer"):
        codec.apply(torch.zeros(15), payload[:size])


@given(BITS, st.integers(1, 3000), st.integers(0, 5), st.integers(0, 3000), st.integers(0, 9))
@settings(deadline=None)
def test_if_few_elements_change_the_others_stay_and_these_have_more_bits(
    bits, trained, more, few, seed
):
    codec = ChangeCodec(trained + more, trained, bits)
    before, after = models(codec, seed)
    changing = torch.zeros(trained, dtype=torch.bool)
    changing[torch.randperm(trained)[:few]] = True
    payload = codec.encode(before, after, changing)
    assert len(payload) <= codec.nbytes
    vector = before.clone()
    assert codec.apply(vector, bytes(payload) + b"the next change") == len(payload)
    count = int(changing.sum())
    enough = min((bits - 1) * trained // max(count, 1), 16) - 1  # bits that the others save
    if trained > 200 and count < trained and enough > bits:
        assert vector[:trained][~changing].equal(before[:trained][~changing])
        left, change = (after - vector)[:trained][changing], (after - before)[:trained][changing]
        largest = float(change.abs().max()) if count else 0.0
        if enough > MAX_BITS:  # nothing is clipped
            assert all(left.abs() <= largest / (2 ** (enough - 1) - 1) / 2 + 1e-6)
    assert vector[trained:].equal(after[trained:])


def test_changes_that_name_other_elements_than_they_announce_are_refused():
    codec = ChangeCodec(100, 100, 3)
    changing = torch.arange(100) < 20
    payload = codec.encode(torch.zeros(100), torch.ones(100), changing)
    assert payload[0] == 20
    payload[8] ^= 1
    with pytest.raises(ValueError, match="a change of 20 elements names 19"):
        codec.apply(torch.zeros(100), payload)
    payload[:8] = (101).to_bytes(8, "little")
    with pytest.raises(ValueError, match=r"a change of \d+ bytes came; it has \d+ or fewer"):
        codec.apply(torch.zeros(100), payload)
