"""Malformed messages, and clients with a false identity."""

import dataclasses

from tests.privacy.attacks.registry import ALICE, BOB, expect_refusal
from tests.privacy.protocol import (
    AUTHORITY,
    FAR_FUTURE,
    ProtocolRound,
    enrolment,
    identity,
    make_client,
    make_config,
)

from isthmus_privacy.crypto.canonical import PositionSet, tagged
from isthmus_privacy.secagg.identity import Authority, Directory
from isthmus_privacy.secagg.messages import ConsistencySignature, Roster, Survivors
from isthmus_privacy.secagg.server import ServerSession
from isthmus_privacy.slots import Slot

# -- bytes ---------------------------------------------------------------------------------------

SET = PositionSet(12, frozenset({0, 5, 11}))
SURVIVORS = Survivors(bytes(32), SET, SET)


@expect_refusal("message-truncated")
def a_truncated_message():
    Survivors.from_bytes(SURVIVORS.to_bytes()[:-1])


@expect_refusal("message-trailing")
def trailing_bytes():
    Survivors.from_bytes(SURVIVORS.to_bytes() + b"\0")


@expect_refusal("message-oversized")
def a_list_of_four_billion_items():
    Roster.from_bytes(tagged("roster") + b"\xff\xff\xff\xff")


@expect_refusal("message-not-canonical")
def bits_beyond_the_roster():
    data = bytearray(SURVIVORS.to_bytes())
    data[-1] |= 0x10  # the roster has 12 clients; this is bit 12
    Survivors.from_bytes(bytes(data))


@expect_refusal("message-not-canonical")
def a_boolean_of_two():
    Slot.from_bytes(Slot(name="n", maximum=1.0, exact=True).to_bytes()[:-1] + b"\2")


@expect_refusal("message-not-canonical")
def a_name_that_is_not_text():
    ConsistencySignature.from_bytes(
        ConsistencySignature("Ada", bytes(64)).to_bytes().replace(b"Ada", b"\xff\xfe\xfd")
    )


@expect_refusal("message-wrong-kind")
def a_message_of_another_kind():
    ConsistencySignature.from_bytes(SURVIVORS.to_bytes())


# -- enrolment -----------------------------------------------------------------------------------


def server_with(directory):
    return ServerSession(make_config(), directory)


@expect_refusal("enrolment-forged")
def a_client_of_another_authority():
    forged = Authority().enrol(ALICE, identity(ALICE).public, not_after=FAR_FUTURE)
    client = make_client(make_config(), ALICE, enrolment=forged)
    server_with(Directory(AUTHORITY.public)).receive_keys(client.advertise_keys())


@expect_refusal("enrolment-forged")
def a_stolen_enrolment():
    stolen = dataclasses.replace(enrolment(ALICE), identity_key=identity(BOB).public)
    client = make_client(make_config(), ALICE, enrolment=stolen, identity=identity(BOB))
    server_with(Directory(AUTHORITY.public)).receive_keys(client.advertise_keys())


@expect_refusal("enrolment-revoked")
def a_revoked_client_in_the_roster():
    directory = Directory(AUTHORITY.public, revoked={identity(BOB).public})
    protocol = ProtocolRound(
        6, clients={ALICE: make_client(make_config(), ALICE, directory=directory)}
    )
    protocol.advertise_keys().clients[ALICE].share_keys(protocol.roster)


@expect_refusal("enrolment-expired")
def an_expired_client():
    directory = Directory(AUTHORITY.public, now=lambda: FAR_FUTURE + 1)
    server_with(directory).receive_keys(make_client(make_config(), ALICE).advertise_keys())
