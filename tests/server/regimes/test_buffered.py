import asyncio
import itertools
import threading

import pytest
import torch

from isthmus.errors import JobError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_server.model.update_decoding import StreamingUpdate
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.regimes.secure import SecureAggregationAttempt
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.events import RoundCommitted, RoundPlanned
from isthmus_server.transport import peer
from isthmus_server.views.report import read_report

LAYOUT = TensorLayout.from_shapes({"weight": (3,)})
LEASE = 99.0


class Slow:
    """Work that ends when the test says so, with an update that says from which round it is."""

    def __init__(self, update, examples=10):
        self.update = update
        self.examples = examples
        self.go = asyncio.Event()
        self.rounds = []

    async def __call__(self, guest, request, model):
        work = request.train_local
        self.rounds.append(work.round)
        await self.go.wait()
        vector = [float(work.round), 1.0, 0.0]
        return self.update(LAYOUT, vector, examples=self.examples, training={"loss": 2.0})


def spec_of(fleet, round_, attempt, blob, cohort):
    """An attempt with the settings of the fleet's job."""
    return AttemptSpec(
        round=round_,
        attempt=attempt,
        model=blob,
        cohort=cohort,
        settings=fleet.context.job.federated,
    )


@pytest.fixture
def begin(net, make_job, update, tmp_path):
    """A fleet with a buffer, slow devices, and a round's `train(round_)`."""

    async def begin(*overrides, names="abcd"):
        await net.listen(LEASE)
        settings = ("federated.mode=buffered", "federated.cohort=2", "federated.quorum=2")
        fleet = FederatedRegime(
            FederatedContext(net.link, make_job(*settings, *overrides), "run", LAYOUT, tmp_path)
        )
        devices = {name: Slow(update) for name in names}
        guests = {name: await net.join(name, work) for name, work in devices.items()}

        async def train(round_, attempt=1):
            payload = LAYOUT.encode(torch.full((3,), float(round_)))
            blob = describe(payload)
            net.link.publish(blob, payload)
            try:
                idle = {name: 10 for name in names if name not in fleet.busy}
                return await fleet.train(spec_of(fleet, round_, attempt, blob, idle))
            finally:
                net.link.retract(blob)

        return fleet, devices, guests, train

    return begin


def accepted(result):
    return {r.participant: r.staleness for r in result.receipts if r.status == "accepted"}


async def test_a_slow_device_delivers_into_a_later_buffer_and_counts_less(begin, net):
    fleet, devices, guests, train = await begin(
        "federated.buffer={concurrency=3, staleness_exponent=1}"
    )
    devices["a"].examples = 30
    filling = asyncio.create_task(train(1))
    await net.until(lambda: sum(bool(one.rounds) for one in devices.values()) == 3)
    first = [name for name, one in devices.items() if one.rounds]
    slow, *quick = first
    for name in quick:
        devices[name].go.set()
    result = await filling
    assert accepted(result) == dict.fromkeys(quick, 0)
    assert result.pseudo_gradient.tolist() == [1.0, 1.0, 0.0]
    assert result.training == {"staleness": 0.0, "loss": 2.0}
    assert fleet.busy[0] == slow
    # Round 2 goes on while it is at work; in round 3 its update is two rounds old: a third of it.
    for one in devices.values():
        one.go.set() if one is not devices[slow] else None
    assert slow not in accepted(await train(2))
    filling = asyncio.create_task(train(3))
    devices[slow].go.set()
    result = await filling
    found = accepted(result)
    assert found.pop(slow) == 2
    ((other, age),) = found.items()
    weights = [devices[slow].examples, devices[other].examples]
    old = torch.tensor([1.0, 1.0, 0.0]) / 3
    newer = torch.tensor([3.0 - age, 1.0, 0.0]) / (1 + age)
    expected = (weights[0] * old + weights[1] * newer) / sum(weights)
    torch.testing.assert_close(result.pseudo_gradient, expected, atol=1e-6, rtol=0)
    await net.until(lambda: guests[slow].receipts == [(True, "")])
    await fleet.stop()


async def test_an_update_that_is_too_old_is_not_used(begin, net):
    fleet, devices, guests, train = await begin("federated.buffer={max_staleness=1}", names="abc")
    for name in "bc":
        devices[name].go.set()
    for round_ in (1, 2):
        assert accepted(await train(round_)) == {"b": 0, "c": 0}
    filling = asyncio.create_task(train(3))
    devices["a"].go.set()
    result = await filling
    assert set(accepted(result)) == {"b", "c"}
    if "a" in fleet.busy:  # the other two were quicker: it is for the next one to see
        result = await train(5)
    (late,) = (r for r in result.receipts if r.participant == "a")
    assert late.status == "rejected"
    assert "rounds ago, and at most 1 are taken" in late.reason
    assert guests["a"].receipts[0][0] is False
    await fleet.stop()


async def test_a_device_that_is_lost_is_replaced(begin, net, clock):
    fleet, devices, guests, train = await begin("federated.buffer={concurrency=2}", names="abc")
    filling = asyncio.create_task(train(1))
    await net.until(lambda: sum(bool(one.rounds) for one in devices.values()) == 2)
    gone, quick = (name for name, one in devices.items() if one.rounds)
    (third,) = set("abc") - {gone, quick}
    await guests[gone].leave()
    await clock.over(LEASE)
    devices[quick].go.set()
    await net.until(lambda: gone not in net.link.peers and devices[third].rounds)
    devices[third].go.set()
    result = await filling
    assert set(accepted(result)) == set("abc") - {gone}
    (lost,) = (r for r in result.receipts if r.participant == gone)
    assert (lost.status, "lease" in lost.reason) == ("dropped", True)
    await fleet.stop()


async def test_a_device_without_its_model_when_the_round_ends_is_let_go_and_asked_again(begin, net):
    fleet, devices, guests, train = await begin("federated.buffer={concurrency=3}", names="abc")
    wire, port = await net.wire()
    await guests["c"].leave()
    await net.until(lambda: net.link.peers["c"].stream is None)
    await net.join("c", devices["c"], port)
    await net.until(lambda: net.link.peers["c"].stream is not None)
    wire.limits["down"] = 0
    for name in "ab":
        devices[name].go.set()
    result = await train(1)
    assert set(accepted(result)) == {"a", "b"}
    (late,) = (r for r in result.receipts if r.participant == "c")
    assert (late.status, late.started) == ("dropped", False)
    assert late.reason == "the round was over before it had the model"
    assert fleet.busy == []
    wire.cut()
    devices["a"].go.clear()
    devices["c"].go.set()
    assert set(accepted(await train(2))) == {"b", "c"}
    await fleet.stop()


async def test_a_buffer_that_does_not_fill_fails_and_leaves_them_at_work(begin, net, clock):
    fleet, devices, guests, train = await begin("time.round_seconds=77", names="ab")
    devices["a"].go.set()
    filling = asyncio.create_task(train(1))
    await net.until(lambda: guests["a"].receipts and devices["b"].rounds)
    await clock.over(77)
    with pytest.raises(AttemptFailed, match="1 updates came into the buffer and the quorum is 2"):
        await filling
    assert fleet.busy == ["b"]
    devices["b"].go.set()
    again = await train(1, attempt=2)
    assert accepted(again) == {"a": 0, "b": 0}
    await fleet.stop()


async def test_an_update_that_is_being_added_when_the_time_is_over_does_not_count(
    begin, net, monkeypatch
):
    fleet, devices, guests, train = await begin(names="ab")
    adding, go_on = threading.Event(), threading.Event()
    write = StreamingUpdate.write

    def held_up(*arguments):
        write(*arguments)
        adding.set()
        assert go_on.wait(100)

    monkeypatch.setattr(peer, "THREAD_CHUNK_BYTES", 1)
    monkeypatch.setattr(StreamingUpdate, "write", held_up)
    devices["a"].go.set()
    filling = asyncio.create_task(train(1))
    await net.until(adding.is_set)
    filling.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert fleet.buffered.current.total.weight == 0
    (receipt,) = (r for r in fleet.cancelled("the time is over") if r.participant == "a")
    why = "the round's time was over before its update was here"
    assert (receipt.status, receipt.reason) == ("dropped", why)
    await net.until(lambda: guests["a"].receipts == [(False, why)])
    await fleet.stop()


async def test_a_secure_sum_ends_with_the_round_that_its_buffer_began(begin, monkeypatch):
    secure = "federated={secure_aggregation=true, mode='buffered', cohort=3, quorum=3}"
    fleet, devices, _, train = await begin(secure, names="abc")
    deadlines = []

    async def run(attempt, deadline=None):
        deadlines.append(deadline)
        raise AttemptFailed("nobody agreed", [])

    monkeypatch.setattr(SecureAggregationAttempt, "run", run)
    for one in devices.values():
        one.go.set()
    began = asyncio.get_running_loop().time()
    with pytest.raises(AttemptFailed, match="nobody agreed"):
        await train(1)
    now = asyncio.get_running_loop().time()
    assert began <= deadlines[0] - fleet.context.job.time.round_seconds <= now


async def test_whoever_is_at_work_when_the_run_ends_is_told(begin, net):
    fleet, devices, guests, train = await begin(names="abc")
    for name in "ab":
        devices[name].go.set()
    assert set(accepted(await train(1))) == {"a", "b"}
    await fleet.stop()
    await net.until(lambda: len(guests["c"].cancelled) == 1)
    assert fleet.busy == []


async def test_kept_updates_are_discounted_and_summed_securely(place, net):
    """Those that began three rounds ago make half of the step they would have made then."""
    await place.listen()

    async def mean(name, mode, round_):
        coordinator = Coordinator(place.create(name, f"federated.mode={mode}"), place.link)
        fleet, blob = coordinator.federated, coordinator.model.blob
        place.link.publish(blob, coordinator.model.payload)
        coordinator.roster.start()
        await net.until(lambda: len(coordinator.roster.clients) == 3)
        work = link_pb2.TrainLocal(
            run_id=fleet.context.run_id, round=1, attempt=1, model=blob, keep=True
        )
        if fleet.buffered is not None:
            for device in place.names:
                fleet.buffered.start(device, 0, 1, work)
        result = await fleet.train(spec_of(fleet, round_, 1, blob, dict.fromkeys(place.names, 0)))
        await coordinator.roster.stop(finished=False)
        return result

    fresh = await mean("rounds", "rounds", 1)
    stale = await mean("buffered", "buffered", 4)
    assert [r.staleness for r in stale.receipts] == [3, 3, 3]
    assert stale.training["staleness"] == 3.0
    expected = fresh.pseudo_gradient / 2
    torch.testing.assert_close(stale.pseudo_gradient, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_whole_run_in_buffers(place, secure):
    """Six real devices, three in a buffer: all are asked, none twice at once, and it learns.

    The last two of the five that are asked in the first round train until it is over.
    """
    names = tuple("abcdef")
    asked, over = itertools.count(1), asyncio.Event()

    async def hold():
        if next(asked) in (4, 5):
            await over.wait()

    def end_waits(event):
        if isinstance(event, RoundCommitted):
            over.set()

    place.hold = hold
    await place.listen(names=names)
    store = place.create(
        "run",
        "federated.mode=buffered",
        f"federated.secure_aggregation={secure}",
        "federated.buffer.concurrency=5",
        "rounds=6",
        "federated.local_epochs=2",
    )
    coordinator = Coordinator(store, place.link)
    coordinator.events.subscribe(end_waits)
    await coordinator.run()
    report = read_report(store).to_json()
    rows = report["rounds"]
    assert [row["participants"]["accepted"] for row in rows] == [3] * 6
    taken = [r for row in rows for r in row["receipts"]]
    assert {r["participant"] for r in taken} == set(names)
    assert max(r["staleness"] for r in taken) > 0
    assert rows[-1]["metrics"]["loss"] < 0.95 * rows[0]["metrics"]["loss"]
    assert all(row["cost"]["price"] == row["participants"]["started"] for row in rows)
    used = [r for r in taken if r["status"] == "accepted"]
    assert all((r["loss"] is None) == (secure == "true") for r in used)
    assert all("loss" in row["training"]["federated"] for row in rows)


async def test_a_crash_loses_what_was_at_work_and_no_committed_round(place):
    await place.listen(names=tuple("abcdef"))
    settings = ("federated.mode=buffered", "federated.secure_aggregation=false", "rounds=4")
    store = place.create("run", *settings)

    again = await place.killed(Coordinator(store, place.link), RoundPlanned, 3)
    before = [row["model_sha256"] for row in read_report(again).to_json()["rounds"]]
    await Coordinator(again, place.link).run()
    rows = read_report(again).to_json()["rounds"]
    assert [row["model_sha256"] for row in rows[:2]] == before
    assert [row["round"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["federated.over_selection=1.5"],
            "over_selection=1.5 cannot be used with mode='buffered'",
        ),
        (["federated.flower={strategy={name='Krum'}}"], "flower.strategy.name='Krum' works on"),
        (["federated.buffer.concurrency=0"], "federated.buffer.concurrency=0"),
        (["federated.buffer.size=3"], "unknown key federated.buffer.size"),
    ],
)
def test_what_does_not_go_with_a_buffer_is_refused(make_job, overrides, sentence):
    with pytest.raises(JobError) as caught:
        make_job("federated.mode=buffered", *overrides)
    assert sentence in str(caught.value)
