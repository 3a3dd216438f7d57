"""A server that lies to a client about who is left and who agreed."""

import dataclasses

from parties import (
    Parties,
    identity,
    make_client,
    make_config,
    names,
)

from attacks.crowd import Crowd
from attacks.registry import ALICE, BOB, meets, until, without
from isthmus_privacy.crypto.canonical import Members
from isthmus_privacy.secagg import (
    ConsistencySignatures,
    History,
    ServerStage,
    Survivors,
)

# -- the client, of the survivors ----------------------------------------------------------------


def told(change, **changes):
    """Alice is told of changed survivors."""
    parties = until(ServerStage.CONSENTS, **changes)
    parties.clients[ALICE].sign_survivors(change(parties.survivors))


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
    parties.clients[ALICE].sign_survivors(message)


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
    crowd.client.sign_survivors(
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


@meets("config-replayed")
def the_same_model_without_bob_while_the_run_is_forgotten_over_others():
    history = History()
    for round_, lost in enumerate([{}, {BOB: ServerStage.MASKED}]):
        alice = make_client(make_config(round=round_), ALICE, history=history)
        for other in "abcdefgh" if lost else "":
            make_client(make_config(run_id=other), ALICE, history=history)
        Parties(6, lost, clients={ALICE: alice}, round=round_).until(ServerStage.FINISHED)


# -- the client, of everybody's consent ----------------------------------------------------------


def convinced(change):
    """Alice is shown changed signatures."""
    parties = until(ServerStage.RELEASES)
    parties.clients[ALICE].release(
        ConsistencySignatures(tuple(change(list(parties.consistency_signatures.signatures))))
    )


@meets("consents-repeated")
def one_signature_counted_four_times():
    convinced(lambda signatures: signatures[:1] * 4)


@meets("consents-stranger")
def a_signature_of_somebody_lost():
    parties = Parties(6, {"c00005": ServerStage.MASKED}).until(ServerStage.RELEASES)
    lost = identity("c00005").sign("consent", *parties.survivors.signed_fields())
    parties.clients[ALICE].release(
        ConsistencySignatures((*parties.consistency_signatures.signatures, (5, lost)))
    )


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
        (i, parties.clients[name].sign_survivors(shown_to[name]).signature)
        for i, name in enumerate(names(5))
    ]
    parties.clients[ALICE].release(ConsistencySignatures(tuple(signatures)))


@meets("consents-too-few")
def fewer_than_the_quorum():
    convinced(lambda signatures: signatures[:3])


@meets("client-finished")
def a_second_unmasking():
    parties = until(ServerStage.RELEASES)
    parties.clients[ALICE].release(parties.consistency_signatures)
    parties.clients[ALICE].release(parties.consistency_signatures)


@meets("client-finished")
def an_answer_after_a_refusal():
    parties = until(ServerStage.RELEASES)
    try:
        parties.clients[ALICE].sign_survivors(parties.survivors)
    except Exception:  # noqa: BLE001 - whatever it refused, it must be the last
        parties.clients[ALICE].release(parties.consistency_signatures)


@meets("client-out-of-order")
def a_second_survivor_set():
    parties = until(ServerStage.CONSENTS)
    parties.clients[ALICE].sign_survivors(parties.survivors)
    other = dataclasses.replace(
        parties.survivors, survivors=without(parties.survivors.survivors, 3)
    )
    parties.clients[ALICE].sign_survivors(other)


@meets("client-out-of-order")
def shares_before_any_consent():
    parties = until(ServerStage.CONSENTS)
    parties.clients[ALICE].release(ConsistencySignatures(()))
