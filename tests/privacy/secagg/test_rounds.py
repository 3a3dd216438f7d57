"""Rounds with dropouts: the exact sum within the bound, an abort beyond it."""

import functools
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.protocol import ProtocolRound, names

from isthmus.errors import AggregationAborted, IsthmusError
from isthmus_privacy.crypto import keys
from isthmus_privacy.secagg.encoding import decode
from isthmus_privacy.secagg.messages import Roster, Stage

STAGES = [stage for stage in Stage if stage is not Stage.FINISHED]


@pytest.fixture(autouse=True, scope="module")
def cached_cryptography():
    """Compute each roster hash and signature check once for all clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "hash", functools.cache(Roster.hash))
        patch.setattr(keys, "verify", functools.cache(keys.verify))
        yield


def patterns(count, drops):
    """Every way in which `drops` of `count` clients drop out, each at any stage."""
    for dropped in itertools.combinations(names(count), drops):
        for stages in itertools.product(STAGES, repeat=drops):
            yield dict(zip(dropped, stages, strict=True))


def check_six(dropouts):
    # Clients that never came are not in the roster, so the bound is relative to the others.
    absent = sum(stage is Stage.ADVERTISE_KEYS for stage in dropouts.values())
    if 6 - len(dropouts) < ProtocolRound(6).config.graph(6 - absent).survivors_min:
        with pytest.raises(AggregationAborted):
            ProtocolRound(6, dropouts).run()
    else:
        ProtocolRound(6, dropouts).run()


@pytest.mark.parametrize("drops", [0, 1])
def test_every_pattern_of_six_clients_within_the_bound_gives_the_exact_sum(drops):
    for dropouts in patterns(6, drops):
        check_six(dropouts)


def test_two_of_six_dropouts_at_any_two_stages_within_the_bound_give_the_exact_sum():
    draw = random.Random(2)
    for stages in itertools.product(STAGES, repeat=2):
        for _ in range(3):
            check_six(dict(zip(draw.sample(names(6), 2), stages, strict=True)))


def test_one_dropout_at_any_stage_but_the_first_is_within_the_bound_of_six():
    assert ProtocolRound(6).config.graph(6).survivors_min == 4


def test_a_round_to_which_too_few_devices_come_names_the_key_of_the_job():
    dropouts = dict.fromkeys(names(6)[:5], Stage.ADVERTISE_KEYS)
    sentence = r"^1 device answered and \d are needed \(federated\.quorum\)"
    with pytest.raises(AggregationAborted, match=sentence):
        ProtocolRound(6, dropouts).run()


@pytest.mark.parametrize("stage", STAGES)
def test_three_of_six_dropouts_at_one_stage_abort(stage):
    dropouts = dict.fromkeys(names(6)[:3], stage)
    if stage is Stage.ADVERTISE_KEYS:
        return  # the other three are the whole roster, and none of them drops out
    with pytest.raises(AggregationAborted) as failure:
        ProtocolRound(6, dropouts).run()
    assert failure.value.code in {
        "too-few-owners",
        "too-few-masked",
        "too-few-signatures",
        "too-few-shares",
    }


def test_sampled_patterns_beyond_the_bound_abort_or_are_exact_but_never_wrong():
    beyond = list(patterns(6, 3))
    outcomes = {True: 0, False: 0}
    for dropouts in random.Random(5).sample(beyond, 60):
        outcomes[exact_or_aborted(ProtocolRound(6, dropouts))] += 1
    assert outcomes[False] > 30  # most of them abort; the sum is checked in the others


def exact_or_aborted(protocol):
    try:
        protocol.run()
    except AggregationAborted:
        return False
    return True


@settings(max_examples=10)
@given(data=st.data())
def test_random_rounds_of_up_to_32_clients(data):
    """The graph is complete up to 128 clients, and a round of more is no other than one of 32."""
    count = data.draw(st.integers(3, 32), label="clients")
    drops = data.draw(st.integers(0, count // 2), label="drops")
    who = data.draw(st.permutations(names(count)), label="who")[:drops]
    dropouts = {name: data.draw(st.sampled_from(STAGES[1:]), label=name) for name in who}
    protocol = ProtocolRound(count, dropouts, size=3, bits=data.draw(st.sampled_from([16, 32, 64])))
    if count - drops >= protocol.config.graph(count).survivors_min:
        protocol.run()
    else:
        exact_or_aborted(protocol)


@settings(max_examples=5)
@given(count=st.integers(30, 64), seed=st.integers(0, 2**32), drops=st.floats(0, 0.2))
def test_random_rounds_on_the_graph_that_clients_draw(count, seed, drops):
    draw = random.Random(seed)
    dropouts = {
        name: draw.choice(STAGES[1:]) for name in draw.sample(names(count), int(drops * count))
    }
    protocol = ProtocolRound(count, dropouts, size=3, dropout_permille=200, complete_up_to=0)
    graph = protocol.config.graph(count)
    assert not graph.complete
    protocol.run()


def test_clients_on_the_graph_that_they_draw_because_they_are_many():
    """150 are more than the usual graph joins completely; with each more there are more edges."""
    draw = random.Random(45)
    dropouts = {name: draw.choice(STAGES[1:]) for name in draw.sample(names(150), 22)}
    protocol = ProtocolRound(150, dropouts, corrupt_permille=100, dropout_permille=150, size=50)
    graph = protocol.config.graph(150)
    assert not graph.complete
    assert graph.survivors_min == 150 - 22
    protocol.run()


def test_clients_are_sent_the_signatures_of_a_quorum_of_all_that_the_server_keeps():
    protocol = ProtocolRound(12, {"c00011": Stage.CONSISTENCY_CHECK}).until(Stage.UNMASKING)
    quorum = protocol.config.graph(12).quorum
    everybody = protocol.consistency_signatures.signatures
    assert quorum < len(everybody) == 11
    assert protocol.quorum.signatures == everybody[:quorum]
    assert len(ProtocolRound(12).run().clients) == 12  # these are enough for its clients


def test_many_clients_below_the_bound_abort():
    dropouts = dict.fromkeys(names(150)[:30], Stage.SHARE_KEYS)
    protocol = ProtocolRound(150, dropouts, dropout_permille=100)
    assert not protocol.config.graph(150).complete
    with pytest.raises(AggregationAborted, match="120 of 150 clients sent shares"):
        protocol.run()


def test_the_mean_is_the_plain_weighted_mean_of_the_survivors():
    protocol = ProtocolRound(6, {"c00001": Stage.MASKED_INPUT}, size=1000, weight_max=10)
    total = protocol.run()
    mean = decode(protocol.config, total.vector, clients=len(total.clients))
    updates = {
        name: decode(protocol.config, protocol.plain[name], clients=1) for name in total.clients
    }
    weights = {name: protocol.weight(name) for name in total.clients}
    assert mean.weight == sum(weights.values())
    plain = sum(weights[name] * updates[name].vector for name in weights) / mean.weight
    torch.testing.assert_close(mean.vector, plain, rtol=0, atol=1e-6)


def test_masked_vectors_look_uniform():
    """Chi-square of the bytes that leave a client whose vector is all zeros.

    Masks have no seed: seven deviations are exceeded once in 10^9 runs.
    """
    protocol = ProtocolRound(6, size=100_000).until(Stage.MASKED_INPUT)
    encoded = protocol.encoded("c00002")
    encoded.vector.zero_()
    _, payload = protocol.clients["c00002"].mask_input(protocol.inboxes["c00002"], encoded)
    counts = torch.bincount(torch.frombuffer(payload, dtype=torch.uint8).long(), minlength=256)
    expected = len(payload) / 256
    z = (float(((counts - expected) ** 2 / expected).sum()) - 255) / (2 * 255) ** 0.5
    assert abs(z) < 7


def test_nothing_is_left_of_the_plain_vector():
    protocol = ProtocolRound(6).until(Stage.MASKED_INPUT)
    encoded = protocol.encoded("c00002")
    message, payload = protocol.clients["c00002"].mask_input(protocol.inboxes["c00002"], encoded)
    assert payload is encoded.ring.payload()
    assert not torch.equal(encoded.vector, protocol.plain["c00002"])
    assert message.length == len(payload) == protocol.config.payload_bytes


def test_secrets_are_wiped_when_a_session_ends():
    protocol = ProtocolRound(6).until(Stage.UNMASKING)
    client = protocol.clients["c00002"]
    share_pairs, seed = list(client._share_pairs.values()), client._self_mask_seed
    assert any(any(pair) for pair in share_pairs)
    assert not any(seed)  # already after masking
    assert client._mask_key is client._sealing_key is None
    client.reveal_unmasking_shares(protocol.consistency_signatures)
    assert not any(any(pair) for pair in share_pairs)
    assert not client._share_pairs


def test_any_failure_ends_the_session_and_wipes_it():
    protocol = ProtocolRound(6).until(Stage.MASKED_INPUT)
    client, seed = protocol.clients["c00002"], protocol.clients["c00002"]._self_mask_seed
    with pytest.raises(IsthmusError):
        client.mask_input(protocol.inboxes["c00001"], protocol.encoded("c00002"))
    assert not any(seed)
    with pytest.raises(IsthmusError, match="ended"):
        client.mask_input(protocol.inboxes["c00002"], protocol.encoded("c00002"))


def test_progress_names_the_missing_clients():
    protocol = ProtocolRound(6).advertise_keys()
    server = protocol.server
    assert server.missing == set(names(6))
    assert not server.can_finish
    for name in names(6)[:4]:
        server.receive_shares(protocol.clients[name].share_keys(protocol.roster))
    assert server.missing == set(names(6)[4:])
    assert server.received == 4
    assert server.can_finish


def test_messages_survive_their_bytes():
    protocol = ProtocolRound(6, {"c00004": Stage.MASKED_INPUT}).until(Stage.FINISHED)
    messages = [
        protocol.config,
        protocol.roster,
        protocol.roster.entries[0],
        protocol.server._shares[0],
        *protocol.inboxes.values(),
        protocol.masked["c00000"][0],
        protocol.survivors,
        protocol.consistency_signatures,
        *protocol.revealed.values(),
    ]
    for message in messages:
        assert type(message).from_bytes(message.to_bytes()) == message


def test_an_attempt_that_failed_is_retried_with_fresh_keys():
    first = ProtocolRound(6, dict.fromkeys(names(6)[:3], Stage.SHARE_KEYS))
    with pytest.raises(AggregationAborted):
        first.run()
    second = ProtocolRound(6, attempt=1)
    total = second.run()
    assert len(total.clients) == 6
    assert first.config.hash != second.config.hash
