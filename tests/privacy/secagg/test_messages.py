"""Canonical encoding: one encoding for each message, and every other input is refused."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.privacy.protocol import ProtocolRound

from isthmus.errors import PeerMisbehaved
from isthmus_privacy.crypto.canonical import PositionSet
from isthmus_privacy.secagg.messages import MAX_ENTRY_BYTES, Roster, Survivors

POSITION_SET = st.integers(0, 70).flatmap(
    lambda size: st.builds(
        PositionSet, st.just(size), st.frozensets(st.integers(0, max(0, size - 1)), max_size=size)
    )
)


@given(st.binary(min_size=32, max_size=32), POSITION_SET, POSITION_SET)
def test_a_message_survives_its_encoding(roster_hash, owners, survivors):
    message = Survivors(roster_hash, owners, survivors)
    assert Survivors.from_bytes(message.to_bytes()) == message


@given(st.data())
def test_changed_bytes_are_refused_or_decode_to_another_message(data):
    protocol = ProtocolRound(3)
    keys = protocol.clients["c00000"].advertise_keys()
    encoded = bytearray(keys.to_bytes())
    index = data.draw(st.integers(0, len(encoded) - 1))
    encoded[index] ^= data.draw(st.integers(1, 255))
    try:
        read = type(keys).from_bytes(bytes(encoded))
    except PeerMisbehaved:
        return
    assert read != keys
    assert read.to_bytes() == encoded


@given(st.data())
def test_the_bytes_that_a_roster_was_read_from_are_its_only_encoding(data):
    entries = ProtocolRound(3).advertise_keys().roster.entries
    encoded = bytearray(Roster(entries).to_bytes())
    for _ in range(data.draw(st.integers(0, 2))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read = Roster.from_bytes(bytes(encoded))
    except PeerMisbehaved:
        return
    assert read.to_bytes() == encoded
    assert Roster(read.entries).to_bytes() == encoded  # encoded anew


def test_an_entry_of_a_roster_with_the_longest_name_has_fewer_bytes_than_the_most():
    entry = ProtocolRound(3).advertise_keys().roster.entries[0]
    longest = dataclasses.replace(entry.enrolment, name="n" * 128)
    size = len(Roster((dataclasses.replace(entry, enrolment=longest),)).to_bytes())
    assert 2500 < size < MAX_ENTRY_BYTES


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(PeerMisbehaved):
        Survivors.from_bytes(data)
