"""Participants that cannot take part, and what they declare when they open a run."""

import asyncio
import re

import pytest
from tests.server.deployment import SimulatedDatacenter
from tests.server.rounds.results import invited_devices
from tests.server.waiting import wait_until

from isthmus.errors import UpdateError, UserError
from isthmus.wire import link_pb2
from isthmus_server.read.report.progress import waiting_for
from isthmus_server.read.report.report import read_report
from isthmus_server.regimes.opening import hours_of
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import EventStream, ParticipantDeclined, WaitingForParticipants


async def test_too_few_devices_are_one_sentence(deployment, network, timeouts):
    await deployment.start(names=("a",))
    store = deployment.create_run("run", "federated.clients=3", "time.join_seconds=77")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    running = asyncio.create_task(coordinator.run())
    await wait_until(lambda: coordinator.roster.clients)
    await timeouts.expire(77)  # for all that this machine starts
    await timeouts.expire(77)  # for those that the round needs
    with pytest.raises(UserError) as caught:
        await running
    assert str(caught.value) == (
        "a federated round needs 3 devices (federated.quorum); ready: 1; "
        "waited up to 77 s (time.join_seconds)"
    )
    assert read_report(store).to_json()["status"] == "failed"


async def test_a_device_that_this_machine_started_is_named_if_it_is_not_ready_in_time(
    deployment, network, timeouts
):
    await deployment.start(names=("a", "b"))
    store = deployment.create_run(
        "run",
        "federated.clients=3",
        "federated.quorum=2",
        "federated.secure_aggregation=false",
        "time.join_seconds=77",
        "rounds=1",
    )
    events, published = EventStream(), []
    events.subscribe(published.append)
    coordinator = Coordinator(RunParts.of(store, deployment.link, events))
    coordinator.roster.started_here = dict.fromkeys("abc", link_pb2.CLIENT)
    running = asyncio.create_task(coordinator.run())
    sentence = "waiting for 3 devices; ready: 2 of 3 devices; missing: c"

    def times_said():
        waits = [event for event in published if isinstance(event, WaitingForParticipants)]
        return sum(waiting_for(event) == sentence for event in waits)

    await wait_until(lambda: times_said() == 1)
    await timeouts.expire(10)
    await wait_until(lambda: times_said() == 2)
    await timeouts.expire(77)
    await running
    (late,) = (event for event in published if isinstance(event, ParticipantDeclined))
    assert late.participant == "c"
    assert late.reason == "it was not ready within 77 s (time.join_seconds); it may still join"


async def test_the_reason_of_a_device_that_declines_is_reported(deployment):
    await deployment.start("""
        def local_data(self, participant):
            return rows(0 if participant.name == "b" else 20, seed=1)
    """)
    store = deployment.create_run("run", "federated.secure_aggregation=false")
    with pytest.raises(UserError, match=r"; b declined: local_data\(\) of b is empty"):
        await Coordinator(RunParts.of(store, deployment.link)).run()
    (event,) = (event for event in store.events() if isinstance(event, ParticipantDeclined))
    assert event.participant == "b"


async def test_a_device_with_another_frozen_base_does_not_train(deployment):
    await deployment.start("""
        def model(self):
            import os

            model = nn.Linear(4, 3)
            model.bias.requires_grad_(False).copy_(torch.tensor(list(os.urandom(3))))
            return model
    """)
    sentence = (
        "; a, b, c declined: this device's model is not the server's: the frozen parameter 'bias' "
        "has other values here than there; is it loaded from the same file"
    )
    store = deployment.create_run("run", "federated.secure_aggregation=false")
    with pytest.raises(UserError, match=sentence):
        await Coordinator(RunParts.of(store, deployment.link)).run()


@pytest.mark.parametrize(
    ("secure", "reason"),
    [
        ("false", r"local_data\(\) .*camera is off"),
        ("true", "the device could not do this; its own log says why"),
    ],
)
async def test_a_reason_shared_by_all_devices_is_reported_once_without_waiting(
    deployment, secure, reason
):
    await deployment.start("""
        def local_data(self, participant):
            raise OSError("the camera is off")
    """)
    settings = "federated.clients=3", f"federated.secure_aggregation={secure}"
    store = deployment.create_run("run", *settings)
    with pytest.raises(UserError) as caught:
        await Coordinator(RunParts.of(store, deployment.link)).run()
    needs = r"a federated round needs \d devices \(federated.quorum\); ready: 0"
    sentence = rf"{needs}; a, b, c declined: {reason}"
    assert re.fullmatch(sentence, str(caught.value))


@pytest.mark.parametrize("hours", [["20:00-06:00"] * 33, ["20:00-06:00" + " " * 64]])
def test_hours_are_bounded_before_they_are_read(hours):
    with pytest.raises(UpdateError, match="its hours have more than 32 entries, or one of"):
        hours_of(link_pb2.Opened(hours=hours))


async def test_a_device_that_declares_too_many_examples_is_refused(deployment, network):
    async def work(participant, request, model):
        return link_pb2.Reply(opened=link_pb2.Opened(examples=1 << 62)), None

    await deployment.start()
    await network.join("boaster", work)
    report, _ = await deployment.run("run", "rounds=1")
    assert invited_devices(report) == [["a", "b", "c"]]
    (declined,) = (event for event in report["events"] if event["kind"] == "declined")
    assert declined["participant"] == "boaster"
    assert declined["reason"] == f"it has {1 << 62} examples; the maximum is {1 << 30}"


class SlowDatacenter(SimulatedDatacenter):
    """A datacenter that opens a run once it may."""

    def __init__(self, layout):
        super().__init__(layout)
        self.may_open = asyncio.Event()

    async def respond(self, participant, request, model):
        if request.WhichOneof("work") == "open":
            await self.may_open.wait()
        return await super().respond(participant, request, model)


async def test_the_first_decision_waits_for_a_datacenter_that_is_opening_the_run(
    deployment, network
):
    """The policy would begin with devices, as if there were none."""
    await deployment.start()
    store = deployment.create_run(
        "run", "strategy.policy=availability", "federated.clients=0", "time.cohort_seconds=600"
    )
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    datacenter = SlowDatacenter(coordinator.model.layout)
    await network.join("dc", datacenter.respond, role=link_pb2.DATACENTER)
    published = []
    coordinator.events.subscribe(published.append)
    running = asyncio.create_task(coordinator.run())
    await wait_until(lambda: len(coordinator.roster.clients) == 3)
    waits = [event for event in published if isinstance(event, WaitingForParticipants)]
    assert waiting_for(waits[-1]) == "waiting for 1 datacenter; missing: dc"
    assert not list(store.logged_attempts())
    datacenter.may_open.set()
    await running
    first = next(store.logged_attempts()).planned
    assert first.decision.observation.datacenter_names == ["dc"]
