"""Whatever drops out when: the exact ring sum up to the bound, an abort beyond it."""

import functools
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parties import Parties, names

from isthmus.errors import AggregationAborted, IsthmusError
from isthmus_privacy.crypto import keys
from isthmus_privacy.secagg import Roster, ServerStage, decode

STAGES = [stage for stage in ServerStage if stage is not ServerStage.FINISHED]


@pytest.fixture(autouse=True, scope="module")
def worked_out_once():
    """All clients of a round hash the same roster and verify the same signatures, and both ends of
    a pair work out the same key, some of them twice; here each is worked out once.
    """
    agree, agreed = keys.OneTimeKey.agree, {}

    def agree_once(key, public, *purpose):
        pair = frozenset((key.public, public)), *purpose
        if pair not in agreed:
            agreed[pair] = agree(key, public, *purpose)
        return agreed[pair]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roster, "hash", functools.cache(Roster.hash))
        patch.setattr(keys, "verify", functools.cache(keys.verify))
        patch.setattr(keys.OneTimeKey, "agree", agree_once)
        yield


def patterns(count, drops):
    """Every way in which `drops` of `count` clients are lost, each at any stage."""
    for gone in itertools.combinations(names(count), drops):
        for stages in itertools.product(STAGES, repeat=drops):
            yield dict(zip(gone, stages, strict=True))


def check_six(lost):
    # Who never came is not in the roster, so the bound is relative to those who did.
    absent = sum(stage is ServerStage.ADVERTS for stage in lost.values())
    if 6 - len(lost) < Parties(6).config.neighbourhood(6 - absent).fewest:
        with pytest.raises(AggregationAborted):
            Parties(6, lost).run()
    else:
        Parties(6, lost).run()


@pytest.mark.parametrize("drops", [0, 1])
def test_every_pattern_of_six_clients_within_the_bound_gives_the_exact_sum(drops):
    for lost in patterns(6, drops):
        check_six(lost)


def test_two_of_six_lost_at_any_two_stages_within_the_bound_give_the_exact_sum():
    draw = random.Random(2)
    for stages in itertools.product(STAGES, repeat=2):
        for _ in range(3):
            check_six(dict(zip(draw.sample(names(6), 2), stages, strict=True)))


def test_one_lost_at_any_stage_but_the_first_is_within_the_bound_of_six():
    assert Parties(6).config.neighbourhood(6).fewest == 4


@pytest.mark.parametrize("stage", STAGES)
def test_three_of_six_lost_at_one_stage_abort(stage):
    lost = dict.fromkeys(names(6)[:3], stage)
    if stage is ServerStage.ADVERTS:
        return  # three who came are all there is, and all of them stay
    with pytest.raises(AggregationAborted) as failure:
        Parties(6, lost).run()
    assert failure.value.code in {
        "too-few-dealers",
        "too-few-masked",
        "too-few-consents",
        "too-few-shares",
    }


def test_sampled_patterns_beyond_the_bound_abort_or_are_exact_but_never_wrong():
    beyond = list(patterns(6, 3))
    outcomes = {True: 0, False: 0}
    for lost in random.Random(5).sample(beyond, 60):
        outcomes[exact_or_aborted(Parties(6, lost))] += 1
    assert outcomes[False] > 30  # most of them abort; the sum is checked in the others


def exact_or_aborted(parties):
    try:
        parties.run()
    except AggregationAborted:
        return False
    return True


@settings(max_examples=10)
@given(data=st.data())
def test_random_rounds_of_up_to_64_clients(data):
    count = data.draw(st.integers(3, 64), label="clients")
    drops = data.draw(st.integers(0, count // 2), label="drops")
    who = data.draw(st.permutations(names(count)), label="who")[:drops]
    lost = {name: data.draw(st.sampled_from(STAGES[1:]), label=name) for name in who}
    parties = Parties(count, lost, size=3, bits=data.draw(st.sampled_from([16, 32, 64])))
    if count - drops >= parties.config.neighbourhood(count).fewest:
        parties.run()
    else:
        exact_or_aborted(parties)


@settings(max_examples=5)
@given(count=st.integers(30, 64), seed=st.integers(0, 2**32), drops=st.floats(0, 0.2))
def test_random_rounds_on_the_graph_that_clients_draw(count, seed, drops):
    draw = random.Random(seed)
    lost = {name: draw.choice(STAGES[1:]) for name in draw.sample(names(count), int(drops * count))}
    parties = Parties(count, lost, size=3, dropout_permille=200, complete_up_to=0)
    hood = parties.config.neighbourhood(count)
    assert not hood.complete
    parties.run()


def test_300_clients_on_the_graph_that_they_draw():
    draw = random.Random(45)
    lost = {name: draw.choice(STAGES[1:]) for name in draw.sample(names(300), 45)}
    parties = Parties(300, lost, corrupt_permille=100, dropout_permille=150, size=50)
    assert not parties.config.neighbourhood(300).complete
    parties.run()


def test_300_clients_below_the_bound_abort():
    lost = dict.fromkeys(names(300)[:60], ServerStage.SHARES)
    with pytest.raises(AggregationAborted, match="240 of 300 clients dealt"):
        Parties(300, lost, dropout_permille=100).run()


def test_the_mean_is_the_plain_weighted_mean_of_the_survivors():
    parties = Parties(6, {"c00001": ServerStage.MASKED}, size=1000, weight_max=10)
    total = parties.run()
    mean = decode(parties.config, total.vector, clients=len(total.clients))
    updates = {
        name: decode(parties.config, parties.plain[name], clients=1) for name in total.clients
    }
    weights = {name: parties.weight(name) for name in total.clients}
    assert mean.weight == sum(weights.values())
    plain = sum(weights[name] * updates[name].vector for name in weights) / mean.weight
    torch.testing.assert_close(mean.vector, plain, rtol=0, atol=1e-6)


def test_masked_vectors_look_uniform():
    """Chi-square of the bytes that leave a client whose vector is all zeros."""
    parties = Parties(6, size=100_000).until(ServerStage.MASKED)
    encoded = parties.encoded("c00002")
    encoded.vector.zero_()
    _, payload = parties.clients["c00002"].mask(parties.inboxes["c00002"], encoded)
    counts = torch.bincount(torch.frombuffer(payload, dtype=torch.uint8).long(), minlength=256)
    expected = len(payload) / 256
    z = (float(((counts - expected) ** 2 / expected).sum()) - 255) / (2 * 255) ** 0.5
    assert abs(z) < 6


def test_nothing_is_left_of_the_plain_vector():
    parties = Parties(6).until(ServerStage.MASKED)
    encoded = parties.encoded("c00002")
    message, payload = parties.clients["c00002"].mask(parties.inboxes["c00002"], encoded)
    assert payload is encoded.payload
    assert not torch.equal(encoded.vector, parties.plain["c00002"])
    assert message.length == len(payload) == parties.config.payload_bytes


def test_secrets_are_wiped_when_a_session_ends():
    parties = Parties(6).until(ServerStage.RELEASES)
    client = parties.clients["c00002"]
    held, seed = list(client._held.values()), client._seed
    assert any(any(pair) for pair in held)
    assert not any(seed)  # already after masking
    assert client._mask is client._sealing is None
    client.release(parties.consistency_signatures)
    assert not any(any(pair) for pair in held)
    assert not client._held


def test_any_failure_ends_the_session_and_wipes_it():
    parties = Parties(6).until(ServerStage.MASKED)
    client, seed = parties.clients["c00002"], parties.clients["c00002"]._seed
    with pytest.raises(IsthmusError):
        client.mask(parties.inboxes["c00001"], parties.encoded("c00002"))
    assert not any(seed)
    with pytest.raises(IsthmusError, match="ended"):
        client.mask(parties.inboxes["c00002"], parties.encoded("c00002"))


def test_progress_says_who_is_missing():
    parties = Parties(6).advertise()
    server = parties.server
    assert server.missing == set(names(6))
    assert not server.enough
    for name in names(6)[:4]:
        server.take_shares(parties.clients[name].deal(parties.roster))
    assert server.missing == set(names(6)[4:])
    assert server.heard == 4
    assert server.enough


def test_messages_survive_their_bytes():
    parties = Parties(6, {"c00004": ServerStage.MASKED}).until(ServerStage.FINISHED)
    said = [
        parties.config,
        parties.roster,
        parties.roster.adverts[0],
        parties.server._shares[0],
        *parties.inboxes.values(),
        parties.masked["c00000"][0],
        parties.survivors,
        parties.consistency_signatures,
        *parties.released.values(),
    ]
    for message in said:
        assert type(message).from_bytes(message.to_bytes()) == message


def test_an_attempt_that_failed_is_retried_with_fresh_keys():
    first = Parties(6, dict.fromkeys(names(6)[:3], ServerStage.SHARES))
    with pytest.raises(AggregationAborted):
        first.run()
    second = Parties(6, attempt=1)
    total = second.run()
    assert len(total.clients) == 6
    assert first.config.hash != second.config.hash
