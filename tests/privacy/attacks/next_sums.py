"""A server, or a client, that lies about the next sum of a set-up for two."""

import dataclasses

from tests.privacy.attacks.registry import ALICE, BOB, expect_refusal, without_members
from tests.privacy.protocol import (
    NextRound,
    ProtocolRound,
    first_of_two,
    identity,
    make_client,
    make_config,
    names,
    resign,
)

from isthmus_privacy.crypto.canonical import PositionSet
from isthmus_privacy.secagg.cohort import Cohort
from isthmus_privacy.secagg.config import SetUpBefore, SetUpForTwo
from isthmus_privacy.secagg.messages import ConsistencySignatures, Stage

LOST = "c00005"

# -- the configuration ---------------------------------------------------------------------------


@expect_refusal("config-set-up-differs")
def keys_of_a_sum_that_the_client_was_not_in():
    first = first_of_two()
    make_client(make_config(run_id="next", set_up=SetUpBefore(first.config.hash)), ALICE)


@expect_refusal("config-set-up-differs")
def a_set_up_of_its_own_after_another():
    first = first_of_two()
    make_client(make_config(run_id="next"), ALICE, before=first.clients[ALICE])


@expect_refusal("config-set-up-differs")
def keys_of_another_sum():
    config = NextRound(first_of_two()).config
    make_client(config, ALICE, before=first_of_two(attempt=1).clients[ALICE])


@expect_refusal("config-set-up-differs")
def a_set_up_that_was_for_one_sum():
    first = ProtocolRound(6)
    first.run()
    config = make_config(run_id="next", set_up=SetUpBefore(first.config.hash))
    make_client(config, ALICE, before=first.clients[ALICE])


def follow_with(**changes):
    """Have Alice follow a sum with a changed configuration."""
    first = first_of_two()
    config = dataclasses.replace(NextRound(first).config, **changes)
    make_client(config, ALICE, before=first.clients[ALICE])


@expect_refusal("config-set-up-differs")
def fewer_survivors_in_the_next_sum():
    follow_with(clients_min=2)


@expect_refusal("config-set-up-differs")
def a_next_sum_in_another_attempt():
    follow_with(attempt=7)


@expect_refusal("config-set-up-differs")
def a_third_sum():
    """The next one is not set up for another."""
    first = first_of_two()
    second = NextRound(first)
    second.run()
    config = make_config(run_id="third", set_up=SetUpBefore(second.config.hash))
    make_client(config, ALICE, before=second.clients[ALICE])


@expect_refusal("set-up-not-usable")
def a_next_sum_before_anybody_has_signed_who_is_in_the_first():
    protocol = ProtocolRound(6, set_up=SetUpForTwo()).until(Stage.UNMASKING)
    config = make_config(run_id="next", set_up=SetUpBefore(protocol.config.hash))
    make_client(config, ALICE, before=protocol.clients[ALICE])


@expect_refusal("set-up-not-usable")
def a_next_sum_after_one_that_was_refused():
    protocol = ProtocolRound(6, set_up=SetUpForTwo()).until(Stage.UNMASKING)
    alice = protocol.clients[ALICE]
    try:
        alice.reveal_unmasking_shares(ConsistencySignatures(()))
    except Exception:  # noqa: BLE001 - after any refusal the secrets must be gone
        config = make_config(run_id="next", set_up=SetUpBefore(protocol.config.hash))
        make_client(config, ALICE, before=alice)


@expect_refusal("set-up-not-usable")
def two_next_sums_with_one_set_up():
    """Their masks would be opened by different survivors."""
    protocol = NextRound(first_of_two())
    other = dataclasses.replace(protocol.config, run_id="other")
    make_client(other, ALICE, before=protocol.first.clients[ALICE])


# -- the sum -------------------------------------------------------------------------------------


@expect_refusal("survivors-without-shares")
def a_survivor_that_was_lost_in_the_first_sum():
    """Its mask secret is known by then."""
    protocol = NextRound(first_of_two(6, {LOST: Stage.MASKED_INPUT})).mask_inputs()
    everybody = PositionSet(6, frozenset(range(6)))
    protocol.clients[ALICE].sign_survivors(
        dataclasses.replace(protocol.survivors, survivors=everybody)
    )


@expect_refusal("survivors-owners-changed")
def other_share_owners_than_are_in_the_first_sum():
    protocol = NextRound(first_of_two(6, {LOST: Stage.MASKED_INPUT})).mask_inputs()
    everybody = PositionSet(6, frozenset(range(6)))
    protocol.clients[ALICE].sign_survivors(
        dataclasses.replace(protocol.survivors, share_owners=everybody)
    )


@expect_refusal("survivors-other-roster")
def the_survivors_of_the_first_sum():
    first = first_of_two()
    protocol = NextRound(first).mask_inputs()
    protocol.clients[ALICE].sign_survivors(first.survivors)


@expect_refusal("quorum-signature-forged")
def the_signatures_of_the_first_sum():
    first = first_of_two()
    protocol = NextRound(first).mask_inputs().check_consistency()
    protocol.clients[ALICE].reveal_unmasking_shares(first.quorum)


@expect_refusal("quorum-signature-forged")
def signatures_for_two_configurations_of_the_next_sum():
    """Half of the clients are asked for another encoding."""
    first = first_of_two()
    protocol = NextRound(first)
    other = NextRound(first_of_two(), size=6)
    config = dataclasses.replace(other.config, set_up=protocol.config.set_up)
    cohort = first.server._cohort.followed_by(config)
    protocol.mask_inputs()
    shown = dataclasses.replace(protocol.survivors, roster_hash=cohort.hash)
    signed = [shown if number % 2 else protocol.survivors for number in range(6)]
    tag = "consistency-signature"
    signatures = tuple(
        (number, identity(name).sign(tag, *signed[number].signed_fields()))
        for number, name in enumerate(names(6))
    )
    alice = protocol.clients[ALICE]
    alice.sign_survivors(protocol.survivors)
    alice.reveal_unmasking_shares(ConsistencySignatures(signatures))


@expect_refusal("client-out-of-order")
def a_new_set_up_in_the_next_sum():
    NextRound(first_of_two()).clients[ALICE].advertise_keys()


# -- dishonest clients ---------------------------------------------------------------------------


@expect_refusal("inbox-share-tampered")
def a_part_of_the_next_mask_that_is_not_the_one_committed_to():
    protocol = ProtocolRound(6, set_up=SetUpForTwo()).until(Stage.SHARE_KEYS)
    commitment = Cohort.next_part_commitment
    Cohort.next_part_commitment = lambda self, *args: bytes(32)
    try:
        shares = protocol.clients[BOB].share_keys(protocol.roster)
    finally:
        Cohort.next_part_commitment = commitment
    protocol.server.receive_shares(shares)
    for name in names(6):
        if name != BOB:
            protocol.server.receive_shares(protocol.clients[name].share_keys(protocol.roster))
    protocol.server.finish_share_keys()
    protocol.inboxes = {ALICE: protocol.server.inbox(ALICE)}
    protocol.mask(ALICE)


@expect_refusal("masked-wrong-parts")
def parts_of_fewer_masks():
    protocol = ProtocolRound(6, set_up=SetUpForTwo()).until(Stage.MASKED_INPUT)
    message, payload = protocol.mask(ALICE)
    shorter = dataclasses.replace(message, next_parts=message.next_parts[32:])
    protocol.server.receive_masked_input(resign(shorter, ALICE), payload)


def after_false_parts(seal):
    """The next sum without a client that has left other parts of its masks than it received."""
    first = ProtocolRound(6, set_up=SetUpForTwo())
    first.until(Stage.MASKED_INPUT)
    cohort = first.server._cohort
    client = first.clients[LOST]
    secret = client._next.secret
    message, payload = client.mask_input(first.inboxes[LOST], first.encoded(LOST))
    false = dataclasses.replace(message, next_parts=seal(cohort, secret))
    first.server.receive_masked_input(resign(false, LOST), payload)
    for name in names(5):
        first.server.receive_masked_input(*first.mask(name))
    first.survivors = first.server.finish_masked_input()
    first.check_consistency().reveal_shares().server.unmask()
    NextRound(first, {LOST: Stage.MASKED_INPUT}).run()


@expect_refusal("next-parts-mismatch")
def parts_that_nobody_can_decrypt():
    after_false_parts(lambda cohort, secret: bytes(28 + 5 * 32))


@expect_refusal("next-part-mismatch")
def other_parts_than_were_received():
    parts = dict.fromkeys(range(5), bytes(32))
    after_false_parts(lambda cohort, secret: cohort.seal_next_parts(5, secret, parts))


def reveal_a_wrong_share(of, dropouts=None):
    """Alice reveals a wrong share of a client's secret in the next sum."""
    protocol = NextRound(first_of_two(), dropouts).until(Stage.UNMASKING)
    for name in protocol.active(Stage.UNMASKING):
        message = protocol.reveal(name)
        if name == ALICE:
            shares = tuple(
                (owner, bytes(36) if owner == of else share) for owner, share in message.shares
            )
            message = dataclasses.replace(message, shares=shares)
            message = resign(message, ALICE, protocol.server._cohort.hash)
        protocol.server.receive_unmasking_shares(message)
    protocol.server.unmask()


@expect_refusal("next-seed-mismatch")
def a_wrong_share_of_a_seed_of_the_next_sum():
    reveal_a_wrong_share(of=2)


@expect_refusal("next-secret-mismatch")
def a_wrong_share_of_a_secret_of_the_next_sum():
    reveal_a_wrong_share(of=5, dropouts={LOST: Stage.MASKED_INPUT})


@expect_refusal("unmasking-wrong-owners")
def a_share_of_a_client_that_was_lost_in_the_first_sum():
    protocol = NextRound(first_of_two(6, {LOST: Stage.MASKED_INPUT})).until(Stage.UNMASKING)
    message = protocol.reveal(ALICE)
    more = dataclasses.replace(message, shares=(*message.shares, (5, bytes(36))))
    protocol.server.receive_unmasking_shares(resign(more, ALICE, protocol.server._cohort.hash))


@expect_refusal("masked-without-shares")
def a_vector_of_a_client_that_was_lost_in_the_first_sum():
    protocol = NextRound(first_of_two(6, {LOST: Stage.MASKED_INPUT}))
    message, payload = protocol.mask(ALICE)
    forged = resign(dataclasses.replace(message, name=LOST), LOST)
    protocol.server.receive_masked_input(forged, payload)


@expect_refusal("masked-wrong-partners")
def masks_of_the_next_sum_with_too_few_partners():
    protocol = NextRound(first_of_two())
    message, payload = protocol.mask(ALICE)
    fewer = dataclasses.replace(message, partners=without_members(message.partners, 0))
    protocol.server.receive_masked_input(resign(fewer, ALICE), payload)
