"""Secure aggregation over a real link: whoever drops out when, the sum is that of the survivors."""

import asyncio
import json

import pytest
import torch
from tests.server.waiting import wait_until

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.regimes.secure import SecureAggregationAttempt

NAMES = "abcde"
LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
STEPS = ("open", "train_local", "roster", "inbox", "survivors", "consistency_signatures")
ASKED = dict(
    zip(("training", "sharing keys", "sending", "signing", "unmasking"), STEPS[1:], strict=True)
)
"""What devices are asked in each step of an attempt."""


class Device:
    """A real agent that falls silent, or fails, when it is asked for a certain step."""

    def __init__(self, name, turn):
        self.agent = Agent(Participant(name=name, regime="federated"), None)
        self.identity, self.welcomed = self.agent.identity, self.agent.welcomed
        self.buffer, self.acknowledged = self.agent.buffer, self.agent.acknowledged
        self.cancel = self.agent.cancel
        self.turn = turn
        self.silent_at = None
        self.fails_at = None
        self.tamper = None

    async def work(self, request, model, progress):
        step = request.WhichOneof("work")
        if step == "secure_step":
            step = request.secure_step.WhichOneof("message")
        if step == self.silent_at:
            await asyncio.Event().wait()
        if step == self.fails_at:
            raise TaskError("the battery is empty")
        async with self.turn:
            reply, payload = await self.agent.work(request, model, progress)
        if self.tamper is not None and step == "inbox":
            payload = self.tamper(reply, payload)
        return reply, payload


class Place:
    def __init__(self, network, job: Job, directory):
        self.network, self.job = network, job
        self.directory = directory
        self.devices = {}

    async def gather(self):
        turn = asyncio.Lock()
        for name in NAMES:
            self.devices[name] = Device(name, turn)
            self.network.dial(self.devices[name], name)
        await wait_until(lambda: set(NAMES) <= self.network.link.peers.keys())
        for name in NAMES:
            work = link_pb2.OpenRun(
                run_id="run",
                job=self.job.model_dump_json(),
                base=str(self.directory),
                layout=LAYOUT.header,
            )
            request = link_pb2.Request(id=self.network.link.new_id(), open=work)
            reply = await self.network.link.ask(name, request)
            assert reply.opened.examples == 0  # not even how much data it has

    async def train(self, job=None, attempt=1):
        """One attempt from a fixed model."""
        self.model = LAYOUT.encode(torch.linspace(-1, 1, LAYOUT.size))
        blob = describe(self.model)
        self.network.link.publish(blob, self.model)
        fleet = FederatedRegime(
            FederatedContext(self.network.link, job or self.job, "run", LAYOUT, self.directory)
        )
        spec = AttemptSpec(
            round=1,
            attempt=attempt,
            model=blob,
            cohort=dict.fromkeys(NAMES, 20),
            settings=(job or self.job).federated,
        )
        return await fleet.train(spec)

    async def plain_mean(self, names):
        """What those devices' updates come to in plain, weighted by their examples."""
        updates = []
        for name in names:
            payload = LAYOUT.encode(LAYOUT.decode(self.model))
            run = self.devices[name].agent._run("run")
            work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1)
            run.train(work, payload, lambda progress: None, lambda: False)
            updates.append(LAYOUT.decode(payload).double())
        return torch.stack(updates).mean(0)


@pytest.fixture
async def place(network, make_job, write_task, tmp_path):
    write_task()
    await network.listen()
    job = make_job(
        "federated.cohort=5",
        "federated.quorum=4",
        "federated.secure_aggregation=true",
        "time.round_seconds=6000",  # no deadline passes here but where a test has it pass
        "time.lease_seconds=2000",
    )
    place = Place(network, job, tmp_path)
    await place.gather()
    return place


class OnlySilentLeft(float):
    """A deadline that passes as soon as all have done their part who ever will."""

    def __new__(cls, deadline, waited_for):
        made = super().__new__(cls, deadline)
        made.waited_for = waited_for
        return made

    def __sub__(self, now):
        return float(self) - now if self.waited_for else 0.0


@pytest.fixture
def deadlines(place, monkeypatch):
    """Seconds that each step has, by its name; they pass when only the silent are left."""
    found = {}
    step = SecureAggregationAttempt._step

    async def timed(self, what, names, one, deadline, wanted=None):
        found[what] = deadline - asyncio.get_running_loop().time()
        left = {name for name in names if place.devices[name].silent_at != ASKED[what]}

        async def part(name):
            try:
                await one(name)
            finally:
                left.discard(name)

        await step(self, what, names, part, OnlySilentLeft(deadline, left), wanted)

    monkeypatch.setattr(SecureAggregationAttempt, "_step", timed)
    return found


async def test_the_opened_sum_is_the_plain_weighted_mean(place):
    result = await place.train()
    expected = await place.plain_mean(NAMES)
    assert torch.allclose(result.pseudo_gradient.double(), expected, atol=1e-6)
    assert result.training["examples"] == 20 * len(NAMES)
    assert result.training["clipped"] == 0
    assert [receipt.status for receipt in result.receipts] == ["accepted"] * 5
    assert {receipt.examples for receipt in result.receipts} == {0}  # one device's own stay there


@pytest.mark.parametrize("how", ["silent_at", "fails_at"])
@pytest.mark.parametrize("step", STEPS[1:])
async def test_one_may_drop_out_at_any_step(place, deadlines, step, how):
    setattr(place.devices["c"], how, step)
    result = await place.train()
    late = step in ("survivors", "consistency_signatures")  # its masked vector was in already
    left = NAMES if late else NAMES.replace("c", "")
    expected = await place.plain_mean(left)
    assert torch.allclose(result.pseudo_gradient.double(), expected, atol=1e-6)
    receipt = result.receipts[NAMES.index("c")]
    assert receipt.status == (
        "accepted" if late else "dropped" if how == "silent_at" else "rejected"
    )
    assert receipt.reason


async def test_training_and_sending_end_with_the_round_and_the_rest_within_a_lease(
    place, deadlines
):
    began = asyncio.get_running_loop().time()
    await place.train()
    took = asyncio.get_running_loop().time() - began
    for step, whole in {"training": 4500, "sending": 6000}.items():  # of the round's 6000 s
        assert whole - took <= deadlines[step] <= whole + 1e-3
    for step in ("sharing keys", "signing", "unmasking"):
        assert 2000 - took <= deadlines[step] <= 2000 + 1e-3


@pytest.mark.parametrize("step", STEPS[1:4])
async def test_below_the_quorum_the_attempt_ends_with_a_reason_and_the_next_one_works(place, step):
    for name in "bc":
        place.devices[name].fails_at = step
    with pytest.raises(AttemptFailed, match=r"secure aggregation stopped: .*battery") as caught:
        await place.train()
    assert {r.participant: r.status for r in caught.value.receipts}["b"] == "rejected"
    for name in "bc":
        place.devices[name].fails_at = None
    result = await place.train(attempt=2)
    assert torch.allclose(result.pseudo_gradient.double(), await place.plain_mean(NAMES), atol=1e-6)


async def test_who_was_never_reached_has_not_started(place):
    place.network.link.disconnect("c", "it left just before")
    result = await place.train()
    started = {receipt.participant: receipt.started for receipt in result.receipts}
    assert started == {name: name != "c" for name in NAMES}


async def test_an_attempt_that_is_cancelled_leaves_nobody_at_work(place):
    peers = place.network.link.peers
    for device in place.devices.values():
        device.silent_at = "train_local"
    attempt = asyncio.create_task(place.train())
    await wait_until(lambda: all(peers[name].pending for name in NAMES))
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert not any(peers[name].pending for name in NAMES)


async def test_an_attempt_that_is_cancelled_lets_devices_drop_their_vectors(place, monkeypatch):
    sending = set()
    before = [set(peer.unacknowledged) for peer in place.network.link.peers.values()]

    async def never(name, blob, write):
        sending.add(name)
        await asyncio.Event().wait()

    monkeypatch.setattr(place.network.link, "fetch", never)
    attempt = asyncio.create_task(place.train())
    await wait_until(lambda: sending == set(NAMES))
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert [peer.unacknowledged for peer in place.network.link.peers.values()] == before


async def test_an_attempt_ends_at_the_deadline_that_it_is_given(place, monkeypatch):
    place.devices["a"].silent_at = place.devices["b"].silent_at = "train_local"
    run = SecureAggregationAttempt.run
    monkeypatch.setattr(
        SecureAggregationAttempt, "run", lambda self: run(self, asyncio.get_running_loop().time())
    )
    began = asyncio.get_running_loop().time()
    with pytest.raises(AttemptFailed, match="did not finish training in time"):
        await place.train()
    assert asyncio.get_running_loop().time() - began < place.job.time.round_seconds / 2


async def test_an_attempt_that_devices_have_seen_is_refused_by_all(place):
    await place.train()
    with pytest.raises(AttemptFailed, match="is not after round 1 attempt 1"):
        await place.train()


async def test_a_sum_a_device_helped_to_unmask_is_on_its_disk(place, tmp_path):
    memory = tmp_path / "rounds.json"
    agent = place.devices["a"].agent
    agent._secure._history_file, agent._secure._credentials = memory, None
    await place.train()
    ((round_, _, survivors),) = json.loads(memory.read_text())["run"]["unmasked"]
    assert (round_, survivors) == (1, list(NAMES))


async def test_a_changed_vector_is_rejected_and_the_others_go_on(place):
    def tamper(reply, payload):
        payload[0] ^= 1
        reply.secure_stepped.masked.CopyFrom(describe(payload))
        return payload

    place.devices["e"].tamper = tamper
    result = await place.train()
    assert result.receipts[-1].status == "rejected"
    assert "was changed" in result.receipts[-1].reason
    expected = await place.plain_mean("abcd")
    assert torch.allclose(result.pseudo_gradient.double(), expected, atol=1e-6)


async def test_the_same_round_gives_the_same_bytes_again(place):
    first = await place.train(attempt=1)
    second = await place.train(attempt=2)
    assert torch.equal(first.pseudo_gradient, second.pseudo_gradient)
