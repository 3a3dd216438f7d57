"""Published and demonstrated attacks on secure aggregation as others built it, against ours."""

import dataclasses
import math

import pytest
import torch
from parties import Parties, identity, make_client, make_config, names, paper_advert

from isthmus.errors import PeerMisbehaved
from isthmus_privacy.crypto import shamir
from isthmus_privacy.crypto.masking import add_masks, cipher
from isthmus_privacy.secagg import History, Roster, ServerSession, ServerStage


def xor_of_words(seed):
    """What one well-known implementation makes of a 32-byte seed: 32 bits."""
    folded = 0
    for i in range(0, 32, 4):
        folded ^= int.from_bytes(seed[i : i + 4], "little")
    return folded


def keystream(key, size):
    return cipher(key).update(bytes(size))


def test_seeds_that_fold_to_the_same_32_bits_give_different_masks():
    one = bytes(range(32))
    other = one[4:8] + one[:4] + one[8:]
    assert xor_of_words(one) == xor_of_words(other)
    assert keystream(one, 64) != keystream(other, 64)


def test_every_bit_of_a_seed_matters():
    seed = bytes(range(32))
    flipped = {
        keystream((int.from_bytes(seed, "big") ^ 1 << bit).to_bytes(32, "big"), 16)
        for bit in range(256)
    }
    assert len(flipped) == 256


def test_masks_take_every_value_of_a_small_ring():
    vector = torch.zeros(1 << 20, dtype=torch.int16)
    add_masks(vector, [bytes(32)], [])
    assert len(vector.unique()) == 1 << 16


def test_a_client_gives_one_share_for_each_peer_whatever_it_is_asked():
    """The server that asks for the seed and the key of the same living client gets one of them."""
    parties = Parties(6, {"c00005": ServerStage.MASKED}).until(ServerStage.FINISHED)
    for name, release in parties.released.items():
        dealers = [dealer for dealer, _ in release.shares]
        assert len(dealers) == len(set(dealers)) == 5
        assert parties.server.stage is ServerStage.RELEASES
        held = parties.server._dealt_to[names(6).index(name)]
        assert set(dealers) == held


def test_shares_of_a_survivor_s_mask_key_stay_closed():
    """A server that declares a survivor lost needs a second set, which nobody signs or obeys."""
    parties = Parties(6).until(ServerStage.RELEASES)
    living = parties.survivors
    lost = dataclasses.replace(
        living,
        survivors=dataclasses.replace(living.survivors, indices=living.survivors.indices - {3}),
    )
    for name in names(5)[:3]:
        client = parties.clients[name]
        client.release(parties.consistency_signatures)
        for ask in (
            lambda c=client: c.sign_survivors(lost),
            lambda c=client: c.release(parties.consistency_signatures),
        ):
            with pytest.raises(PeerMisbehaved, match="ended"):
                ask()


@pytest.mark.parametrize("stage", [ServerStage.ADVERTS, ServerStage.SHARES])
@pytest.mark.parametrize("drops", [1, 2])
def test_a_client_lost_early_does_not_halt_the_round(stage, drops):
    lost = dict.fromkeys(names(10)[-drops:], stage)
    total = Parties(10, lost).run()
    assert len(total.clients) == 10 - drops


@pytest.mark.parametrize("count", [4, 6, 8, 12])
def test_even_numbers_of_clients_are_nothing_special(count):
    assert len(Parties(count).run().clients) == count


def test_key_swap():
    """The server puts its own keys in the place of Bob's: Alice wants Bob's signature."""
    parties = Parties(6).until(ServerStage.SHARES)
    adverts = list(parties.roster.adverts)
    server = paper_advert(parties.config, "c00003")
    adverts[3] = dataclasses.replace(server, signature=identity("c00004").sign("x", b""))
    with pytest.raises(PeerMisbehaved, match=r"c00003.*did not sign"):
        parties.clients["c00001"].deal(Roster(tuple(adverts)))


def test_split_roster():
    """Two rosters, each acceptable by itself: what one half seals, the other cannot open."""
    parties = Parties(8, dropout_permille=440)
    adverts = [client.advertise() for client in parties.clients.values()]
    left, right = Roster(tuple(adverts[:6])), Roster(tuple(adverts[2:]))
    server = ServerSession(parties.config, parties.server._directory)
    for advert in adverts[:6]:
        server.take_advert(advert)
    assert server.roster() == left
    for name in names(8)[:5]:
        server.take_shares(parties.clients[name].deal(left))
    other = parties.clients["c00005"].deal(right)
    with pytest.raises(PeerMisbehaved, match="another roster"):
        server.take_shares(other)
    inbox = server.inboxes()["c00002"]
    # A lying server passes it on all the same: three neighbours' shares under another roster.
    forwarded = dataclasses.replace(
        inbox,
        dealers=dataclasses.replace(inbox.dealers, indices=inbox.dealers.indices | {5}),
        sealed=(*inbox.sealed, (5, other.sealed[0])),
    )
    with pytest.raises(PeerMisbehaved, match="not what it sealed"):
        parties.clients["c00002"].mask(forwarded, parties.encoded("c00002"))


def test_replay_of_a_whole_round():
    """Everything recorded in one attempt is worth nothing in the next."""
    first = Parties(6).until(ServerStage.FINISHED)
    second = Parties(6, attempt=1)
    old = first.roster.adverts[1]
    with pytest.raises(PeerMisbehaved, match="did not sign"):
        second.server.take_advert(old)
    second.until(ServerStage.MASKED)
    with pytest.raises(PeerMisbehaved, match="another roster"):
        second.server.take_masked(*first.masked["c00001"])
    with pytest.raises(PeerMisbehaved, match="another roster"):
        second.clients["c00002"].mask(first.inboxes["c00002"], second.encoded("c00002"))


def test_two_survivor_sets_never_both_find_a_quorum():
    """However a server divides the survivors between two sets, and the corrupt sign both."""
    for count in (3, 4, 7, 10, 31, 64, 100, 128, 300):
        for permille in (0, 100, 200, 333):
            hood = make_config(clients_max=count, corrupt_permille=permille).neighbourhood(count)
            corrupt = count * permille // 1000
            honest = count - corrupt
            assert 2 * (hood.quorum - corrupt) > honest


def test_no_neighbours_can_be_split_to_open_both_secrets():
    """2t > k + c: honest holders give one share each, corrupt ones both."""
    for count in (3, 4, 7, 10, 31, 64, 100, 128, 150, 300, 1000):
        for permille in (0, 50, 100, 200):
            config = make_config(clients_max=count, corrupt_permille=permille, dropout_permille=100)
            hood = config.neighbourhood(count)
            assert 2 * hood.threshold > hood.degree + hood.corrupt


def test_no_group_can_be_cut_off_by_choosing_whom_to_drop():
    """A server that sees all draws, then drops whom it likes, and wants a smaller sum.

    Each client of a group that is cut off has at least t neighbours left, at most c of them
    corrupt, so the group has more than t - c members. Union over the dropped and over the group;
    members drew among themselves, the corrupt and the dropped only, and the others drew no member.
    """
    worst = -math.inf
    for count in (129, 150, 300, 1000, 10_000):
        for corrupt, lost in ((50, 50), (50, 100), (100, 100), (100, 200), (200, 200), (100, 300)):
            hood = make_config(
                clients_max=count, corrupt_permille=corrupt, dropout_permille=lost
            ).neighbourhood(count)
            gone, others = count - hood.fewest, count - 1
            bad = count * corrupt // 1000
            left = count - bad - gone
            for size in range(hood.threshold - hood.corrupt + 1, left // 2 + 1):
                inside = min(1.0, (size - 1 + bad + gone) / others)
                worst = max(
                    worst,
                    bits_of_choice(count, gone)
                    + bits_of_choice(left, size)
                    + hood.degree * size * math.log2(inside)
                    + hood.degree * (left - size) * math.log2((others - size) / others),
                )
    assert worst < -500


def bits_of_choice(n, k):
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def test_fewer_shares_than_the_threshold_fit_every_secret():
    """Shamir's perfect secrecy: t - 1 shares of one secret, and a third that makes it another's."""
    one, other = bytes(range(32)), bytes(range(32, 64))
    shares = shamir.split(one, [1, 2, 3], 3)
    # Lagrange at zero over {1, 2, 3} weighs 3, -3, 1: the third share decides alone.
    third = b""
    for j in range(shamir.LIMBS):
        first, second = (int.from_bytes(s[4 * j : 4 * j + 4], "little") for s in shares[:2])
        limb = int(shamir._limbs(other)[j])
        third += ((limb - 3 * first + 3 * second) % shamir.P).to_bytes(4, "little")
    assert shamir.combine([[1, 2, 3]], [shares]) == [one]
    assert shamir.combine([[1, 2, 3]], [[*shares[:2], third]]) == [other]


def test_the_difference_of_two_sums_cannot_be_asked_for():
    """The same updates once with Bob and once without: the second is refused by all."""
    histories = {name: History() for name in names(6)}
    sums = []
    for attempt, gone in enumerate([{}, {"c00003": ServerStage.MASKED}]):
        config = make_config(attempt=attempt)
        clients = {n: make_client(config, n, history=histories[n]) for n in histories}
        parties = Parties(6, gone, clients=clients, attempt=attempt)
        if not gone:
            sums.append(parties.run())
            continue
        parties.until(ServerStage.CONSENTS)
        for name in parties.left(ServerStage.CONSENTS):
            with pytest.raises(PeerMisbehaved, match="differ by 1"):
                clients[name].sign_survivors(parties.survivors)
    assert len(sums) == 1
