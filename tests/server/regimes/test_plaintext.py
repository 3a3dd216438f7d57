"""Attempts of devices that send their updates in plaintext."""

import asyncio
import re

import pytest
import torch
from tests.server.regimes.misbehaviour import ENDS, LAYOUT, LEASE, NEVER, TIMES, misbehaviours

from isthmus.errors import TaskError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import CHUNK_BYTES, describe
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.storage.records import Participants


class Round:
    """A fleet on a net, and a model that it trains from."""

    def __init__(self, net, job, layout, directory):
        self.net = net
        self.link = net.link
        self.job = job
        self.layout = layout
        self.fleet = FederatedRegime(FederatedContext(net.link, job, "run", layout, directory))
        self.model = layout.encode(torch.ones(layout.size))
        self.blob = describe(self.model)
        self.link.publish(self.blob, self.model)

    async def train(self, *names, examples=10):
        spec = AttemptSpec(
            round=1,
            attempt=1,
            model=self.blob,
            cohort=dict.fromkeys(names, examples),
            settings=self.job.federated,
        )
        return await self.fleet.train(spec)


@pytest.fixture
def begin(net, make_job, tmp_path):
    """A fleet with a job's settings."""

    async def begin(*overrides, layout=LAYOUT):
        await net.listen(LEASE)
        return Round(net, make_job(*overrides), layout, tmp_path)

    return begin


@pytest.fixture
def good(update):
    """Work that answers with a fine update."""

    def good(vector=(1.0, 2.0, 3.0), **more):
        async def work(guest, request, model):
            return update(LAYOUT, vector, **more)

        return work

    return good


def statuses(receipts):
    return {receipt.participant: receipt.status for receipt in receipts}


async def test_a_cohorts_updates_become_their_weighted_mean(begin, good):
    round_ = await begin("federated.cohort=2")
    a = await round_.net.join("a", good([1.0, 2.0, 3.0], examples=10, training={"loss": 1.0}))
    b = await round_.net.join("b", good([4.0, 5.0, 6.0], examples=20, training={"loss": 4.0}))
    result = await round_.train("a", "b", examples=20)
    assert result.pseudo_gradient.tolist() == [3.0, 4.0, 5.0]
    assert result.training == {"loss": 3.0}
    for guest in (a, b):
        (work,) = (request.train_local for request in guest.asked)
        assert (work.run_id, work.round, work.attempt) == ("run", 1, 1)
        assert guest.buffers == [round_.model]
        await round_.net.until(lambda guest=guest: guest.receipts == [(True, "")])
    receipt = result.receipts[0]
    assert (receipt.participant, receipt.status, receipt.reason) == ("a", "accepted", "")
    assert (receipt.examples, receipt.steps, receipt.seconds) == (10, 1, 0.5)
    assert (receipt.bytes_in, receipt.bytes_out) == (LAYOUT.nbytes, LAYOUT.nbytes)


async def test_a_model_of_many_chunks(begin, net, update):
    layout = TensorLayout.from_shapes({"weight": (CHUNK_BYTES,)})
    round_ = await begin("federated.cohort=3", layout=layout)
    vector = torch.arange(layout.size) / 1024

    async def work(guest, request, model):
        return update(layout, vector)

    for name in "abc":
        await net.join(name, work)
    result = await round_.train("a", "b", "c")
    assert torch.equal(result.pseudo_gradient, vector)


@pytest.mark.parametrize("how", list(misbehaviours(None)))
async def test_one_bad_device_does_not_spoil_the_round(begin, good, update, clock, how):
    work, status, reason = misbehaviours(update)[how]
    round_ = await begin("federated.cohort=4", *TIMES)
    guests = [await round_.net.join(name, good()) for name in ("x", "y", "z")]
    bad = await round_.net.join("bad", work)
    training = asyncio.create_task(round_.train("bad", "x", "y", "z"))
    await round_.net.until(lambda: all(guest.receipts for guest in guests))
    if how in ENDS:
        await clock.over(ENDS[how])
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
    for guest in guests:
        await round_.net.until(lambda guest=guest: guest.receipts == [(True, "")])
    if status == "rejected":
        await round_.net.until(lambda: bad.receipts)
        assert bad.receipts == [(False, receipt.reason)]
    elif how == "silence":
        await round_.net.until(lambda: bad.cancelled)


async def test_below_the_quorum_the_attempt_fails_with_a_receipt_for_everyone(begin, good):
    round_ = await begin("federated.cohort=4", "federated.quorum=3")

    async def fail(guest, request, model):
        raise TaskError("no power")

    works = {"a": good(), "b": fail, "c": fail, "d": fail}
    for name, work in works.items():
        await round_.net.join(name, work)
    with pytest.raises(AttemptFailed) as caught:
        await round_.train(*works)
    assert re.fullmatch(
        r"[01] of 4 updates were accepted and the quorum is 3 \(.*[bc]: no power.*\)",
        str(caught.value),
    )
    assert [receipt.participant for receipt in caught.value.receipts] == list(works)
    assert Participants.of(caught.value.receipts).rejected >= 2


@pytest.mark.parametrize("mode", ["rounds", "buffered"])
async def test_who_was_never_reached_has_not_started(begin, good, mode):
    round_ = await begin("federated.cohort=2", "federated.quorum=1", f"federated.mode={mode}")
    await round_.net.join("a", good())
    result = await round_.train("a", "gone")
    assert sorted((r.participant, r.status, r.started) for r in result.receipts) == [
        ("a", "accepted", True),
        ("gone", "dropped", False),
    ]
    assert Participants.of(result.receipts).started == 1


async def test_an_attempt_ends_as_soon_as_its_quorum_cannot_be_reached(begin):
    round_ = await begin("federated.cohort=2", "federated.quorum=2")

    b_trains = asyncio.Event()

    async def fail(guest, request, model):
        await b_trains.wait()
        raise TaskError("no power")

    async def sleep(guest, request, model):
        b_trains.set()
        await NEVER().wait()

    await round_.net.join("a", fail)
    asleep = await round_.net.join("b", sleep)
    with pytest.raises(AttemptFailed) as caught:
        await round_.train("a", "b")
    assert str(caught.value) == (
        "0 of 2 updates were accepted and the quorum is 2 "
        "(a: no power; b: the quorum could not be reached any more)"
    )
    assert statuses(caught.value.receipts) == {"a": "rejected", "b": "dropped"}
    await round_.net.until(lambda: asleep.cancelled)


async def test_too_few_devices_are_not_even_asked(begin):
    round_ = await begin("federated.cohort=4")
    with pytest.raises(AttemptFailed, match=r"^2 devices are ready and the quorum is 3$") as caught:
        await round_.train("a", "b")
    assert caught.value.receipts == []


async def test_the_first_to_report_are_taken_and_the_others_are_told(begin, good):
    round_ = await begin("federated.cohort=2", "federated.over_selection=2")
    released = asyncio.Event()

    async def late(guest, request, model):
        await released.wait()
        return await good([9.0, 9.0, 9.0])(guest, request, model)

    first = [await round_.net.join(name, good()) for name in "ab"]
    others = [await round_.net.join(name, late) for name in "cd"]
    result = await round_.train("a", "b", "c", "d")
    assert result.pseudo_gradient.tolist() == [1.0, 2.0, 3.0]
    assert statuses(result.receipts) == {
        "a": "accepted",
        "b": "accepted",
        "c": "dropped",
        "d": "dropped",
    }
    assert result.receipts[2].reason == "enough updates were in"
    for guest in first:
        await round_.net.until(lambda guest=guest: guest.receipts == [(True, "")])
    for guest in others:
        await round_.net.until(lambda guest=guest: guest.cancelled)
    released.set()
    for guest in others:
        await round_.net.until(
            lambda guest=guest: guest.receipts == [(False, "too late: the request has ended")]
        )


async def test_no_more_than_the_cohort_is_taken_when_all_report_at_once(begin, good):
    round_ = await begin("federated.cohort=2", "federated.over_selection=4")
    names = [f"device-{i}" for i in range(8)]
    guests = [await round_.net.join(name, good()) for name in names]
    result = await round_.train(*names)
    assert Participants.of(result.receipts).accepted == 2
    assert len(result.receipts) == 8
    for guest in guests:
        await round_.net.until(lambda guest=guest: guest.receipts or not guest.asked)
    assert sum(guest.receipts == [(True, "")] for guest in guests) == 2


async def test_a_device_whose_upload_is_held_up_is_told_when_the_round_is_over(begin, net, update):
    layout = TensorLayout.from_shapes({"weight": (CHUNK_BYTES,)})
    round_ = await begin("federated.cohort=1", layout=layout)
    wire, port = await net.wire()
    wire.next["up"] = CHUNK_BYTES

    async def work(guest, request, model):
        return update(layout, torch.zeros(layout.size))

    async def wait(guest, request, model):
        await wire.stalled.wait()
        return await work(guest, request, model)

    slow = await net.join("slow", work, port)
    await net.join("fast", wait)
    result = await round_.train("slow", "fast")
    assert statuses(result.receipts) == {"slow": "dropped", "fast": "accepted"}
    await net.until(lambda: slow.receipts == [(False, "the round is over")])


async def test_the_same_updates_give_the_same_bytes_in_any_order_of_arrival(begin, good):
    round_ = await begin("federated.cohort=3")
    updates = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    fine = {name: good(vector, examples=7) for name, vector in zip("abc", updates, strict=True)}
    guests = {name: await round_.net.join(name, fine[name]) for name in "abc"}

    def after(name, before, now):
        async def work(guest, request, model):
            await before.wait()
            now.set()
            return await fine[name](guest, request, model)

        return work

    means = []
    for order in ("abc", "cba", "bca"):
        turns = [asyncio.Event() for _ in range(4)]
        turns[0].set()
        for place, name in enumerate(order):
            guests[name].answer = after(name, turns[place], turns[place + 1])
        means.append((await round_.train("a", "b", "c")).pseudo_gradient)
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
