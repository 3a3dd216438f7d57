"""Published and demonstrated attacks on implementations of secure aggregation."""

import dataclasses
import math

import pytest
import torch
from tests.privacy.protocol import (
    ProtocolRound,
    identity,
    make_config,
    names,
    signed_keys,
)

from isthmus.errors import PeerMisbehaved
from isthmus_privacy.crypto import shamir
from isthmus_privacy.crypto.masking import add_masks, cipher
from isthmus_privacy.secagg.messages import Roster, Stage
from isthmus_privacy.secagg.server import ServerSession


def xor_of_words(seed):
    """Fold a 32-byte seed to 32 bits, as a well-known implementation does."""
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


def test_a_client_reveals_exactly_one_share_for_each_owner():
    """A server that wants both the seed and the key of one survivor gets only one of them."""
    protocol = ProtocolRound(6, {"c00005": Stage.MASKED_INPUT}).until(Stage.FINISHED)
    for name, revealed in protocol.revealed.items():
        owners = [owner for owner, _ in revealed.shares]
        assert len(owners) == len(set(owners)) == 5
        assert protocol.server.stage is Stage.UNMASKING
        assert set(owners) == protocol.server._owners_by_holder[names(6).index(name)]


def test_shares_of_a_survivors_mask_key_stay_secret():
    """A server that declares a survivor lost needs a second set, which no client signs."""
    protocol = ProtocolRound(6).until(Stage.UNMASKING)
    first = protocol.survivors
    second = dataclasses.replace(
        first,
        survivors=dataclasses.replace(first.survivors, indices=first.survivors.indices - {3}),
    )
    for name in names(5)[:3]:
        client = protocol.clients[name]
        client.reveal_unmasking_shares(protocol.consistency_signatures)
        for request in (
            lambda c=client: c.sign_survivors(second),
            lambda c=client: c.reveal_unmasking_shares(protocol.consistency_signatures),
        ):
            with pytest.raises(PeerMisbehaved, match="ended"):
                request()


@pytest.mark.parametrize("stage", [Stage.ADVERTISE_KEYS, Stage.SHARE_KEYS])
@pytest.mark.parametrize("drops", [1, 2])
def test_an_early_dropout_does_not_stop_the_round(stage, drops):
    dropouts = dict.fromkeys(names(10)[-drops:], stage)
    total = ProtocolRound(10, dropouts).run()
    assert len(total.clients) == 10 - drops


@pytest.mark.parametrize("count", [4, 6, 8, 12])
def test_even_numbers_of_clients_work(count):
    assert len(ProtocolRound(count).run().clients) == count


def test_key_swap():
    """The server replaces Bob's keys by its own: Alice requires Bob's signature."""
    protocol = ProtocolRound(6).until(Stage.SHARE_KEYS)
    entries = list(protocol.roster.entries)
    server = signed_keys(protocol.config, "c00003")
    entries[3] = dataclasses.replace(server, signature=identity("c00004").sign("x", b""))
    with pytest.raises(PeerMisbehaved, match=r"c00003.*did not sign"):
        protocol.clients["c00001"].share_keys(Roster(tuple(entries)))


def test_split_roster():
    """Two rosters, each valid by itself: one half cannot decrypt the shares of the other."""
    protocol = ProtocolRound(8, dropout_permille=440)
    entries = [client.advertise_keys() for client in protocol.clients.values()]
    left, right = Roster(tuple(entries[:6])), Roster(tuple(entries[2:]))
    server = ServerSession(protocol.config, protocol.server._directory)
    for keys in entries[:6]:
        server.receive_keys(keys)
    assert server.finish_advertise_keys() == left
    for name in names(8)[:5]:
        server.receive_shares(protocol.clients[name].share_keys(left))
    other = protocol.clients["c00005"].share_keys(right)
    with pytest.raises(PeerMisbehaved, match="another roster"):
        server.receive_shares(other)
    server.finish_share_keys()
    inbox = server.inbox("c00002")
    # A dishonest server forwards shares that were encrypted under another roster anyway.
    forwarded = dataclasses.replace(
        inbox,
        share_owners=dataclasses.replace(
            inbox.share_owners, indices=inbox.share_owners.indices | {5}
        ),
        sealed=(*inbox.sealed, (5, other.sealed[0])),
    )
    with pytest.raises(PeerMisbehaved, match="not what it sealed"):
        protocol.clients["c00002"].mask_input(forwarded, protocol.encoded("c00002"))


def test_replay_of_a_whole_round():
    """Messages recorded in one attempt are refused in the next."""
    first = ProtocolRound(6).until(Stage.FINISHED)
    second = ProtocolRound(6, attempt=1)
    old = first.roster.entries[1]
    with pytest.raises(PeerMisbehaved, match="did not sign"):
        second.server.receive_keys(old)
    second.until(Stage.MASKED_INPUT)
    with pytest.raises(PeerMisbehaved, match="another roster"):
        second.server.receive_masked_input(*first.masked["c00001"])
    with pytest.raises(PeerMisbehaved, match="another roster"):
        second.clients["c00002"].mask_input(first.inboxes["c00002"], second.encoded("c00002"))


def test_two_survivor_sets_never_both_find_a_quorum():
    """For any division of the survivors into two sets, of which corrupt clients sign both."""
    for count in (3, 4, 7, 10, 31, 64, 100, 128, 300):
        for permille in (0, 100, 200, 333):
            graph = make_config(clients_max=count, corrupt_permille=permille).graph(count)
            corrupt = -(-count * permille // 1000)
            honest = count - corrupt
            assert 2 * (graph.quorum - corrupt) > honest


def test_no_split_of_the_neighbours_reveals_both_secrets():
    """2t > k + c: honest holders give one share each, corrupt ones both."""
    for count in (3, 4, 7, 10, 31, 64, 100, 128, 150, 300, 1000):
        for permille in (0, 50, 100, 200):
            config = make_config(clients_max=count, corrupt_permille=permille, dropout_permille=100)
            graph = config.graph(count)
            assert 2 * graph.threshold > graph.degree + graph.corrupt


def test_a_server_that_chooses_dropouts_cannot_isolate_a_group():
    """A server that sees all draws, then chooses the dropouts, to learn a smaller sum.

    Each client of an isolated group has at least t remaining neighbours, at most c of them
    corrupt, so the group has more than t - c members. Union over the dropouts and over the group:
    members drew only members, corrupt clients and dropouts, and the others drew no member.
    """
    worst = -math.inf
    for count in (129, 150, 300, 1000, 10_000):
        for corrupt, dropouts in (
            (50, 50),
            (50, 100),
            (100, 100),
            (100, 200),
            (200, 200),
            (100, 300),
        ):
            graph = make_config(
                clients_max=count, corrupt_permille=corrupt, dropout_permille=dropouts
            ).graph(count)
            dropped, others = count - graph.survivors_min, count - 1
            bad = -(-count * corrupt // 1000)
            remaining = count - bad - dropped
            for size in range(graph.threshold - graph.corrupt + 1, remaining // 2 + 1):
                inside = min(1.0, (size - 1 + bad + dropped) / others)
                worst = max(
                    worst,
                    log2_choose(count, dropped)
                    + log2_choose(remaining, size)
                    + graph.degree * size * math.log2(inside)
                    + graph.degree * (remaining - size) * math.log2((others - size) / others),
                )
    assert worst < -500


def log2_choose(n, k):
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def test_fewer_shares_than_the_threshold_fit_every_secret():
    """Shamir's perfect secrecy: t - 1 shares fit any secret with a suitable third share."""
    one, other = bytes(range(32)), bytes(range(32, 64))
    shares = shamir.split([one], [1, 2, 3], 3)
    # Lagrange weights at zero over {1, 2, 3} are 3, -3, 1: the third share sets the secret.
    third = b""
    for j in range(shamir.LIMBS):
        first, second = (int.from_bytes(s[4 * j : 4 * j + 4], "little") for s in shares[:2])
        limb = int(shamir._limbs(other)[j])
        third += ((limb - 3 * first + 3 * second) % shamir.P).to_bytes(4, "little")
    assert shamir.combine([[1, 2, 3]], [shares]) == [one]
    assert shamir.combine([[1, 2, 3]], [[*shares[:2], third]]) == [other]
