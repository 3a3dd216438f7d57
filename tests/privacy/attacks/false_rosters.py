"""The server sends a client a false roster or a changed inbox."""

import dataclasses

from tests.privacy.attacks.large_cohort import LargeCohort
from tests.privacy.attacks.registry import (
    ALICE,
    BOB,
    DRAW,
    client_above,
    clients_below,
    expect_refusal,
    round_until,
)
from tests.privacy.protocol import (
    AUTHORITY,
    enrolment,
    make_client,
    make_config,
    names,
    signed_keys,
)

from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.config import ClientRequirements
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.messages import Roster, Stage

# -- the roster ----------------------------------------------------------------------------------


def send_roster(change, **changes):
    """Send Alice a changed roster."""
    protocol = round_until(Stage.SHARE_KEYS, **changes)
    protocol.clients[ALICE].share_keys(
        Roster(tuple(change(list(protocol.roster.entries), protocol.config)))
    )


@expect_refusal("roster-too-small")
def fewer_clients_than_the_minimum():
    send_roster(lambda entries, _: entries[:2])


@expect_refusal("roster-too-large")
def more_clients_than_the_bit_budget():
    send_roster(lambda entries, config: [*entries, signed_keys(config, "c00009")])


@expect_refusal("roster-honest-below-floor")
def fewer_honest_clients_than_the_device_requires():
    """All six would be enough, one of whom may collude; the server invites five."""
    config = make_config(dropout_permille=0, corrupt_permille=100)
    requirements = ClientRequirements(honest_min=5)
    client = make_client(config, ALICE, requirements=requirements)
    own = client.advertise_keys()
    others = [signed_keys(config, name) for name in names(5) if name != ALICE]
    client.share_keys(Roster((others[0], own, *others[1:])))


@expect_refusal("roster-unsorted")
def a_roster_out_of_order():
    send_roster(lambda entries, _: [entries[1], entries[0], *entries[2:]])


@expect_refusal("roster-unsorted")
def a_name_twice_with_different_keys():
    def change(entries, config):
        return [*entries[:5], signed_keys(config, entries[4].name)]

    send_roster(change)


@expect_refusal("roster-repeated-key")
def the_mask_key_of_bob_under_another_name():
    def change(entries, config):
        return [*entries[:5], signed_keys(config, "c00005", mask_key=entries[3].mask_key)]

    send_roster(change)


@expect_refusal("roster-repeated-key")
def one_key_for_both_uses():
    def change(entries, config):
        key = entries[5].sealing_key
        return [*entries[:5], signed_keys(config, "c00005", sealing_key=key, mask_key=key)]

    send_roster(change)


@expect_refusal("roster-own-entry-changed")
def own_keys_replaced():
    def change(entries, config):
        return [entries[0], signed_keys(config, ALICE), *entries[2:]]

    send_roster(change)


@expect_refusal("roster-own-entry-changed")
def a_roster_without_the_client():
    send_roster(lambda entries, _: [entries[0], *entries[2:]])


@expect_refusal("roster-bad-signature")
def keys_of_bob_replaced_by_the_server():
    def change(entries, config):
        swapped = dataclasses.replace(entries[3], mask_key=bytes([9]) * 1216)
        return [*entries[:3], swapped, *entries[4:]]

    send_roster(change)


@expect_refusal("roster-bad-signature")
def keys_of_bob_from_an_earlier_attempt():
    def change(entries, config):
        earlier = signed_keys(dataclasses.replace(config, attempt=7), BOB)
        return [*entries[:3], earlier, *entries[4:]]

    send_roster(change)


@expect_refusal("roster-no-threshold")
def nearly_all_clients_corrupt():
    send_roster(lambda entries, _: entries, corrupt_permille=900, dropout_permille=0)


@expect_refusal("key-of-low-order")
def a_key_whose_agreement_is_always_zero():
    def change(entries, config):
        low_order = bytes(32) + entries[3].sealing_key[32:]
        return [*entries[:3], signed_keys(config, BOB, sealing_key=low_order), *entries[4:]]

    send_roster(change)


@expect_refusal("key-malformed")
def a_key_with_coefficients_beyond_the_modulus():
    def change(entries, config):
        malformed = entries[3].mask_key[:32] + b"\xff" * 1184
        return [*entries[:3], signed_keys(config, BOB, mask_key=malformed), *entries[4:]]

    send_roster(change)


@expect_refusal("roster-member-not-selected")
def a_colluder_without_a_ticket():
    config = make_config(draw=DRAW, selected_ppm=500_000)
    alice = make_client(config, clients_below(0.5, 1)[0])
    entries = [signed_keys(config, name) for name in clients_below(0.5, 5)[1:]]
    entries += [alice.advertise_keys(), signed_keys(config, client_above(0.5))]
    alice.share_keys(Roster(tuple(sorted(entries, key=lambda entry: entry.name))))


@expect_refusal("roster-member-of-another-group")
def a_colluder_that_the_draw_has_put_into_another_group():
    """The server puts it next to a victim whose group it is not in."""
    config = make_config(draw=DRAW)
    of = {name: RandomGroup.of(enrolment(name).lottery, DRAW, 3) for name in names(60)}
    victim, *others = [name for name in of if of[name] == of[ALICE]][:5]
    client = make_client(
        config,
        victim,
        directory=Directory(AUTHORITY.public, now=lambda: DRAW),
        requirements=ClientRequirements(
            honest_min=0, corrupt_permille=0, selection_slack=10, group=of[victim]
        ),
    )
    colluder = next(name for name in of if of[name] != of[victim])
    entries = [signed_keys(config, name) for name in (*others, colluder)]
    entries.append(client.advertise_keys())
    client.share_keys(Roster(tuple(sorted(entries, key=lambda entry: entry.name))))


# -- the inbox -----------------------------------------------------------------------------------


def send_inbox(change):
    """Send Alice a changed inbox."""
    protocol = round_until(Stage.MASKED_INPUT)
    inbox = change(protocol.inboxes[ALICE])
    protocol.clients[ALICE].mask_input(inbox, protocol.encoded(ALICE))


def remaining_owners(inbox, *, removed):
    return dataclasses.replace(inbox.share_owners, indices=inbox.share_owners.indices - removed)


@expect_refusal("inbox-other-roster")
def an_inbox_of_another_roster():
    send_inbox(lambda inbox: dataclasses.replace(inbox, roster_hash=bytes(32)))


@expect_refusal("inbox-self-missing")
def own_shares_left_out():
    send_inbox(
        lambda inbox: dataclasses.replace(inbox, share_owners=remaining_owners(inbox, removed={1}))
    )


@expect_refusal("inbox-too-few-owners")
def too_few_share_owners():
    send_inbox(
        lambda inbox: dataclasses.replace(
            inbox, share_owners=remaining_owners(inbox, removed={2, 3, 4}), sealed=inbox.sealed[:1]
        )
    )


@expect_refusal("inbox-sender-repeated")
def a_share_twice():
    send_inbox(lambda inbox: dataclasses.replace(inbox, sealed=inbox.sealed[:1] + inbox.sealed))


@expect_refusal("inbox-sender-unknown")
def a_share_of_a_client_that_sent_none():
    send_inbox(
        lambda inbox: dataclasses.replace(inbox, share_owners=remaining_owners(inbox, removed={5}))
    )


@expect_refusal("inbox-sender-unknown")
def a_share_of_the_own_secrets():
    def change(inbox):
        sealed = dict(inbox.sealed)
        sealed[1] = sealed[0]
        return dataclasses.replace(inbox, sealed=tuple(sorted(sealed.items())))

    send_inbox(change)


@expect_refusal("inbox-share-tampered")
def a_share_with_a_bit_flipped():
    def change(inbox):
        sender, sealed = inbox.sealed[0]
        flipped = sealed[:-1] + bytes([sealed[-1] ^ 1])
        return dataclasses.replace(inbox, sealed=((sender, flipped), *inbox.sealed[1:]))

    send_inbox(change)


@expect_refusal("inbox-share-tampered")
def shares_of_two_senders_exchanged():
    def change(inbox):
        (one, first), (other, second), *rest = inbox.sealed
        return dataclasses.replace(inbox, sealed=((one, second), (other, first), *rest))

    send_inbox(change)


@expect_refusal("inbox-share-tampered")
def shares_for_another_client():
    protocol = round_until(Stage.MASKED_INPUT)
    shares_of_bob = dict(protocol.inboxes[BOB].sealed)
    inbox = protocol.inboxes[ALICE]
    sealed = tuple((sender, shares_of_bob.get(sender, share)) for sender, share in inbox.sealed)
    changed = dataclasses.replace(inbox, sealed=sealed)
    protocol.clients[ALICE].mask_input(changed, protocol.encoded(ALICE))


@expect_refusal("inbox-neighbours-missing")
def a_server_that_drops_the_neighbours_before_masking():
    cohort = LargeCohort()
    shares = cohort.client.share_keys(cohort.roster)
    missing = frozenset(sorted(shares.neighbours.indices)[: cohort.dropouts])
    cohort.client.mask_input(cohort.inbox(missing=missing), cohort.encoded())


@expect_refusal("inbox-too-many-senders")
def far_more_shares_than_expected():
    cohort = LargeCohort()
    cohort.client.share_keys(cohort.roster)
    senders = [i for i in range(len(cohort.names)) if i != 1][: 3 * cohort.graph.degree + 1]
    cohort.client.mask_input(cohort.inbox(senders=senders), cohort.encoded())
