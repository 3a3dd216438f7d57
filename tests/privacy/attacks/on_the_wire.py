"""What a liar sends as a message, and who it says it is."""

import dataclasses

from parties import (
    AUTHORITY,
    FAR,
    Parties,
    enrolment,
    identity,
    make_client,
    make_config,
)

from attacks.registry import ALICE, BOB, meets
from isthmus_privacy.crypto.canonical import Members, tagged
from isthmus_privacy.secagg import (
    Authority,
    ConsistencySignature,
    Directory,
    Roster,
    ServerSession,
    Slot,
    Survivors,
)

# -- bytes ---------------------------------------------------------------------------------------

SET = Members(12, frozenset({0, 5, 11}))
SURVIVORS = Survivors(bytes(32), SET, SET)


@meets("message-truncated")
def half_a_message():
    Survivors.from_bytes(SURVIVORS.to_bytes()[:-1])


@meets("message-trailing")
def a_message_and_more():
    Survivors.from_bytes(SURVIVORS.to_bytes() + b"\0")


@meets("message-oversized")
def a_list_without_end():
    Roster.from_bytes(tagged("roster") + b"\xff\xff\xff\xff")


@meets("message-not-canonical")
def bits_beyond_the_roster():
    data = bytearray(SURVIVORS.to_bytes())
    data[-1] |= 0x10  # the roster has 12 clients; this is bit 12
    Survivors.from_bytes(bytes(data))


@meets("message-not-canonical")
def a_flag_of_two():
    Slot.from_bytes(Slot(name="n", maximum=1.0, exact=True).to_bytes()[:-1] + b"\2")


@meets("message-not-canonical")
def a_name_that_is_not_text():
    ConsistencySignature.from_bytes(
        ConsistencySignature("Ada", bytes(64)).to_bytes().replace(b"Ada", b"\xff\xfe\xfd")
    )


@meets("message-wrong-kind")
def one_kind_for_another():
    ConsistencySignature.from_bytes(SURVIVORS.to_bytes())


# -- enrolment -----------------------------------------------------------------------------------


def server_of(believes):
    return ServerSession(make_config(), believes)


@meets("enrolment-forged")
def a_sybil_of_another_authority():
    forged = Authority().enrol(ALICE, identity(ALICE).public, not_after=FAR)
    client = make_client(make_config(), ALICE, enrolment=forged)
    server_of(Directory(AUTHORITY.public)).take_advert(client.advertise())


@meets("enrolment-forged")
def a_name_on_a_key_it_was_not_given():
    stolen = dataclasses.replace(enrolment(ALICE), identity_key=identity(BOB).public)
    client = make_client(make_config(), ALICE, enrolment=stolen, identity=identity(BOB))
    server_of(Directory(AUTHORITY.public)).take_advert(client.advertise())


@meets("enrolment-revoked")
def a_revoked_client_in_the_roster():
    believes = Directory(AUTHORITY.public, revoked={identity(BOB).public})
    parties = Parties(6, clients={ALICE: make_client(make_config(), ALICE, directory=believes)})
    parties.advertise().clients[ALICE].deal(parties.roster)


@meets("enrolment-expired")
def an_expired_client():
    late = Directory(AUTHORITY.public, now=lambda: FAR + 1)
    server_of(late).take_advert(make_client(make_config(), ALICE).advertise())
