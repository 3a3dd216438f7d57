"""Attempts of devices that send their updates in plaintext."""

import asyncio
import re

import pytest
import torch
from tests.server.regimes.replies import (
    EXPIRES,
    LAYOUT,
    LEASE_SECONDS,
    MISBEHAVIOURS,
    TIMES,
    forever,
    updating,
)
from tests.server.scripted_participant import delayed
from tests.server.waiting import wait_until

from isthmus.errors import TaskError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import CHUNK_BYTES, describe
from isthmus.wire import link_pb2
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.storage.records import Participants


class PreparedAttempt:
    """A published model from which devices of a network train."""

    def __init__(self, network, job, layout, spool):
        self.network = network
        self.job = job
        context = FederatedContext(network.link, job, link_pb2.OpenRun(run_id="run"), layout, spool)
        self.regime = FederatedRegime(context)
        self.model = layout.encode(torch.ones(layout.size))
        self.blob = describe(self.model)
        network.link.publish(self.blob, self.model)

    async def run(self, *names, examples=10, start=None):
        """Run an attempt with these devices, each with so many examples."""
        spec = AttemptSpec(
            round=1,
            attempt=1,
            model=self.blob,
            cohort=dict.fromkeys(names, examples),
            settings=self.job.federated,
            start=start,
        )
        return await self.regime.train(spec)


@pytest.fixture
def prepare(network, make_job, tmp_path):
    """Prepare an attempt under a job with some keys changed."""

    async def prepare(*overrides, layout=LAYOUT):
        await network.listen(LEASE_SECONDS)
        return PreparedAttempt(network, make_job(*overrides), layout, tmp_path)

    return prepare


def statuses(receipts):
    return {receipt.participant: receipt.status for receipt in receipts}


async def test_the_result_is_the_mean_of_the_updates_weighted_by_examples(prepare, network):
    attempt = await prepare("federated.cohort=2")
    a = await network.join("a", updating([1.0, 2.0, 3.0], examples=10, training={"loss": 1.0}))
    b = await network.join("b", updating([4.0, 5.0, 6.0], examples=20, training={"loss": 4.0}))
    result = await attempt.run("a", "b", examples=20)
    assert result.pseudo_gradient.tolist() == [3.0, 4.0, 5.0]
    assert result.training == {"loss": 3.0}
    for participant in (a, b):
        (request,) = participant.requests
        training = request.train_local
        assert (training.run_id, training.round, training.attempt) == ("run", 1, 1)
        assert participant.buffers == [attempt.model]
        await wait_until(lambda participant=participant: participant.receipts == [(True, "")])
    receipt = result.receipts[0]
    assert (receipt.participant, receipt.status, receipt.reason) == ("a", "accepted", "")
    assert (receipt.examples, receipt.steps, receipt.seconds) == (10, 1, 0.5)
    assert (receipt.bytes_in, receipt.bytes_out) == (LAYOUT.nbytes, LAYOUT.nbytes)


async def test_devices_that_count_the_same_may_have_any_number_of_examples(prepare, network):
    """The precision followed from examples that are no weights."""
    attempt = await prepare("federated.cohort=2", "federated.control_variates=2")
    for name, factor in (("a", 1.0), ("b", 3.0)):
        vector = [factor * each for each in (0.0, 0.0, 0.0, 1e-6, 2e-6, -3e-6)]
        layout = LAYOUT.gradient_and_update
        await network.join(name, updating(vector, examples=1 << 40, layout=layout))
    start = torch.ones(LAYOUT.size)
    result = await attempt.run("a", "b", examples=1 << 40, start=start)
    assert result.pseudo_gradient.tolist() == pytest.approx([2e-6, 4e-6, -6e-6], rel=1e-5)


@pytest.mark.parametrize("claimed", [0, 11, 20, 1 << 30])
@pytest.mark.parametrize(
    "rule", [(), ("federated.aggregation=norm-bound", "federated.aggregation_settings.norm=10.0")]
)
async def test_an_update_does_not_count_more_than_its_device_declared(
    prepare, network, claimed, rule
):
    attempt = await prepare("federated.cohort=3", "federated.quorum=2", *rule)
    for name in "ab":
        await network.join(name, updating([1.0, 2.0, 3.0]))
    await network.join("liar", updating([-4000.0, 2.0, 3.0], examples=claimed))
    result = await attempt.run("a", "b", "liar")
    assert result.pseudo_gradient.tolist() == [1.0, 2.0, 3.0]
    receipt = result.receipts[-1]
    assert (receipt.participant, receipt.status) == ("liar", "rejected")
    assert receipt.reason == (
        f"its weight={claimed} does not fit: it must be at least 1 and at most 10, the examples "
        "that it declared when it opened the run"
    )


async def test_a_model_of_many_chunks_is_aggregated(prepare, network):
    layout = TensorLayout.from_shapes({"weight": (CHUNK_BYTES,)})
    attempt = await prepare("federated.cohort=3", layout=layout)
    vector = torch.arange(layout.size) / 1024

    for name in "abc":
        await network.join(name, updating(vector, layout))
    result = await attempt.run("a", "b", "c")
    assert torch.equal(result.pseudo_gradient, vector)


@pytest.mark.parametrize("kind", MISBEHAVIOURS)
async def test_a_misbehaving_device_is_left_out_and_the_others_are_aggregated(
    prepare, network, timeouts, kind
):
    respond, status, reason = MISBEHAVIOURS[kind]
    attempt = await prepare("federated.cohort=4", *TIMES)
    good = [await network.join(name, updating()) for name in ("x", "y", "z")]
    bad = await network.join("bad", respond)
    training = asyncio.create_task(attempt.run("bad", "x", "y", "z"))
    await wait_until(lambda: all(participant.receipts for participant in good))
    if kind in EXPIRES:
        await timeouts.expire(EXPIRES[kind])
    result = await training
    assert result.pseudo_gradient.tolist() == [1.0, 2.0, 3.0]
    assert [receipt.participant for receipt in result.receipts] == ["bad", "x", "y", "z"]
    receipt = result.receipts[0]
    assert receipt.status == status
    assert receipt.reason.startswith(reason)
    assert receipt.reason.isprintable()
    assert len(receipt.reason) < 1010
    assert receipt.sent == (status == "rejected")
    assert Participants.of(result.receipts).accepted == 3
    for participant in good:
        await wait_until(lambda participant=participant: participant.receipts == [(True, "")])
    if status == "rejected":
        await wait_until(lambda: bad.receipts)
        assert bad.receipts == [(False, receipt.reason)]
    elif kind == "silence":
        await wait_until(lambda: bad.cancelled)


async def test_an_attempt_below_the_quorum_fails_with_a_receipt_for_each_device(prepare, network):
    attempt = await prepare("federated.cohort=4", "federated.quorum=3")

    async def fail(participant, request, model):
        raise TaskError("no power")

    responses = {"a": updating(), "b": fail, "c": fail, "d": fail}
    for name, respond in responses.items():
        await network.join(name, respond)
    with pytest.raises(AttemptFailed) as caught:
        await attempt.run(*responses)
    assert re.fullmatch(
        r"[01] of 4 updates were accepted and the quorum is 3 \(.*[bc]: no power.*\)",
        str(caught.value),
    )
    assert [receipt.participant for receipt in caught.value.receipts] == list(responses)
    assert Participants.of(caught.value.receipts).rejected >= 2


@pytest.mark.parametrize("mode", ["rounds", "buffered"])
async def test_a_device_that_was_never_reached_has_not_started(prepare, network, mode):
    attempt = await prepare("federated.cohort=2", "federated.quorum=1", f"federated.mode={mode}")
    await network.join("a", updating())
    result = await attempt.run("a", "gone")
    assert sorted((r.participant, r.status, r.started) for r in result.receipts) == [
        ("a", "accepted", True),
        ("gone", "dropped", False),
    ]
    assert Participants.of(result.receipts).started == 1


async def test_an_attempt_ends_as_soon_as_its_quorum_cannot_be_reached(prepare, network):
    attempt = await prepare("federated.cohort=2", "federated.quorum=2")

    b_trains = asyncio.Event()

    async def fail(participant, request, model):
        await b_trains.wait()
        raise TaskError("no power")

    async def train_forever(participant, request, model):
        b_trains.set()
        await forever()

    await network.join("a", fail)
    endless = await network.join("b", train_forever)
    with pytest.raises(AttemptFailed) as caught:
        await attempt.run("a", "b")
    assert str(caught.value) == (
        "0 of 2 updates were accepted and the quorum is 2 "
        "(a: no power; b: the quorum could not be reached any more)"
    )
    assert statuses(caught.value.receipts) == {"a": "rejected", "b": "dropped"}
    await wait_until(lambda: endless.cancelled)


async def test_a_cohort_below_the_quorum_is_not_invited(prepare, network):
    attempt = await prepare("federated.cohort=4")
    with pytest.raises(AttemptFailed, match=r"^2 devices are ready and the quorum is 3$") as caught:
        await attempt.run("a", "b")
    assert caught.value.receipts == []


async def test_updates_beyond_the_cohort_are_cancelled_and_refused(prepare, network):
    attempt = await prepare("federated.cohort=2", "federated.over_selection=2")
    asked = asyncio.Event()
    released = asyncio.Event()

    late = delayed(updating([9.0, 9.0, 9.0]), released)
    first = [await network.join(name, delayed(updating(), asked)) for name in "ab"]
    others = [await network.join(name, late) for name in "cd"]
    running = asyncio.create_task(attempt.run("a", "b", "c", "d"))
    # A request that has not been delivered when the attempt ends is not cancelled either.
    await wait_until(lambda: all(participant.requests for participant in others))
    asked.set()
    result = await running
    assert result.pseudo_gradient.tolist() == [1.0, 2.0, 3.0]
    assert statuses(result.receipts) == {
        "a": "accepted",
        "b": "accepted",
        "c": "dropped",
        "d": "dropped",
    }
    assert result.receipts[2].reason == "enough updates were in"
    for participant in first:
        await wait_until(lambda participant=participant: participant.receipts == [(True, "")])
    for participant in others:
        await wait_until(lambda participant=participant: participant.cancelled)
    released.set()
    for participant in others:
        await wait_until(
            lambda participant=participant: (
                participant.receipts == [(False, "too late: the request has ended")]
            )
        )


async def test_no_more_updates_than_the_cohort_are_accepted_when_all_arrive_at_once(
    prepare, network
):
    attempt = await prepare("federated.cohort=2", "federated.over_selection=4")
    names = [f"device-{i}" for i in range(8)]
    participants = [await network.join(name, updating()) for name in names]
    result = await attempt.run(*names)
    assert Participants.of(result.receipts).accepted == 2
    assert len(result.receipts) == 8
    for participant in participants:
        await wait_until(
            lambda participant=participant: participant.receipts or not participant.requests
        )
    assert sum(participant.receipts == [(True, "")] for participant in participants) == 2


async def test_a_device_whose_upload_stalls_learns_that_the_round_is_over(prepare, network):
    layout = TensorLayout.from_shapes({"weight": (CHUNK_BYTES,)})
    attempt = await prepare("federated.cohort=1", layout=layout)
    proxy, port = await network.start_proxy()
    proxy.next_limits["up"] = CHUNK_BYTES

    update = updating(torch.zeros(layout.size), layout)
    slow = await network.join("slow", update, port)
    await network.join("fast", delayed(update, proxy.stalled))
    result = await attempt.run("slow", "fast")
    assert statuses(result.receipts) == {"slow": "dropped", "fast": "accepted"}
    await wait_until(lambda: slow.receipts == [(False, "the round is over")])


async def test_the_same_updates_give_the_same_bytes_in_any_order_of_arrival(prepare, network):
    attempt = await prepare("federated.cohort=3")
    updates = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    responses = {
        name: updating(vector, examples=7) for name, vector in zip("abc", updates, strict=True)
    }
    participants = {name: await network.join(name, responses[name]) for name in "abc"}

    def in_turn(name, previous, own):
        async def respond(participant, request, model):
            await previous.wait()
            own.set()
            return await responses[name](participant, request, model)

        return respond

    means = []
    for order in ("abc", "cba", "bca"):
        turns = [asyncio.Event() for _ in range(4)]
        turns[0].set()
        for i, name in enumerate(order):
            participants[name].respond = in_turn(name, turns[i], turns[i + 1])
        means.append((await attempt.run("a", "b", "c")).pseudo_gradient)
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
