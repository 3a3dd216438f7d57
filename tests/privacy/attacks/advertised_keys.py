"""Dishonest clients advertise invalid keys, or too few clients do."""

import dataclasses

from tests.privacy.attacks.registry import (
    ALICE,
    BOB,
    DRAW,
    client_above,
    expect_refusal,
    round_until,
)
from tests.privacy.protocol import (
    ProtocolRound,
    directory,
    enrolment,
    make_config,
    names,
    signed_keys,
)

from isthmus_privacy.crypto import keys
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.messages import Stage
from isthmus_privacy.secagg.server import ServerSession

P = 2**255 - 19
LOW_ORDER_POINTS = [
    *(number.to_bytes(32, "little") for number in (0, 1, P - 1, P, P + 1)),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
]
"""All encodings of points of order 1, 2, 4 and 8 (Bernstein, https://cr.yp.to/ecdh.html)."""


def new_server(config=None, **changes):
    return ServerSession(config or make_config(), directory(), **changes)


@expect_refusal("server-out-of-order")
def keys_after_the_roster_is_closed():
    protocol = ProtocolRound(6, {BOB: Stage.ADVERTISE_KEYS}).advertise_keys()
    protocol.server.receive_keys(protocol.clients[BOB].advertise_keys())


@expect_refusal("server-out-of-order")
def a_vector_after_the_survivors_are_named():
    protocol = round_until(Stage.CONSISTENCY_CHECK)
    protocol.server.receive_masked_input(*protocol.masked[BOB])


@expect_refusal("keys-uninvited")
def a_client_that_was_not_invited():
    new_server(invited=[ALICE]).receive_keys(signed_keys(make_config(), BOB))


@expect_refusal("keys-not-selected")
def a_client_with_another_ticket_than_the_server_selected():
    config, name = make_config(draw=DRAW, selected_ppm=500_000), client_above(0.5)
    new_server(config, invited=[name]).receive_keys(signed_keys(config, name))


@expect_refusal("keys-not-selected")
def a_client_whose_lottery_number_is_in_another_random_group_by_now():
    config = make_config(draw=DRAW)
    drawn = RandomGroup.of(enrolment(ALICE).lottery, DRAW, 3)
    other = RandomGroup(drawn.index % 3 + 1, 3)
    new_server(config, invited=[ALICE], group=other).receive_keys(signed_keys(config, ALICE))


@expect_refusal("keys-duplicate")
def keys_twice():
    server = new_server()
    for _ in range(2):
        server.receive_keys(signed_keys(make_config(), ALICE))


@expect_refusal("keys-too-many-clients")
def more_clients_than_the_bit_budget():
    server = new_server()
    for name in names(7):
        server.receive_keys(signed_keys(make_config(), name))


@expect_refusal("keys-forged")
def keys_that_alice_did_not_sign():
    forged = dataclasses.replace(signed_keys(make_config(), ALICE), mask_key=bytes([9]) * 1216)
    new_server().receive_keys(forged)


@expect_refusal("keys-forged")
def keys_replayed_from_an_earlier_round():
    new_server().receive_keys(signed_keys(make_config(round=2), ALICE))


@expect_refusal("keys-repeated")
def the_mask_key_of_alice_under_the_name_of_bob():
    server = new_server()
    alice = signed_keys(make_config(), ALICE)
    server.receive_keys(alice)
    server.receive_keys(signed_keys(make_config(), BOB, mask_key=alice.mask_key))


@expect_refusal("keys-repeated")
def one_key_advertised_for_both_uses():
    key = signed_keys(make_config(), ALICE).mask_key
    new_server().receive_keys(signed_keys(make_config(), BOB, mask_key=key, sealing_key=key))


@expect_refusal("keys-repeated")
def half_a_key_of_alice_under_the_name_of_bob():
    server = new_server()
    alice, bob = (signed_keys(make_config(), name) for name in (ALICE, BOB))
    server.receive_keys(alice)
    mixed = bob.mask_key[:32] + alice.mask_key[32:]
    server.receive_keys(signed_keys(make_config(), BOB, mask_key=mixed))


@expect_refusal("keys-unusable")
def a_point_of_low_order():
    key = signed_keys(make_config(), BOB).mask_key
    for point in LOW_ORDER_POINTS[1:]:
        assert not keys.is_usable(point + key[32:])
    low_order = LOW_ORDER_POINTS[0] + key[32:]
    new_server().receive_keys(signed_keys(make_config(), BOB, mask_key=low_order))


@expect_refusal("keys-unusable")
def no_key_of_ml_kem():
    key = signed_keys(make_config(), BOB).sealing_key
    malformed = key[:32] + b"\xff" * 1184
    new_server().receive_keys(signed_keys(make_config(), BOB, sealing_key=malformed))


@expect_refusal("too-few-keys")
def too_few_keys():
    server = new_server()
    server.receive_keys(signed_keys(make_config(), ALICE))
    server.finish_advertise_keys()
