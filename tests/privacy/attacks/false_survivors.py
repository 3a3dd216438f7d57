"""The server sends a client a false survivor set or false consistency signatures."""

import dataclasses

from tests.privacy.attacks.large_cohort import LargeCohort
from tests.privacy.attacks.registry import ALICE, expect_refusal, round_until, without_members
from tests.privacy.protocol import (
    ProtocolRound,
    identity,
    names,
)

from isthmus_privacy.crypto.canonical import PositionSet
from isthmus_privacy.secagg.messages import ConsistencySignatures, Stage, Survivors

# -- the survivor set ----------------------------------------------------------------------------


def send_survivors(change, **changes):
    """Send Alice a changed survivor set."""
    protocol = round_until(Stage.CONSISTENCY_CHECK, **changes)
    protocol.clients[ALICE].sign_survivors(change(protocol.survivors))


@expect_refusal("survivors-other-roster")
def survivors_of_another_roster():
    send_survivors(lambda survivors: dataclasses.replace(survivors, roster_hash=bytes(32)))


@expect_refusal("survivors-owners-changed")
def changed_share_owners():
    send_survivors(
        lambda survivors: dataclasses.replace(
            survivors,
            share_owners=without_members(survivors.share_owners, 5),
            survivors=without_members(survivors.survivors, 5),
        )
    )


@expect_refusal("survivors-without-shares")
def a_survivor_without_shares():
    protocol = ProtocolRound(6, {"c00005": Stage.SHARE_KEYS}).until(Stage.CONSISTENCY_CHECK)
    all_clients = PositionSet(6, frozenset(range(6)))
    message = dataclasses.replace(protocol.survivors, survivors=all_clients)
    protocol.clients[ALICE].sign_survivors(message)


@expect_refusal("survivors-self-missing")
def own_vector_left_out():
    send_survivors(
        lambda survivors: dataclasses.replace(
            survivors, survivors=without_members(survivors.survivors, 1)
        )
    )


@expect_refusal("survivors-too-few")
def too_few_survivors():
    send_survivors(
        lambda survivors: dataclasses.replace(
            survivors, survivors=without_members(survivors.survivors, 0, 3, 4)
        )
    )


@expect_refusal("survivors-neighbours-missing")
def a_server_that_drops_the_neighbours_after_masking():
    cohort = LargeCohort()
    shares = cohort.client.share_keys(cohort.roster)
    cohort.client.mask_input(cohort.inbox(), cohort.encoded())
    missing = sorted(shares.neighbours.indices)[: cohort.dropouts]
    all_clients = PositionSet(len(cohort.names), frozenset(range(len(cohort.names))))
    cohort.client.sign_survivors(
        Survivors(
            cohort.roster.hash(cohort.config.hash),
            all_clients,
            without_members(all_clients, *missing),
        )
    )


# -- consistency signatures ----------------------------------------------------------------------


def send_signatures(change):
    """Send Alice changed consistency signatures."""
    protocol = round_until(Stage.UNMASKING)
    protocol.clients[ALICE].reveal_unmasking_shares(
        ConsistencySignatures(tuple(change(list(protocol.consistency_signatures.signatures))))
    )


@expect_refusal("quorum-signer-repeated")
def one_signature_counted_four_times():
    send_signatures(lambda signatures: signatures[:1] * 4)


@expect_refusal("quorum-signer-not-survivor")
def a_signature_of_a_dropped_client():
    protocol = ProtocolRound(6, {"c00005": Stage.MASKED_INPUT}).until(Stage.UNMASKING)
    dropouts = identity("c00005").sign("consistency-signature", *protocol.survivors.signed_fields())
    protocol.clients[ALICE].reveal_unmasking_shares(
        ConsistencySignatures((*protocol.consistency_signatures.signatures, (5, dropouts)))
    )


@expect_refusal("quorum-signature-forged")
def an_invented_signature():
    send_signatures(lambda signatures: [*signatures[:3], (3, bytes(64)), *signatures[4:]])


@expect_refusal("quorum-signature-forged")
def signatures_of_two_survivor_sets():
    """A server that sends two survivor sets, each to half of the clients, has no quorum."""
    protocol = round_until(Stage.CONSISTENCY_CHECK)
    other = dataclasses.replace(
        protocol.survivors, survivors=without_members(protocol.survivors.survivors, 5)
    )
    shown_to = {name: other if i % 2 else protocol.survivors for i, name in enumerate(names(5))}
    signatures = [
        (i, protocol.clients[name].sign_survivors(shown_to[name]).signature)
        for i, name in enumerate(names(5))
    ]
    protocol.clients[ALICE].reveal_unmasking_shares(ConsistencySignatures(tuple(signatures)))


@expect_refusal("quorum-too-small")
def fewer_than_the_quorum():
    send_signatures(lambda signatures: signatures[:3])


@expect_refusal("client-finished")
def a_second_unmasking():
    protocol = round_until(Stage.UNMASKING)
    protocol.reveal(ALICE)
    protocol.reveal(ALICE)


@expect_refusal("client-finished")
def a_message_after_a_refusal():
    protocol = round_until(Stage.UNMASKING)
    try:
        protocol.clients[ALICE].sign_survivors(protocol.survivors)
    except Exception:  # noqa: BLE001 - after any refusal the session must be over
        protocol.reveal(ALICE)


@expect_refusal("client-out-of-order")
def a_second_survivor_set():
    protocol = round_until(Stage.CONSISTENCY_CHECK)
    protocol.clients[ALICE].sign_survivors(protocol.survivors)
    other = dataclasses.replace(
        protocol.survivors, survivors=without_members(protocol.survivors.survivors, 3)
    )
    protocol.clients[ALICE].sign_survivors(other)


@expect_refusal("client-out-of-order")
def unmasking_before_the_consistency_check():
    protocol = round_until(Stage.CONSISTENCY_CHECK)
    protocol.clients[ALICE].reveal_unmasking_shares(ConsistencySignatures(()))
