"""Clients that lie to the server."""

import dataclasses
import functools
import hashlib

import torch
from parties import (
    Parties,
    directory,
    identity,
    make_config,
    names,
    paper_advert,
    resign,
)

from attacks.crowd import Crowd, crowded_server, masked_on_paper, paper_shares, ring_neighbours
from attacks.registry import ALICE, BOB, meets, until, without
from isthmus_privacy.crypto.canonical import Members
from isthmus_privacy.secagg import (
    ConsistencySignature,
    ServerSession,
    ServerStage,
    UnmaskingShares,
    decode,
    encode,
)

# -- the server, of the first message ------------------------------------------------------------


def fresh(config=None, **changes):
    return ServerSession(config or make_config(), directory(), **changes)


@meets("server-out-of-order")
def keys_after_the_roster_is_closed():
    parties = Parties(6, {BOB: ServerStage.ADVERTS}).advertise()
    parties.server.take_advert(parties.clients[BOB].advertise())


@meets("server-out-of-order")
def a_vector_after_the_survivors_are_named():
    parties = until(ServerStage.CONSENTS)
    parties.server.take_masked(*parties.masked[BOB])


@meets("advert-uninvited")
def a_client_that_was_not_invited():
    fresh(invited=[ALICE]).take_advert(paper_advert(make_config(), BOB))


@meets("advert-duplicate")
def keys_twice():
    server = fresh()
    for _ in range(2):
        server.take_advert(paper_advert(make_config(), ALICE))


@meets("advert-too-many")
def more_clients_than_the_bit_budget():
    server = fresh()
    for name in names(7):
        server.take_advert(paper_advert(make_config(), name))


@meets("advert-forged")
def keys_that_alice_did_not_sign():
    forged = dataclasses.replace(paper_advert(make_config(), ALICE), mask_key=bytes([9]) * 32)
    fresh().take_advert(forged)


@meets("advert-forged")
def keys_replayed_from_an_earlier_round():
    fresh().take_advert(paper_advert(make_config(round=2), ALICE))


@meets("advert-repeated-key")
def alice_s_mask_key_under_bob_s_name():
    server = fresh()
    alice = paper_advert(make_config(), ALICE)
    server.take_advert(alice)
    server.take_advert(paper_advert(make_config(), BOB, mask_key=alice.mask_key))


@meets("advert-repeated-key")
def one_key_advertised_for_both_uses():
    key = paper_advert(make_config(), ALICE).mask_key
    fresh().take_advert(paper_advert(make_config(), BOB, mask_key=key, sealing_key=key))


@meets("too-few-adverts")
def hardly_anybody_came():
    server = fresh()
    server.take_advert(paper_advert(make_config(), ALICE))
    server.roster()


# -- the server, of shares -----------------------------------------------------------------------


def dealt(change, who=ALICE, sign=True):
    """Bob's or Alice's shares come changed."""
    parties = until(ServerStage.SHARES)
    changed = change(parties.clients[who].deal(parties.roster), parties)
    parties.server.take_shares(resign(changed, who) if sign else changed)


@meets("shares-stranger")
def shares_of_a_stranger():
    dealt(lambda message, _: dataclasses.replace(message, name="stranger"))


@meets("shares-duplicate")
def shares_twice():
    parties = until(ServerStage.SHARES)
    message = parties.clients[ALICE].deal(parties.roster)
    for _ in range(2):
        parties.server.take_shares(message)


@meets("shares-other-roster")
def shares_for_another_roster():
    dealt(lambda message, _: dataclasses.replace(message, roster_hash=bytes(32)))


@meets("shares-to-self")
def shares_to_oneself():
    def change(message, _):
        neighbours = Members(6, message.neighbours.indices - {0} | {1})
        return dataclasses.replace(message, neighbours=neighbours)

    dealt(change)


@meets("shares-wrong-degree")
def too_few_neighbours():
    def change(message, _):
        return dataclasses.replace(
            message, neighbours=without(message.neighbours, 0), sealed=message.sealed[1:]
        )

    dealt(change)


@meets("shares-wrong-count")
def a_neighbour_without_a_share():
    dealt(lambda message, _: dataclasses.replace(message, sealed=message.sealed[1:]))


@meets("shares-forged")
def shares_that_alice_did_not_sign():
    def change(message, _):
        return dataclasses.replace(message, seed_commitment=bytes(32))

    dealt(change, sign=False)


@meets("too-few-dealers")
def hardly_anybody_dealt():
    Parties(6, dict.fromkeys(names(6)[:3], ServerStage.SHARES)).run()


@meets("dealers-cut-off")
def a_neighbourhood_that_is_lost_before_masking():
    crowd = Crowd()
    server = crowded_server(crowd)
    for position in range(len(crowd.names) - crowd.gone):
        server.take_shares(paper_shares(crowd, position, ring_neighbours(crowd, position)))
    server.inboxes()


@meets("survivors-cut-off")
def a_neighbourhood_that_is_lost_before_the_sum():
    crowd = Crowd()
    server = crowded_server(crowd)
    count = len(crowd.names)
    for position in range(count):
        server.take_shares(paper_shares(crowd, position, ring_neighbours(crowd, position)))
    server.inboxes()
    payload = bytes(crowd.config.payload_bytes)
    for position in range(count - crowd.gone):
        near = range(1, crowd.hood.degree + 1)
        partners = {(position + i) % count for i in near} | {(position - i) % count for i in near}
        server.take_masked(masked_on_paper(crowd, position, partners, payload), payload)
    server.survivors()


# -- the server, of masked vectors ---------------------------------------------------------------


def sent(change, who=ALICE, sign=True):
    """Alice's masked vector comes changed; the others' are there already, Bob's excepted."""
    parties = until(ServerStage.MASKED)
    message, payload = parties.clients[who].mask(parties.inboxes[who], parties.encoded(who))
    message, payload = change(message, payload)
    parties.server.take_masked(resign(message, who) if sign else message, payload)


@meets("masked-stranger")
def a_vector_of_somebody_who_dealt_nothing():
    parties = Parties(6, {"c00005": ServerStage.SHARES}).until(ServerStage.MASKED)
    message, payload = parties.clients[ALICE].mask(parties.inboxes[ALICE], parties.encoded(ALICE))
    forged = resign(dataclasses.replace(message, name="c00005"), "c00005")
    parties.server.take_masked(forged, payload)


@meets("masked-duplicate")
def a_vector_twice():
    parties = until(ServerStage.MASKED)
    message, payload = parties.clients[ALICE].mask(parties.inboxes[ALICE], parties.encoded(ALICE))
    for _ in range(2):
        parties.server.take_masked(message, payload)


@meets("masked-other-roster")
def a_vector_for_another_roster():
    sent(lambda message, payload: (dataclasses.replace(message, roster_hash=bytes(32)), payload))


@meets("masked-forged")
def a_vector_that_alice_did_not_sign():
    other = bytes(make_config().payload_bytes)
    digest = hashlib.sha256(other).digest()
    sent(lambda message, _: (dataclasses.replace(message, sha256=digest), other), sign=False)


@meets("masked-wrong-partners")
def masks_with_too_few_partners():
    def change(message, payload):
        return dataclasses.replace(message, partners=without(message.partners, 0)), payload

    sent(change)


@meets("masked-wrong-length")
def a_vector_that_is_too_long():
    def change(message, payload):
        longer = payload + bytes(4)
        digest = hashlib.sha256(longer).digest()
        return dataclasses.replace(message, length=len(longer), sha256=digest), longer

    sent(change)


@meets("masked-corrupt")
def a_vector_changed_on_its_way():
    sent(lambda message, payload: (message, bytes([payload[0] ^ 1]) + payload[1:]))


@meets("too-few-masked")
def hardly_any_vectors():
    Parties(6, dict.fromkeys(names(6)[:3], ServerStage.MASKED)).run()


# -- the server, of consent and shares -----------------------------------------------------------


@meets("consent-stranger")
def a_consent_of_somebody_lost():
    parties = Parties(6, {"c00005": ServerStage.MASKED}).until(ServerStage.CONSENTS)
    signature = identity("c00005").sign("consent", *parties.survivors.signed_fields())
    parties.server.take_consistency_signature(ConsistencySignature("c00005", signature))


@meets("consent-duplicate")
def a_consent_twice():
    parties = until(ServerStage.CONSENTS)
    sign_survivors = parties.clients[ALICE].sign_survivors(parties.survivors)
    for _ in range(2):
        parties.server.take_consistency_signature(sign_survivors)


@meets("consent-forged")
def a_consent_to_something_else():
    parties = until(ServerStage.CONSENTS)
    other = dataclasses.replace(
        parties.survivors, survivors=without(parties.survivors.survivors, 5)
    )
    parties.server.take_consistency_signature(parties.clients[ALICE].sign_survivors(other))


@meets("too-few-consents")
def hardly_any_consents():
    Parties(6, dict.fromkeys(names(6)[:3], ServerStage.CONSENTS)).run()


def given(change, who=ALICE, sign=True, lost=None):
    """Alice's shares come changed."""
    parties = Parties(6, lost).until(ServerStage.RELEASES)
    changed = change(parties.clients[who].release(parties.consistency_signatures))
    cohort = parties.server._cohort
    parties.server.take_unmasking_shares(resign(changed, who, cohort.hash) if sign else changed)
    for name in parties.left(ServerStage.RELEASES):
        if name != who:
            parties.server.take_unmasking_shares(
                parties.clients[name].release(parties.consistency_signatures)
            )
    parties.server.unmask()


@meets("release-stranger")
def shares_of_somebody_lost():
    parties = Parties(6, {"c00005": ServerStage.MASKED}).until(ServerStage.RELEASES)
    release = parties.clients[ALICE].release(parties.consistency_signatures)
    forged = dataclasses.replace(release, name="c00005")
    parties.server.take_unmasking_shares(resign(forged, "c00005", parties.server._cohort.hash))


@meets("release-duplicate")
def released_twice():
    parties = until(ServerStage.RELEASES)
    release = parties.clients[ALICE].release(parties.consistency_signatures)
    for _ in range(2):
        parties.server.take_unmasking_shares(release)


@meets("release-forged")
def shares_that_alice_did_not_give():
    given(lambda release: dataclasses.replace(release, signature=bytes(64)), sign=False)


@meets("release-wrong-dealers")
def a_share_kept_back():
    given(lambda release: dataclasses.replace(release, shares=release.shares[1:]))


@meets("too-few-shares")
def hardly_any_shares():
    Parties(6, dict.fromkeys(names(6)[:3], ServerStage.RELEASES)).run()


def with_a_wrong_share(release: UnmaskingShares, of: int) -> UnmaskingShares:
    shares = dict(release.shares)
    shares[of] = bytes(36)
    return dataclasses.replace(release, shares=tuple(sorted(shares.items())))


@meets("seed-mismatch")
def a_wrong_share_of_a_seed():
    given(functools.partial(with_a_wrong_share, of=2))


@meets("key-mismatch")
def a_wrong_share_of_a_mask_key():
    given(functools.partial(with_a_wrong_share, of=5), lost={"c00005": ServerStage.MASKED})


@meets("sum-out-of-range")
def a_vector_beyond_the_agreed_range():
    parties = until(ServerStage.MASKED)
    for name in names(6):
        encoded = parties.encoded(name)
        if name == ALICE:
            encoded.vector[0] = 2_500_000_000 - 2**32  # honest sums end at 6 x 2^28
        message, payload = parties.clients[name].mask(parties.inboxes[name], encoded)
        parties.server.take_masked(message, payload)
    parties.survivors = parties.server.survivors()
    total = parties.sign_survivors().release().server.unmask()
    decode(parties.config, total.vector, clients=6)


@meets("sum-out-of-range")
def a_weight_beyond_the_agreed_range():
    total = encode(make_config(), torch.zeros(4), weight=10).vector
    total[4] = 11
    decode(make_config(), total, clients=1)


@meets("nothing-weighed")
def nobody_has_any_examples():
    config = make_config()
    decode(config, encode(config, torch.zeros(4), weight=0).vector, clients=1)
