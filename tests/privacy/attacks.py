"""For each refusal of the protocol, an attack or a mistake that runs into it.

Every function here does what a liar would do and must end in the refusal it is registered under.
`mutation.py` takes each refusal away and expects exactly these functions to notice.
"""

import dataclasses
import functools
import hashlib

import torch
from parties import (
    AUTHORITY,
    FAR,
    Parties,
    directory,
    enrolment,
    identity,
    make_client,
    make_config,
    names,
    paper_advert,
    resign,
)

from isthmus_privacy.secagg import (
    Authority,
    ClientPolicy,
    Consent,
    Consents,
    Directory,
    History,
    Inbox,
    MaskedInput,
    Release,
    Roster,
    ServerSession,
    ServerStage,
    ShareKeys,
    Slot,
    Survivors,
    decode,
    encode,
)
from isthmus_privacy.secagg.canonical import Members, tagged

ATTACKS = {}
"""Refusal to the attacks that must meet it."""

ALICE, BOB = "c00001", "c00003"


def meets(code):
    def register(attack):
        ATTACKS.setdefault(code, []).append(attack)
        return attack

    return register


def until(stage, **changes):
    return Parties(6, **changes).until(stage)


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
    Consent.from_bytes(Consent("Ada", bytes(64)).to_bytes().replace(b"Ada", b"\xff\xfe\xfd"))


@meets("message-wrong-kind")
def one_kind_for_another():
    Consent.from_bytes(SURVIVORS.to_bytes())


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


# -- the client, of the configuration ------------------------------------------------------------


def client_of(policy=None, **changes):
    return make_client(make_config(**changes), ALICE, policy=policy)


@meets("config-malformed")
def a_ring_of_31_bits():
    client_of(bits=31, levels=4)


@meets("config-malformed")
def a_clip_that_is_not_a_number():
    client_of(clip=float("nan"))


@meets("config-malformed")
def a_sum_of_one():
    client_of(clients_min=1, policy=ClientPolicy(clients_min=0))


@meets("config-malformed")
def the_same_slot_twice():
    client_of(slots=(Slot(name="n", maximum=1.0), Slot(name="n", maximum=2.0)))


@meets("config-malformed")
def a_count_of_halves():
    client_of(slots=(Slot(name="n", maximum=0.5, exact=True),))


@meets("config-margins")
def two_quorums_at_once():
    client_of(dropout_permille=450, corrupt_permille=100)


@meets("config-values-wrap")
def values_that_wrap():
    client_of(levels=2**28, clients_max=16)


@meets("config-slots-wrap")
def weights_that_wrap():
    client_of(weight_max=2**32 // 6 + 1)


@meets("config-slots-wrap")
def counts_that_wrap():
    client_of(slots=(Slot(name="hits", maximum=2.0**30, exact=True),))


@meets("config-weighted-noise")
def noise_for_a_weight_of_one_on_a_weight_of_ten():
    client_of(noise=b"gaussian", weight_max=10)


@meets("config-model-differs")
def a_model_of_ones_own():
    make_client(make_config(), ALICE, model_hash=bytes(32))


@meets("config-below-floor")
def a_cohort_below_the_device_s_floor():
    client_of(policy=ClientPolicy(clients_min=4))


@meets("config-too-trusting")
def a_server_that_promises_nobody_is_corrupt():
    client_of(corrupt_permille=0)


@meets("config-too-lossy")
def a_server_that_plans_to_lose_most():
    client_of(policy=ClientPolicy(dropout_permille=300))


@meets("config-noise-missing")
def no_noise_for_a_device_that_wants_it():
    client_of(policy=ClientPolicy(noise=True))


@meets("config-replayed")
def the_same_attempt_twice():
    history = History()
    for _ in range(2):
        make_client(make_config(), ALICE, history=history)


@meets("config-replayed")
def an_earlier_round_after_a_restart():
    history = History()
    make_client(make_config(), ALICE, history=history)
    make_client(make_config(round=2, attempt=9), ALICE, history=History(history.state()))


@meets("participation-spent")
def one_round_too_many():
    history, policy = History(), ClientPolicy(participations=2)
    for round_ in range(3):
        make_client(make_config(round=round_), ALICE, history=history, policy=policy)


# -- the client, of the roster -------------------------------------------------------------------


def shown(change, **changes):
    """Alice is shown a changed roster."""
    parties = until(ServerStage.SHARES, **changes)
    parties.clients[ALICE].deal(Roster(tuple(change(list(parties.roster.adverts), parties.config))))


@meets("roster-too-small")
def alone_among_few():
    shown(lambda adverts, _: adverts[:2])


@meets("roster-too-large")
def more_than_the_bit_budget():
    shown(lambda adverts, config: [*adverts, paper_advert(config, "c00009")])


@meets("roster-unsorted")
def a_roster_out_of_order():
    shown(lambda adverts, _: [adverts[1], adverts[0], *adverts[2:]])


@meets("roster-unsorted")
def the_same_name_with_other_keys():
    def change(adverts, config):
        return [*adverts[:5], paper_advert(config, adverts[4].name)]

    shown(change)


@meets("roster-repeated-key")
def bob_s_mask_key_under_another_name():
    def change(adverts, config):
        return [*adverts[:5], paper_advert(config, "c00005", mask_key=adverts[3].mask_key)]

    shown(change)


@meets("roster-repeated-key")
def one_key_for_both_uses():
    def change(adverts, config):
        key = adverts[5].sealing_key
        return [*adverts[:5], paper_advert(config, "c00005", sealing_key=key, mask_key=key)]

    shown(change)


@meets("roster-self-changed")
def ones_own_keys_replaced():
    def change(adverts, config):
        return [adverts[0], paper_advert(config, ALICE), *adverts[2:]]

    shown(change)


@meets("roster-self-changed")
def a_roster_without_oneself():
    shown(lambda adverts, _: [adverts[0], *adverts[2:]])


@meets("roster-bad-signature")
def bob_s_keys_swapped_by_the_server():
    def change(adverts, config):
        swapped = dataclasses.replace(adverts[3], mask_key=bytes([9]) * 32)
        return [*adverts[:3], swapped, *adverts[4:]]

    shown(change)


@meets("roster-bad-signature")
def bob_s_keys_of_an_earlier_attempt():
    def change(adverts, config):
        earlier = paper_advert(dataclasses.replace(config, attempt=7), BOB)
        return [*adverts[:3], earlier, *adverts[4:]]

    shown(change)


@meets("roster-no-threshold")
def nearly_everybody_corrupt():
    shown(lambda adverts, _: adverts, corrupt_permille=900, dropout_permille=0)


@meets("key-of-low-order")
def a_key_with_which_everybody_agrees_on_zero():
    def change(adverts, config):
        return [*adverts[:3], paper_advert(config, BOB, sealing_key=bytes(32)), *adverts[4:]]

    shown(change)


# -- the client, of its inbox --------------------------------------------------------------------


def handed(change):
    """Alice is handed a changed inbox."""
    parties = until(ServerStage.MASKED)
    inbox = change(parties.inboxes[ALICE])
    parties.clients[ALICE].mask(inbox, parties.encoded(ALICE))


def dealers(inbox, *, without):
    return dataclasses.replace(inbox.dealers, indices=inbox.dealers.indices - without)


@meets("inbox-other-roster")
def an_inbox_of_another_roster():
    handed(lambda inbox: dataclasses.replace(inbox, roster_hash=bytes(32)))


@meets("inbox-self-missing")
def ones_own_shares_left_out():
    handed(lambda inbox: dataclasses.replace(inbox, dealers=dealers(inbox, without={1})))


@meets("inbox-too-few")
def hardly_any_dealers():
    handed(
        lambda inbox: dataclasses.replace(
            inbox, dealers=dealers(inbox, without={2, 3, 4}), sealed=inbox.sealed[:1]
        )
    )


@meets("inbox-sender-repeated")
def a_share_twice():
    handed(lambda inbox: dataclasses.replace(inbox, sealed=inbox.sealed[:1] + inbox.sealed))


@meets("inbox-sender-unknown")
def a_share_of_somebody_who_dealt_none():
    handed(lambda inbox: dataclasses.replace(inbox, dealers=dealers(inbox, without={5})))


@meets("inbox-sender-unknown")
def a_share_of_ones_own():
    def change(inbox):
        sealed = dict(inbox.sealed)
        sealed[1] = sealed[0]
        return dataclasses.replace(inbox, sealed=tuple(sorted(sealed.items())))

    handed(change)


@meets("inbox-share-tampered")
def a_share_with_a_bit_flipped():
    def change(inbox):
        sender, sealed = inbox.sealed[0]
        flipped = sealed[:-1] + bytes([sealed[-1] ^ 1])
        return dataclasses.replace(inbox, sealed=((sender, flipped), *inbox.sealed[1:]))

    handed(change)


@meets("inbox-share-tampered")
def two_senders_shares_exchanged():
    def change(inbox):
        (one, first), (other, second), *rest = inbox.sealed
        return dataclasses.replace(inbox, sealed=((one, second), (other, first), *rest))

    handed(change)


@meets("inbox-share-tampered")
def shares_for_another_client():
    parties = until(ServerStage.MASKED)
    theirs = dict(parties.inboxes[BOB].sealed)
    inbox = parties.inboxes[ALICE]
    sealed = tuple((sender, theirs.get(sender, share)) for sender, share in inbox.sealed)
    changed = dataclasses.replace(inbox, sealed=sealed)
    parties.clients[ALICE].mask(changed, parties.encoded(ALICE))


class Crowd:
    """One real client among many on paper, on the graph that clients draw."""

    def __init__(self, count=150):
        self.config = make_config(
            clients_max=count, corrupt_permille=50, dropout_permille=100, size=2
        )
        self.names = names(count)
        self.client = make_client(
            self.config, ALICE, policy=ClientPolicy(corrupt_permille=50), directory=directory()
        )
        adverts = {name: paper_advert(self.config, name) for name in self.names}
        adverts[ALICE] = self.client.advertise()
        self.roster = Roster(tuple(adverts[name] for name in self.names))
        self.hood = self.config.neighbourhood(count)
        assert not self.hood.complete
        self.gone = self.hood.clients - self.hood.fewest
        assert self.hood.degree - self.gone < self.hood.threshold
        assert 3 * self.hood.degree < self.hood.fewest - 1

    def inbox(self, missing=frozenset(), senders=()):
        present = frozenset(range(len(self.names))) - missing
        return Inbox(
            self.roster.hash(self.config.hash),
            Members(len(self.names), present),
            tuple((sender, bytes(100)) for sender in senders),
        )

    def encoded(self):
        return encode(self.config, torch.zeros(2), weight=1)


@meets("inbox-neighbours-gone")
def a_server_that_loses_ones_neighbours():
    crowd = Crowd()
    dealt = crowd.client.deal(crowd.roster)
    gone = frozenset(sorted(dealt.neighbours.indices)[: crowd.gone])
    crowd.client.mask(crowd.inbox(missing=gone), crowd.encoded())


@meets("inbox-too-many-dealers")
def a_client_on_whom_everybody_dumps_shares():
    crowd = Crowd()
    crowd.client.deal(crowd.roster)
    senders = [i for i in range(len(crowd.names)) if i != 1][: 3 * crowd.hood.degree + 1]
    crowd.client.mask(crowd.inbox(senders=senders), crowd.encoded())


# -- the client, of its own update ---------------------------------------------------------------

SLOTS = (Slot(name="hits", maximum=100.0, exact=True), Slot(name="loss", maximum=50.0))


def own(update=None, weight=5, **figures):
    config = make_config(slots=SLOTS)
    usual = {"hits": 3, "loss": 0.5}
    update = torch.zeros(4) if update is None else update
    encode(config, update, weight=weight, figures={**usual, **figures})


@meets("update-wrong-length")
def an_update_of_another_model():
    own(torch.zeros(5))


@meets("update-wrong-length")
def an_update_of_integers():
    own(torch.zeros(4, dtype=torch.int64))


@meets("update-not-finite")
def training_that_diverged():
    own(torch.tensor([0.0, 1.0, float("nan"), 0.0]))


@meets("update-not-finite")
def training_that_overflowed():
    own(torch.tensor([0.0, 1.0, 0.0, float("-inf")]))


@meets("weight-out-of-range")
def more_examples_than_agreed():
    own(weight=11)


@meets("weight-out-of-range")
def fewer_examples_than_none():
    own(weight=-1)


@meets("slot-names-differ")
def a_figure_nobody_asked_for():
    own(age=41)


@meets("slot-not-finite")
def a_loss_that_is_not_a_number():
    own(loss=float("nan"))


@meets("count-out-of-range")
def more_hits_than_agreed():
    own(hits=101)


@meets("count-out-of-range")
def half_a_hit():
    own(hits=0.5)


@meets("encoded-for-another-round")
def the_vector_of_another_attempt():
    parties = until(ServerStage.MASKED)
    stale = encode(make_config(attempt=1), torch.zeros(4), weight=1)
    parties.clients[ALICE].mask(parties.inboxes[ALICE], stale)


@meets("encoded-for-another-round")
def a_vector_that_is_masked_already():
    parties = until(ServerStage.MASKED)
    encoded = parties.encoded(ALICE)
    parties.clients[ALICE].mask(parties.inboxes[ALICE], encoded)
    parties.clients[BOB].mask(parties.inboxes[BOB], encoded)


# -- the client, of the survivors ----------------------------------------------------------------


def told(change, **changes):
    """Alice is told of changed survivors."""
    parties = until(ServerStage.CONSENTS, **changes)
    parties.clients[ALICE].consent(change(parties.survivors))


def without(members, *gone):
    return dataclasses.replace(members, indices=members.indices - set(gone))


@meets("survivors-other-roster")
def survivors_of_another_roster():
    told(lambda survivors: dataclasses.replace(survivors, roster_hash=bytes(32)))


@meets("survivors-changed-dealers")
def a_dealer_that_was_not_one_before():
    told(
        lambda survivors: dataclasses.replace(
            survivors,
            dealers=without(survivors.dealers, 5),
            survivors=without(survivors.survivors, 5),
        )
    )


@meets("survivors-not-dealers")
def a_survivor_that_dealt_nothing():
    parties = Parties(6, {"c00005": ServerStage.SHARES}).until(ServerStage.CONSENTS)
    everybody = Members(6, frozenset(range(6)))
    message = dataclasses.replace(parties.survivors, survivors=everybody)
    parties.clients[ALICE].consent(message)


@meets("survivors-self-missing")
def ones_own_vector_left_out():
    told(
        lambda survivors: dataclasses.replace(survivors, survivors=without(survivors.survivors, 1))
    )


@meets("survivors-too-few")
def hardly_any_survivors():
    told(
        lambda survivors: dataclasses.replace(
            survivors, survivors=without(survivors.survivors, 0, 3, 4)
        )
    )


@meets("survivors-neighbours-gone")
def a_server_that_loses_ones_neighbours_late():
    crowd = Crowd()
    dealt = crowd.client.deal(crowd.roster)
    crowd.client.mask(crowd.inbox(), crowd.encoded())
    gone = sorted(dealt.neighbours.indices)[: crowd.gone]
    everybody = Members(len(crowd.names), frozenset(range(len(crowd.names))))
    crowd.client.consent(
        Survivors(crowd.roster.hash(crowd.config.hash), everybody, without(everybody, *gone))
    )


@meets("survivors-differ-by-few")
def the_same_round_again_without_bob():
    histories = {name: History() for name in names(6)}
    for attempt, lost in enumerate([{}, {BOB: ServerStage.MASKED}]):
        config = make_config(attempt=attempt)
        clients = {name: make_client(config, name, history=histories[name]) for name in histories}
        Parties(6, lost, clients=clients, attempt=attempt).until(ServerStage.FINISHED)


@meets("survivors-differ-by-few")
def the_same_model_in_another_round_without_bob():
    history = History()
    for round_, lost in enumerate([{}, {BOB: ServerStage.MASKED}]):
        config = make_config(round=round_)
        alice = make_client(config, ALICE, history=History(history.state()))
        history = alice._history
        Parties(6, lost, clients={ALICE: alice}, round=round_).until(ServerStage.FINISHED)


# -- the client, of everybody's consent ----------------------------------------------------------


def convinced(change):
    """Alice is shown changed signatures."""
    parties = until(ServerStage.RELEASES)
    parties.clients[ALICE].release(Consents(tuple(change(list(parties.consents.signatures)))))


@meets("consents-repeated")
def one_signature_counted_four_times():
    convinced(lambda signatures: signatures[:1] * 4)


@meets("consents-stranger")
def a_signature_of_somebody_lost():
    parties = Parties(6, {"c00005": ServerStage.MASKED}).until(ServerStage.RELEASES)
    lost = identity("c00005").sign("consent", *parties.survivors.signed_fields())
    parties.clients[ALICE].release(Consents((*parties.consents.signatures, (5, lost))))


@meets("consents-forged")
def a_signature_that_somebody_made_up():
    convinced(lambda signatures: [*signatures[:3], (3, bytes(64)), *signatures[4:]])


@meets("consents-forged")
def signatures_of_two_survivor_sets():
    """A server that shows half of them one set and half another finds no quorum for either."""
    parties = until(ServerStage.CONSENTS)
    other = dataclasses.replace(
        parties.survivors, survivors=without(parties.survivors.survivors, 5)
    )
    shown_to = {name: other if i % 2 else parties.survivors for i, name in enumerate(names(5))}
    signatures = [
        (i, parties.clients[name].consent(shown_to[name]).signature)
        for i, name in enumerate(names(5))
    ]
    parties.clients[ALICE].release(Consents(tuple(signatures)))


@meets("consents-too-few")
def fewer_than_the_quorum():
    convinced(lambda signatures: signatures[:3])


@meets("client-finished")
def a_second_unmasking():
    parties = until(ServerStage.RELEASES)
    parties.clients[ALICE].release(parties.consents)
    parties.clients[ALICE].release(parties.consents)


@meets("client-finished")
def an_answer_after_a_refusal():
    parties = until(ServerStage.RELEASES)
    try:
        parties.clients[ALICE].consent(parties.survivors)
    except Exception:  # noqa: BLE001  any refusal will do: it must be the session's last
        parties.clients[ALICE].release(parties.consents)


@meets("client-out-of-order")
def a_second_survivor_set():
    parties = until(ServerStage.CONSENTS)
    parties.clients[ALICE].consent(parties.survivors)
    other = dataclasses.replace(
        parties.survivors, survivors=without(parties.survivors.survivors, 3)
    )
    parties.clients[ALICE].consent(other)


@meets("client-out-of-order")
def shares_before_any_consent():
    parties = until(ServerStage.CONSENTS)
    parties.clients[ALICE].release(Consents(()))


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


def crowded_server(crowd):
    """A server before which everybody in the crowd has dealt; Alice to the first neighbours."""
    server = ServerSession(crowd.config, directory())
    for advert in crowd.roster.adverts:
        server.take_advert(advert)
    server.roster()
    return server


def paper_shares(crowd, position, neighbours):
    message = ShareKeys(
        crowd.names[position],
        crowd.roster.hash(crowd.config.hash),
        Members(len(crowd.names), frozenset(neighbours)),
        bytes(32),
        (bytes(100),) * len(neighbours),
        bytes(64),
    )
    return resign(message, message.name)


def ring_neighbours(crowd, position):
    return [(position + 1 + i) % len(crowd.names) for i in range(crowd.hood.degree)]


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


def masked_on_paper(crowd, position, partners, payload):
    message = MaskedInput(
        crowd.names[position],
        crowd.roster.hash(crowd.config.hash),
        Members(len(crowd.names), frozenset(partners)),
        len(payload),
        hashlib.sha256(payload).digest(),
        bytes(64),
    )
    return resign(message, message.name)


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
    parties.server.take_consent(Consent("c00005", signature))


@meets("consent-duplicate")
def a_consent_twice():
    parties = until(ServerStage.CONSENTS)
    consent = parties.clients[ALICE].consent(parties.survivors)
    for _ in range(2):
        parties.server.take_consent(consent)


@meets("consent-forged")
def a_consent_to_something_else():
    parties = until(ServerStage.CONSENTS)
    other = dataclasses.replace(
        parties.survivors, survivors=without(parties.survivors.survivors, 5)
    )
    parties.server.take_consent(parties.clients[ALICE].consent(other))


@meets("too-few-consents")
def hardly_any_consents():
    Parties(6, dict.fromkeys(names(6)[:3], ServerStage.CONSENTS)).run()


def given(change, who=ALICE, sign=True, lost=None):
    """Alice's shares come changed."""
    parties = Parties(6, lost).until(ServerStage.RELEASES)
    changed = change(parties.clients[who].release(parties.consents))
    cohort = parties.server._cohort
    parties.server.take_release(resign(changed, who, cohort.hash) if sign else changed)
    for name in parties.left(ServerStage.RELEASES):
        if name != who:
            parties.server.take_release(parties.clients[name].release(parties.consents))
    parties.server.open_sum()


@meets("release-stranger")
def shares_of_somebody_lost():
    parties = Parties(6, {"c00005": ServerStage.MASKED}).until(ServerStage.RELEASES)
    release = parties.clients[ALICE].release(parties.consents)
    forged = dataclasses.replace(release, name="c00005")
    parties.server.take_release(resign(forged, "c00005", parties.server._cohort.hash))


@meets("release-duplicate")
def released_twice():
    parties = until(ServerStage.RELEASES)
    release = parties.clients[ALICE].release(parties.consents)
    for _ in range(2):
        parties.server.take_release(release)


@meets("release-forged")
def shares_that_alice_did_not_give():
    given(lambda release: dataclasses.replace(release, signature=bytes(64)), sign=False)


@meets("release-wrong-dealers")
def a_share_kept_back():
    given(lambda release: dataclasses.replace(release, shares=release.shares[1:]))


@meets("too-few-shares")
def hardly_any_shares():
    Parties(6, dict.fromkeys(names(6)[:3], ServerStage.RELEASES)).run()


def with_a_wrong_share(release: Release, of: int) -> Release:
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
    total = parties.consent().release().server.open_sum()
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
