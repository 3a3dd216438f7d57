"""Dishonest clients send invalid shares, vectors or signatures, or too few clients remain."""

import dataclasses
import functools
import hashlib

import torch
from tests.privacy.attacks.large_cohort import (
    LargeCohort,
    ring_neighbours,
    server_with_keys,
    signed_masked_input,
    signed_shares,
)
from tests.privacy.attacks.registry import ALICE, expect_refusal, round_until, without_members
from tests.privacy.protocol import (
    ProtocolRound,
    identity,
    make_config,
    names,
    resign,
)

from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.crypto.canonical import PositionSet
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.secagg.encoding import decode, encode
from isthmus_privacy.secagg.messages import ConsistencySignature, Stage, UnmaskingShares
from isthmus_privacy.secagg.ranges import Ranges, counts_of
from isthmus_privacy.slots import COMPRESSED_SLOTS, SCORING_SLOTS

# -- shares --------------------------------------------------------------------------------------


def send_shares(change, who=ALICE, sign=True):
    """Send a client's shares after a change."""
    protocol = round_until(Stage.SHARE_KEYS)
    changed = change(protocol.clients[who].share_keys(protocol.roster), protocol)
    protocol.server.receive_shares(resign(changed, who) if sign else changed)


@expect_refusal("shares-not-in-roster")
def shares_of_an_unknown_client():
    send_shares(lambda message, _: dataclasses.replace(message, name="stranger"))


@expect_refusal("shares-duplicate")
def shares_twice():
    protocol = round_until(Stage.SHARE_KEYS)
    message = protocol.clients[ALICE].share_keys(protocol.roster)
    for _ in range(2):
        protocol.server.receive_shares(message)


@expect_refusal("shares-other-roster")
def shares_for_another_roster():
    send_shares(lambda message, _: dataclasses.replace(message, roster_hash=bytes(32)))


@expect_refusal("shares-to-self")
def a_share_for_the_owner():
    def change(message, _):
        neighbours = PositionSet(6, message.neighbours.indices - {0} | {1})
        return dataclasses.replace(message, neighbours=neighbours)

    send_shares(change)


@expect_refusal("shares-wrong-degree")
def too_few_neighbours():
    def change(message, _):
        return dataclasses.replace(
            message, neighbours=without_members(message.neighbours, 0), sealed=message.sealed[1:]
        )

    send_shares(change)


@expect_refusal("shares-wrong-count")
def a_neighbour_without_a_share():
    send_shares(lambda message, _: dataclasses.replace(message, sealed=message.sealed[1:]))


@expect_refusal("shares-forged")
def shares_that_alice_did_not_sign():
    def change(message, _):
        return dataclasses.replace(message, seed_commitment=bytes(32))

    send_shares(change, sign=False)


@expect_refusal("too-few-owners")
def too_few_share_owners():
    ProtocolRound(6, dict.fromkeys(names(6)[:3], Stage.SHARE_KEYS)).run()


@expect_refusal("owners-below-threshold")
def a_neighbourhood_that_drops_out_before_masking():
    cohort = LargeCohort()
    server = server_with_keys(cohort)
    for position in range(len(cohort.names) - cohort.dropouts):
        server.receive_shares(signed_shares(cohort, position, ring_neighbours(cohort, position)))
    server.finish_share_keys()


@expect_refusal("survivors-below-threshold")
def a_neighbourhood_that_drops_out_before_the_sum():
    cohort = LargeCohort()
    server = server_with_keys(cohort)
    count = len(cohort.names)
    for position in range(count):
        server.receive_shares(signed_shares(cohort, position, ring_neighbours(cohort, position)))
    server.finish_share_keys()
    payload = bytes(cohort.config.payload_bytes)
    for position in range(count - cohort.dropouts):
        offsets = range(1, cohort.graph.degree + 1)
        partners = {(position + i) % count for i in offsets} | {
            (position - i) % count for i in offsets
        }
        server.receive_masked_input(
            signed_masked_input(cohort, position, partners, payload), payload
        )
    server.finish_masked_input()


# -- masked vectors ------------------------------------------------------------------------------


def send_masked_input(change, who=ALICE, sign=True):
    """Send a client's masked vector after a change."""
    protocol = round_until(Stage.MASKED_INPUT)
    message, payload = protocol.mask(who)
    message, payload = change(message, payload)
    protocol.server.receive_masked_input(resign(message, who) if sign else message, payload)


@expect_refusal("masked-without-shares")
def a_vector_of_a_client_without_shares():
    protocol = ProtocolRound(6, {"c00005": Stage.SHARE_KEYS}).until(Stage.MASKED_INPUT)
    message, payload = protocol.mask(ALICE)
    forged = resign(dataclasses.replace(message, name="c00005"), "c00005")
    protocol.server.receive_masked_input(forged, payload)


@expect_refusal("masked-duplicate")
def a_vector_twice():
    protocol = round_until(Stage.MASKED_INPUT)
    message, payload = protocol.mask(ALICE)
    for _ in range(2):
        protocol.server.receive_masked_input(message, payload)


@expect_refusal("masked-other-roster")
def a_vector_for_another_roster():
    send_masked_input(
        lambda message, payload: (dataclasses.replace(message, roster_hash=bytes(32)), payload)
    )


@expect_refusal("masked-forged")
def a_vector_that_alice_did_not_sign():
    other = bytes(make_config().payload_bytes)
    digest = hashlib.sha256(other).digest()
    send_masked_input(
        lambda message, _: (dataclasses.replace(message, sha256=digest), other), sign=False
    )


@expect_refusal("masked-wrong-partners")
def masks_with_too_few_partners():
    def change(message, payload):
        return dataclasses.replace(message, partners=without_members(message.partners, 0)), payload

    send_masked_input(change)


@expect_refusal("masked-wrong-length")
def a_vector_that_is_too_long():
    def change(message, payload):
        longer = payload + bytes(4)
        digest = hashlib.sha256(longer).digest()
        return dataclasses.replace(message, length=len(longer), sha256=digest), longer

    send_masked_input(change)


@expect_refusal("masked-corrupt")
def a_vector_changed_in_transit():
    send_masked_input(lambda message, payload: (message, bytes([payload[0] ^ 1]) + payload[1:]))


@expect_refusal("too-few-masked")
def too_few_vectors():
    ProtocolRound(6, dict.fromkeys(names(6)[:3], Stage.MASKED_INPUT)).run()


# -- consistency signatures and unmasking shares -------------------------------------------------


@expect_refusal("consistency-not-survivor")
def a_signature_of_a_dropped_client():
    protocol = ProtocolRound(6, {"c00005": Stage.MASKED_INPUT}).until(Stage.CONSISTENCY_CHECK)
    signature = identity("c00005").sign(
        "consistency-signature", *protocol.survivors.signed_fields()
    )
    protocol.server.receive_consistency_signature(ConsistencySignature("c00005", signature))


@expect_refusal("consistency-duplicate")
def a_signature_twice():
    protocol = round_until(Stage.CONSISTENCY_CHECK)
    signature = protocol.clients[ALICE].sign_survivors(protocol.survivors)
    for _ in range(2):
        protocol.server.receive_consistency_signature(signature)


@expect_refusal("consistency-forged")
def a_signature_of_another_survivor_set():
    protocol = round_until(Stage.CONSISTENCY_CHECK)
    other = dataclasses.replace(
        protocol.survivors, survivors=without_members(protocol.survivors.survivors, 5)
    )
    protocol.server.receive_consistency_signature(protocol.clients[ALICE].sign_survivors(other))


@expect_refusal("too-few-signatures")
def too_few_signatures():
    ProtocolRound(6, dict.fromkeys(names(6)[:3], Stage.CONSISTENCY_CHECK)).run()


def send_unmasking_shares(change, who=ALICE, sign=True, dropouts=None):
    """Send a client's unmasking shares after a change, then the other clients'."""
    protocol = ProtocolRound(6, dropouts).until(Stage.UNMASKING)
    changed = change(protocol.reveal(who))
    cohort = protocol.server._cohort
    protocol.server.receive_unmasking_shares(resign(changed, who, cohort.hash) if sign else changed)
    for name in protocol.active(Stage.UNMASKING):
        if name != who:
            protocol.server.receive_unmasking_shares(protocol.reveal(name))
    protocol.server.unmask()


@expect_refusal("unmasking-not-survivor")
def unmasking_shares_of_a_dropped_client():
    protocol = ProtocolRound(6, {"c00005": Stage.MASKED_INPUT}).until(Stage.UNMASKING)
    revealed = protocol.reveal(ALICE)
    forged = dataclasses.replace(revealed, name="c00005")
    protocol.server.receive_unmasking_shares(resign(forged, "c00005", protocol.server._cohort.hash))


@expect_refusal("unmasking-duplicate")
def unmasking_shares_twice():
    protocol = round_until(Stage.UNMASKING)
    revealed = protocol.reveal(ALICE)
    for _ in range(2):
        protocol.server.receive_unmasking_shares(revealed)


@expect_refusal("unmasking-forged")
def unmasking_shares_that_alice_did_not_sign():
    send_unmasking_shares(
        lambda revealed: dataclasses.replace(revealed, signature=bytes(64)), sign=False
    )


@expect_refusal("unmasking-wrong-owners")
def an_unmasking_share_withheld():
    send_unmasking_shares(
        lambda revealed: dataclasses.replace(revealed, shares=revealed.shares[1:])
    )


@expect_refusal("too-few-shares")
def too_few_unmasking_shares():
    ProtocolRound(6, dict.fromkeys(names(6)[:3], Stage.UNMASKING)).run()


def with_wrong_share(revealed: UnmaskingShares, of: int) -> UnmaskingShares:
    shares = dict(revealed.shares)
    shares[of] = bytes(36)
    return dataclasses.replace(revealed, shares=tuple(sorted(shares.items())))


@expect_refusal("seed-mismatch")
def a_wrong_share_of_a_seed():
    send_unmasking_shares(functools.partial(with_wrong_share, of=2))


@expect_refusal("key-mismatch")
def a_wrong_share_of_a_mask_key():
    send_unmasking_shares(
        functools.partial(with_wrong_share, of=5), dropouts={"c00005": Stage.MASKED_INPUT}
    )


@expect_refusal("mask-part-mismatch")
def a_part_of_a_mask_that_cannot_be_decrypted():
    """Alice seals garbage for a client that is lost before it could notice."""
    protocol = ProtocolRound(6, {"c00005": Stage.MASKED_INPUT}).until(Stage.SHARE_KEYS)
    share_keys = protocol.clients[ALICE].share_keys

    def with_garbage(roster):
        message = share_keys(roster)
        assert message.sealed_for(5) == message.sealed[-1]
        sealed = (*message.sealed[:-1], bytes(len(message.sealed[-1])))
        return resign(dataclasses.replace(message, sealed=sealed), ALICE)

    protocol.clients[ALICE].share_keys = with_garbage
    protocol.share_keys().mask_inputs().check_consistency().reveal_shares().server.unmask()


@expect_refusal("sum-out-of-range")
def a_vector_beyond_the_agreed_range():
    protocol = round_until(Stage.MASKED_INPUT)
    for name in names(6):
        encoded = protocol.encoded(name)
        if name == ALICE:
            encoded.vector[0] = 2_500_000_000 - 2**32  # honest sums end at 6 x 2^28
        message, payload = protocol.mask(name, encoded)
        protocol.server.receive_masked_input(message, payload)
    protocol.survivors = protocol.server.finish_masked_input()
    total = protocol.check_consistency().reveal_shares().server.unmask()
    decode(protocol.config, total.vector, clients=6)


@expect_refusal("sum-out-of-range")
def a_weight_beyond_the_agreed_range():
    total = encode(make_config(), torch.zeros(4), weight=10).vector
    total[4] = 11
    decode(make_config(), total, clients=1)


@expect_refusal("sum-out-of-range")
def an_element_that_is_larger_than_the_weight_allows():
    """It fits what twenty devices can have with the largest weight, and these have less."""
    config = make_config(clients_max=20, weight_max=100)
    vectors = [encode(config, torch.ones(4), weight=20).vector for _ in range(20)]
    total = sum(vectors)
    total[0] += 2 * config.levels
    decode(config, total, clients=20)


@expect_refusal("sum-out-of-range")
def a_weight_that_cancels_those_of_the_others():
    """The mean of their updates would be 400 times as large."""
    config = make_config(clients_max=20, weight_max=100)
    total = sum(encode(config, torch.ones(4), weight=20).vector for _ in range(20))
    total[4] = 1
    decode(config, total, clients=20)


@expect_refusal("sum-out-of-range")
def a_weight_below_that_of_a_usable_vector():
    """All have said that theirs are usable, and one of them that it weighs nothing."""
    config = make_config(weight_max=1, slots=SCORING_SLOTS)
    vectors = [encode(config, torch.ones(4), weight=1, figures={"unusable": 0}) for _ in range(6)]
    total = sum(each.vector for each in vectors)
    decode(config, total, clients=6)
    total[4] -= 1
    decode(config, total, clients=6)


@expect_refusal("weight-not-of-ranges")
def a_weight_that_cancels_those_of_the_others_where_the_updates_are_small():
    config = make_config(clients_max=20, weight_max=100)
    update = torch.full((4,), 1e-3)
    counts = sum(counts_of(update, [update], weight=20) for _ in range(20))
    total = sum(encode(config, update, weight=20).vector for _ in range(20))
    total[4] = 20  # as much as 20 updates have at least
    decode(config, total, clients=20, ranges=Ranges.of(counts, 20))


@expect_refusal("sum-out-of-range")
def an_update_that_is_not_clipped_before_its_noise():
    noise = DistributedNoise.fit(clip=1.0, multiplier=0.1, honest=4, clients=6, size=4, bits=32)
    config = make_config(weight_max=1, noise=noise)
    vectors = [encode(config, torch.zeros(4), weight=1).vector for _ in range(6)]
    total = sum(vectors)
    total[0] += int(20 * noise.clip * noise.scale)
    decode(config, total, clients=6)


@expect_refusal("sum-out-of-range")
def a_magnitude_beyond_the_agreed_range():
    codec = UpdateCodec(one_in=2, bits=3)
    fields = {"codec": codec, "bits": 6, "levels": codec.highest, "slots": COMPRESSED_SLOTS}
    config = make_config(**fields)
    figures = {
        "loss": 0.5,
        "magnitude": -9.0,
        "other_weight": 0,
        "over_range": 0,
        "over_weight": 0,
        "unusable": 0,
    }
    ring = encode(config, torch.zeros(config.size), weight=10, figures=figures).ring
    decode(config, ring.elements, ring.figures, clients=1)
    ring.figures[3] += 2**30  # after the weight, the clipped fraction and the loss
    decode(config, ring.elements, ring.figures, clients=1)


@expect_refusal("zero-total-weight")
def no_client_has_any_examples():
    config = make_config(weight_max=1, slots=SCORING_SLOTS)
    vector = encode(config, torch.zeros(4), weight=0, figures={"unusable": 1}).vector
    decode(config, vector, clients=1)
