"""A server that lies to a client about who takes part, and hands it other shares."""

import dataclasses

from parties import (
    paper_advert,
)

from attacks.crowd import Crowd
from attacks.registry import ALICE, BOB, meets, until
from isthmus_privacy.secagg import (
    Roster,
    ServerStage,
)

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
