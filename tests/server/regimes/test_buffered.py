import asyncio
import itertools
import threading

import pytest
import torch
from tests.server.regimes.replies import update_reply
from tests.server.waiting import wait_until

from isthmus.errors import JobError, TaskError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_server.model.update_decoding import StreamingUpdate
from isthmus_server.read.report.report import read_report
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.regimes.secure_sums.attempt import SecureAggregationAttempt
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted, RoundPlanned
from isthmus_server.transport import peer

LAYOUT = TensorLayout.from_shapes({"weight": (3,)})
LEASE_SECONDS = 99.0


class HeldBackResponse:
    """Responds once `release` is set, with an update that contains the number of its round."""

    def __init__(self):
        self.examples = 10
        self.release = asyncio.Event()
        self.rounds = []
        """Rounds in which it was asked to train."""

    async def __call__(self, participant, request, model):
        round_ = request.train_local.round
        self.rounds.append(round_)
        await self.release.wait()
        vector = [float(round_), 1.0, 0.0]
        return update_reply(LAYOUT, vector, examples=self.examples, training={"loss": 2.0})


def spec_of(regime, round_, attempt, blob, cohort):
    """An attempt with the settings of the regime's job."""
    return AttemptSpec(
        round=round_,
        attempt=attempt,
        model=blob,
        cohort=cohort,
        settings=regime.context.job.federated,
    )


class BufferedRun:
    """The regime in buffered mode, with devices whose updates a test holds back."""

    def __init__(self, network, regime, devices, participants):
        self.network = network
        self.regime = regime
        self.devices = devices
        self.participants = participants

    async def train(self, round_, attempt=1):
        """Run an attempt that may invite all idle devices; the model is the round's number."""
        payload = LAYOUT.encode(torch.full((3,), float(round_)))
        blob = describe(payload)
        self.network.link.publish(blob, payload)
        try:
            busy = self.regime.busy
            idle = {name: each.examples for name, each in self.devices.items() if name not in busy}
            return await self.regime.train(spec_of(self.regime, round_, attempt, blob, idle))
        finally:
            self.network.link.retract(blob)

    def release(self, names):
        """Let devices respond."""
        for name in names:
            self.devices[name].release.set()

    def asked(self):
        """Devices that were asked to train, in the order of their names."""
        return [name for name, device in self.devices.items() if device.rounds]


@pytest.fixture
async def start(network, make_job, tmp_path):
    """Start a buffered run under a job with some keys changed; it stops with the test."""
    runs = []

    async def start(*overrides, names="abcd"):
        await network.listen(LEASE_SECONDS)
        job = make_job(
            "federated.mode=buffered", "federated.cohort=2", "federated.quorum=2", *overrides
        )
        opening = link_pb2.OpenRun(run_id="run", task_digest=bytes(32))
        regime = FederatedRegime(FederatedContext(network.link, job, opening, LAYOUT, tmp_path))
        devices = {name: HeldBackResponse() for name in names}
        participants = {name: await network.join(name, devices[name]) for name in names}
        runs.append(BufferedRun(network, regime, devices, participants))
        return runs[-1]

    yield start
    for run in runs:
        await run.regime.stop()


def accepted(result):
    return {r.participant: r.staleness for r in result.receipts if r.status == "accepted"}


async def test_the_update_of_a_slow_device_enters_a_later_buffer_with_less_weight(start, network):
    run = await start("federated.buffer={concurrency=3, staleness_exponent=1}")
    run.devices["a"].examples = 30
    filling = asyncio.create_task(run.train(1))
    await wait_until(lambda: len(run.asked()) == 3)
    slow, *quick = run.asked()
    run.release(quick)
    result = await filling
    assert accepted(result) == dict.fromkeys(quick, 0)
    assert result.pseudo_gradient.tolist() == [1.0, 1.0, 0.0]
    assert result.training == {"staleness": 0.0, "loss": 2.0}
    assert run.regime.busy[0] == slow
    # It still trains in round 2; in round 3 its update is two rounds old and counts a third.
    run.release(set(run.devices) - {slow})
    assert slow not in accepted(await run.train(2))
    filling = asyncio.create_task(run.train(3))
    run.release([slow])
    result = await filling
    staleness = accepted(result)
    assert staleness.pop(slow) == 2
    ((other, age),) = staleness.items()
    weights = [run.devices[slow].examples, run.devices[other].examples]
    old = torch.tensor([1.0, 1.0, 0.0]) / 3
    newer = torch.tensor([3.0 - age, 1.0, 0.0]) / (1 + age)
    expected = (weights[0] * old + weights[1] * newer) / sum(weights)
    torch.testing.assert_close(result.pseudo_gradient, expected, atol=1e-6, rtol=0)
    await wait_until(lambda: run.participants[slow].receipts == [(True, "")])


async def test_an_update_above_the_maximum_staleness_is_refused(start, network):
    run = await start("federated.buffer={max_staleness=1}", names="abc")
    run.release("bc")
    for round_ in (1, 2):
        assert accepted(await run.train(round_)) == {"b": 0, "c": 0}
    filling = asyncio.create_task(run.train(3))
    run.release(["a"])
    result = await filling
    assert set(accepted(result)) == {"b", "c"}
    if "a" in run.regime.busy:  # the other two were quicker, so the next round refuses it
        result = await run.train(5)
    (late,) = (r for r in result.receipts if r.participant == "a")
    assert late.status == "rejected"
    assert "rounds ago, and at most 1 are taken" in late.reason
    assert run.participants["a"].receipts[0][0] is False


async def test_a_lost_device_is_replaced(start, network, timeouts):
    run = await start("federated.buffer={concurrency=2}", names="abc")
    filling = asyncio.create_task(run.train(1))
    await wait_until(lambda: len(run.asked()) == 2)
    gone, quick = run.asked()
    (third,) = set("abc") - {gone, quick}
    await run.participants[gone].disconnect()
    await timeouts.expire(LEASE_SECONDS)
    run.release([quick])
    await wait_until(lambda: gone not in network.link.peers and run.devices[third].rounds)
    run.release([third])
    result = await filling
    assert set(accepted(result)) == set("abc") - {gone}
    (lost,) = (r for r in result.receipts if r.participant == gone)
    assert (lost.status, "lease" in lost.reason) == ("dropped", True)


async def test_a_device_without_the_model_when_the_round_ends_is_cancelled_and_asked_again(
    start, network
):
    run = await start("federated.buffer={concurrency=3}", names="abc")
    proxy, port = await network.start_proxy()
    await run.participants["c"].disconnect()
    await wait_until(lambda: network.link.peers["c"].stream is None)
    await network.join("c", run.devices["c"], port)
    await wait_until(lambda: network.link.peers["c"].stream is not None)
    proxy.limits["down"] = 0
    run.release("ab")
    result = await run.train(1)
    assert set(accepted(result)) == {"a", "b"}
    (late,) = (r for r in result.receipts if r.participant == "c")
    assert (late.status, late.started) == ("dropped", False)
    assert late.reason == "the round was over before it had the model"
    assert run.regime.busy == []
    proxy.cut()
    run.devices["a"].release.clear()
    run.release(["c"])
    assert set(accepted(await run.train(2))) == {"b", "c"}


async def test_an_attempt_that_does_not_fill_its_buffer_fails_and_devices_continue(
    start, network, timeouts
):
    run = await start("time.round_seconds=77", names="ab")
    run.release(["a"])
    filling = asyncio.create_task(run.train(1))
    await wait_until(lambda: run.participants["a"].receipts and run.devices["b"].rounds)
    await timeouts.expire(77)
    with pytest.raises(AttemptFailed, match="1 updates came into the buffer and the quorum is 2"):
        await filling
    assert run.regime.busy == ["b"]
    run.release(["b"])
    again = await run.train(1, attempt=2)
    assert accepted(again) == {"a": 0, "b": 0}


@pytest.mark.parametrize("ends_first", ["the transfer", "the round"])
async def test_an_update_that_does_not_come_holds_up_no_other(
    start, network, timeouts, monkeypatch, ends_first
):
    run = await start("federated.buffer={concurrency=3}", names="abc")
    fetch = network.link.fetch
    first = []

    async def withhold(name, *more):
        if not first:
            first.append(name)
            await asyncio.Event().wait()
        await fetch(name, *more)

    monkeypatch.setattr(network.link, "fetch", withhold)
    run.release("abc")
    filling = asyncio.create_task(run.train(1))
    buffered = run.regime.buffered
    await wait_until(lambda: first and all(each.reply for each in buffered.training.values()))
    if ends_first == "the transfer":
        await timeouts.expire(120.0)
        assert accepted(await filling) == dict.fromkeys(set("abc") - set(first), 0)
        return
    await timeouts.expire(600.0)
    with pytest.raises(AttemptFailed):
        await filling
    assert not run.regime.context.round_times._unready


async def test_an_update_that_is_being_added_at_the_deadline_does_not_count(
    start, network, monkeypatch
):
    run = await start(names="ab")
    adding, unblock = threading.Event(), threading.Event()
    write = StreamingUpdate.write

    def write_and_block(*arguments):
        write(*arguments)
        adding.set()
        assert unblock.wait(100)

    monkeypatch.setattr(peer, "THREAD_CHUNK_BYTES", 1)
    monkeypatch.setattr(StreamingUpdate, "write", write_and_block)
    run.release(["a"])
    filling = asyncio.create_task(run.train(1))
    await wait_until(adding.is_set)
    filling.cancel()
    unblock.set()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert run.regime.buffered.current.total.weight == 0
    (receipt,) = (r for r in run.regime.cancelled("the time is over") if r.participant == "a")
    why = "the round's time was over before its update was here"
    assert (receipt.status, receipt.reason) == ("dropped", why)
    await wait_until(lambda: run.participants["a"].receipts == [(False, why)])


async def test_a_secure_sum_has_the_deadline_of_the_round_whose_buffer_it_sums(start, monkeypatch):
    secure = "federated={secure_aggregation=true, mode='buffered', cohort=3, quorum=3}"
    run = await start(secure, names="abc")
    deadlines = []

    async def record_deadline(attempt, deadline=None, **_):
        deadlines.append(deadline)
        raise AttemptFailed("no device agreed", [])

    monkeypatch.setattr(SecureAggregationAttempt, "run", record_deadline)
    run.release("abc")
    began = asyncio.get_running_loop().time()
    with pytest.raises(AttemptFailed, match="no device agreed"):
        await run.train(1)
    now = asyncio.get_running_loop().time()
    assert began <= deadlines[0] - run.regime.context.job.time.first_round_seconds <= now


async def test_devices_that_train_when_the_run_ends_are_cancelled(start, network):
    run = await start(names="abc")
    run.release("ab")
    assert set(accepted(await run.train(1))) == {"a", "b"}
    await run.regime.stop()
    await wait_until(lambda: len(run.participants["c"].cancelled) == 1)
    assert run.regime.busy == []


async def test_updates_kept_on_devices_are_discounted_and_summed_securely(deployment, network):
    """Those that began three rounds ago make half of the step they would have made then."""
    await deployment.start()

    async def mean(name, mode, round_):
        store = deployment.create_run(name, f"federated.mode={mode}")
        coordinator = Coordinator(RunParts.of(store, deployment.link))
        regime = coordinator.parts.federated
        blob = coordinator.model.blob
        deployment.link.publish(blob, coordinator.model.payload)
        coordinator.roster.start()
        await wait_until(lambda: len(coordinator.roster.clients) == 3)
        work = link_pb2.TrainLocal(
            run_id=regime.context.run_id, round=1, attempt=1, model=blob, keep=True
        )
        if regime.buffered is not None:
            for device in deployment.names:
                regime.buffered.start(device, 0, 1, work)
        result = await regime.train(
            spec_of(regime, round_, 1, blob, dict.fromkeys(deployment.names, 0))
        )
        await coordinator.roster.stop(finished=False)
        return result

    fresh = await mean("rounds", "rounds", 1)
    stale = await mean("buffered", "buffered", 4)
    assert [r.staleness for r in stale.receipts] == [3, 3, 3]
    assert stale.training["staleness"] == 3.0
    expected = fresh.pseudo_gradient / 2
    torch.testing.assert_close(stale.pseudo_gradient, expected, atol=1e-5, rtol=0)


async def test_an_update_whose_ranges_were_summed_in_an_earlier_round_is_left_out(
    deployment, network
):
    """Its device would refuse the sum of the ranges, and the others would be too few."""
    await deployment.start(names=())
    fails = True

    def failing_between_the_sums(work):
        async def failing(request, *more):
            if fails and request.agree.secure:
                raise TaskError("the battery is empty")
            return await work(request, *more)

        return failing

    for name in "abcdef":
        device = deployment.device(name)
        device.work = failing_between_the_sums(device.work)
        network.dial(device, name)
    await wait_until(lambda: set("abcdef") <= deployment.link.peers.keys())
    store = deployment.create_run("run", "federated.mode=buffered", "federated.clients=0")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    regime = coordinator.parts.federated
    blob = coordinator.model.blob
    deployment.link.publish(blob, coordinator.model.payload)
    coordinator.roster.start()
    await wait_until(lambda: len(coordinator.roster.clients) == 6)

    async def train(round_, attempt, names):
        work = link_pb2.TrainLocal(
            run_id=regime.context.run_id, round=1, attempt=attempt, model=blob, keep=True
        )
        for name in names:
            regime.buffered.start(name, 0, 1, work)
            await wait_until(lambda name=name: regime.buffered.training[name].reply is not None)
        return await regime.train(spec_of(regime, round_, attempt, blob, {}))

    with pytest.raises(AttemptFailed):
        await train(1, 1, "abc")
    fails = False
    # The first has trained again on the model of round 1, and was too late for its buffer.
    result = await train(2, 2, "adef")
    assert accepted(result).keys() == {"d", "e", "f"}
    (receipt,) = (each for each in result.receipts if each.participant == "a")
    assert "takes part again only with the same devices" in receipt.reason
    await coordinator.roster.stop(finished=False)


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_buffered_run_asks_all_devices_and_learns(deployment, secure):
    """Six real devices, three in a buffer: all are asked, none twice at once, and it learns.

    The last two of the five that are asked in the first round train until it is over.
    """
    names = tuple("abcdef")
    trainings, first_round_over = itertools.count(1), asyncio.Event()

    async def wait_for_the_first_round():
        if next(trainings) in (4, 5):
            await first_round_over.wait()

    def end_waits(event):
        if isinstance(event, RoundCommitted):
            first_round_over.set()

    deployment.before_training = wait_for_the_first_round
    await deployment.start(names=names)
    store = deployment.create_run(
        "run",
        "federated.mode=buffered",
        f"federated.secure_aggregation={secure}",
        "federated.buffer.concurrency=5",
        "rounds=6",
        "federated.local_epochs=2",
    )
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    coordinator.events.subscribe(end_waits)
    await coordinator.run()
    report = read_report(store).to_json()
    rows = report["rounds"]
    assert [row["participants"]["accepted"] for row in rows] == [3] * 6
    taken = [r for row in rows for r in row["receipts"]]
    assert {r["participant"] for r in taken} == set(names)
    assert max(r["staleness"] for r in taken) > 0
    assert rows[-1]["metrics"]["loss"] < 0.95 * rows[0]["metrics"]["loss"]
    # One that was asked when the round was nearly over may not have been reached, and is paid for.
    assert all(row["cost"]["price"] == row["participants"]["invited"] for row in rows)
    used = [r for r in taken if r["status"] == "accepted"]
    assert all((r["loss"] is None) == (secure == "true") for r in used)
    assert all("loss" in row["training"]["federated"] for row in rows)


async def test_a_crash_loses_updates_in_progress_and_no_committed_round(deployment):
    await deployment.start(names=tuple("abcdef"))
    settings = ("federated.mode=buffered", "federated.secure_aggregation=false", "rounds=4")
    store = deployment.create_run("run", *settings)

    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundPlanned, 3
    )
    before = [row["model_sha256"] for row in read_report(again).to_json()["rounds"]]
    await Coordinator(RunParts.of(again, deployment.link)).run()
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
        (
            ["federated.flower={strategy={name='Krum'}}"],
            "flower.strategy.name='Krum' aggregates rounds",
        ),
        (["federated.buffer.concurrency=0"], "federated.buffer.concurrency=0"),
        (["federated.buffer.size=3"], "unknown key federated.buffer.size"),
    ],
)
def test_settings_that_do_not_fit_a_buffer_are_refused(make_job, overrides, sentence):
    with pytest.raises(JobError) as caught:
        make_job("federated.mode=buffered", *overrides)
    assert sentence in str(caught.value)
