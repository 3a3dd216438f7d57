"""Two sums with one set-up: both are exact if clients are lost, and neither opens the other."""

import functools
import itertools
import random

import pytest
from tests.privacy.protocol import NextRound, ProtocolRound, first_of_two, make_config, names

from isthmus.errors import AggregationAborted, PeerMisbehaved
from isthmus_privacy.crypto import keys, shamir
from isthmus_privacy.crypto.keys import OneTimeKey
from isthmus_privacy.secagg.config import RoundConfig, SetUpBefore, SetUpForTwo
from isthmus_privacy.secagg.history import History
from isthmus_privacy.secagg.messages import (
    INBOX,
    MASKED_INPUT,
    SHARE_BYTES,
    SHARE_KEYS,
    Roster,
    Stage,
)

FIRST = (Stage.SHARE_KEYS, Stage.MASKED_INPUT, Stage.CONSISTENCY_CHECK, Stage.UNMASKING)
NEXT = (Stage.MASKED_INPUT, Stage.CONSISTENCY_CHECK, Stage.UNMASKING)


@pytest.fixture(autouse=True, scope="module")
def cached_cryptography():
    """Compute each roster hash and signature check once for all clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "hash", functools.cache(Roster.hash))
        patch.setattr(keys, "verify", functools.cache(keys.verify))
        yield


def test_both_sums_are_exact_if_nobody_is_lost():
    assert len(NextRound(first_of_two()).run().clients) == 6


@pytest.mark.parametrize("stage", FIRST)
@pytest.mark.parametrize("later", NEXT)
def test_the_sums_are_exact_if_one_client_is_lost_in_each(stage, later):
    for one, other in itertools.permutations(names(4), 2):
        NextRound(first_of_two(6, {one: stage}), {other: later}).run()


def test_a_client_without_the_signatures_of_the_first_sum_is_lost_in_the_next_one():
    """It is in the first sum: its vector came."""
    first = first_of_two(6, {"c00002": Stage.UNMASKING})
    position = first.server._cohort.positions["c00002"]
    assert position in first.survivors.survivors
    assert "c00002" not in NextRound(first).run().clients


def test_too_many_losses_in_both_together_abort_the_next_sum():
    first = first_of_two(6, {"c00000": Stage.MASKED_INPUT})
    lost = dict.fromkeys(names(3)[1:], Stage.MASKED_INPUT)
    with pytest.raises(AggregationAborted):
        NextRound(first, lost).run()


@pytest.mark.parametrize("seed", range(4))
def test_random_losses_on_the_graph_that_clients_draw(seed):
    draw = random.Random(seed)
    count = draw.randint(30, 50)
    lost = draw.sample(names(count), count // 5)
    split = draw.randint(0, len(lost))
    first = first_of_two(
        count,
        {name: draw.choice(FIRST) for name in lost[:split]},
        size=3,
        dropout_permille=200,
        complete_up_to=0,
    )
    assert not first.config.graph(count).complete
    NextRound(first, {name: draw.choice(NEXT) for name in lost[split:]}).run()


def test_the_messages_are_read_as_they_were_written():
    protocol = ProtocolRound(4, set_up=SetUpForTwo()).until(Stage.SHARE_KEYS)
    shares = protocol.clients["c00000"].share_keys(protocol.roster)
    assert SHARE_KEYS[True].from_bytes(shares.to_bytes()) == shares
    protocol.server.receive_shares(shares)
    for name in names(4)[1:]:
        protocol.server.receive_shares(protocol.clients[name].share_keys(protocol.roster))
    protocol.server.finish_share_keys()
    inbox = protocol.server.inbox("c00000")
    assert INBOX[True].from_bytes(inbox.to_bytes()) == inbox
    protocol.inboxes = {"c00000": inbox}
    message, _ = protocol.mask("c00000")
    assert MASKED_INPUT[True].from_bytes(message.to_bytes()) == message


def test_a_configuration_of_before_is_encoded_as_before():
    """Signed sums of earlier runs are read, and their hashes hold."""
    config = make_config()
    longer = make_config(set_up=SetUpForTwo()).to_bytes()
    assert longer.startswith(config.to_bytes())
    assert RoundConfig.from_bytes(longer).is_for_two
    assert config.encoding_hash == RoundConfig.from_bytes(longer).encoding_hash


# -- what is revealed ------------------------------------------------------------------------------


def reconstructed(shares, points, threshold):
    """The secret of shares of one client; None if they are too few."""
    if len(shares) < threshold:
        return None
    return shamir.combine([points[:threshold]], [shares[:threshold]])[0]


def secrets_known(protocol):
    """What a server can reconstruct from the shares that clients have revealed in a sum."""
    threshold = protocol.server._cohort.graph.threshold
    known = {}
    for owner in range(6):
        holders = [
            (protocol.server._cohort.positions[name] + 1, dict(message.shares)[owner])
            for name, message in protocol.revealed.items()
            if owner in dict(message.shares)
        ]
        points = [each[0] for each in holders]
        shares = [each[1] for each in holders]
        known[owner] = reconstructed(shares, points, threshold)
    return known


def test_a_client_that_is_lost_in_the_next_sum_keeps_its_masks_of_the_first_one():
    """Its self-mask seed of the first sum is known: with its mask secret, so was its vector."""
    first = ProtocolRound(6, set_up=SetUpForTwo())
    mask_secrets = {}
    for name, client in first.clients.items():
        mask_secrets[name] = client._mask_key.secret_bytes()
    first.run()
    second = NextRound(first, {"c00004": Stage.MASKED_INPUT})
    second.run()
    opened = secrets_known(first)
    assert first.server._cohort.seed_commitment(4, opened[4]) == (
        first.server._shares[4].seed_commitment
    )
    of_next = secrets_known(second)
    assert first.server._cohort.next_secret_commitment(4, of_next[4]) == (
        first.server._shares[4].next_secret_commitment
    )
    known = {*opened.values(), *of_next.values()}
    assert not known & set(mask_secrets.values())
    public = first.server._cohort.entry(4).mask_key
    assert all(OneTimeKey(secret).public != public for secret in known if secret is not None)


def test_each_client_reveals_one_share_of_each_owner_in_each_sum_and_other_ones():
    first = first_of_two(6, {"c00000": Stage.MASKED_INPUT})
    second = NextRound(first, {"c00004": Stage.MASKED_INPUT})
    second.run()
    for name, message in second.revealed.items():
        shares = dict(message.shares)
        before = dict(first.revealed[name].shares)
        assert all(len(share) == SHARE_BYTES for share in shares.values())
        assert 0 not in shares  # it has no vector in the next sum, and no masks
        assert not set(shares.values()) & set(before.values())


def test_no_secret_of_a_set_up_is_left_after_the_next_sum():
    first = first_of_two()
    second = NextRound(first)
    second.run()
    for name, client in second.clients.items():
        assert first.clients[name]._next is None
        assert not client._share_pairs
        assert not client._sent_parts
        assert not client._received_parts
        assert not any(client._self_mask_seed)


def test_a_refusal_in_the_first_sum_overwrites_what_is_kept_for_the_next_one():
    protocol = ProtocolRound(6, set_up=SetUpForTwo()).until(Stage.CONSISTENCY_CHECK)
    client = protocol.clients["c00001"]
    kept = client._next
    pairs = list(kept.share_pairs.values())
    client.close()
    assert client._next is None
    assert not any(kept.seed)
    assert not kept.secret
    assert not any(any(pair) for pair in pairs)


# -- a server that is honest -----------------------------------------------------------------------


def test_the_server_follows_only_a_sum_that_it_has():
    protocol = ProtocolRound(6, set_up=SetUpForTwo()).until(Stage.FINISHED)
    config = make_config(run_id="next", set_up=SetUpBefore(protocol.config.hash))
    with pytest.raises(ValueError, match="not one that the next one can follow"):
        protocol.server.followed_by(config)
    protocol.server.unmask()
    with pytest.raises(ValueError, match="not one that the next one can follow"):
        protocol.server.followed_by(make_config(run_id="next"))
    assert protocol.server.followed_by(config).missing == set(names(6))


def test_a_client_binds_itself_in_the_next_sum_as_in_any_other():
    """Another vector for its model is refused, whatever set-up the sum would have."""
    histories = {name: History() for name in names(6)}
    NextRound(first_of_two(), histories=histories).run()
    again = first_of_two(attempt=1)
    with pytest.raises(PeerMisbehaved) as caught:
        NextRound(again, histories=histories, clip=2.0)
    assert caught.value.code == "another-vector-for-model"
    NextRound(again, histories=histories).run()
