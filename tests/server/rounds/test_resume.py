"""A run continues after the server was killed, from its last committed round."""

import asyncio

import pytest
import torch
from tests.server.deployment import Killed
from tests.server.rounds.policies import TRANSFER, WAITS, write_policy
from tests.server.rounds.results import LAYOUT, gradient_requests
from tests.server.waiting import wait_until

from isthmus.wire import link_pb2
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds import coordinator as coordinator_module
from isthmus_server.rounds.attempt_log import AttemptLog
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import (
    Paused,
    RoundCommitted,
    RoundPlanned,
    WaitingForParticipants,
)
from isthmus_server.strategy.policy import Plan


@pytest.mark.parametrize(
    ("kind", "round_"),
    [(RoundPlanned, 1), (RoundCommitted, 1), (RoundPlanned, 2), (RoundCommitted, 3)],
)
async def test_a_killed_run_resumes_to_the_same_bytes(deployment, kind, round_):
    await deployment.start()
    momentum = (
        "strategy.server_optimizer.name=Adam",
        "strategy.server_optimizer.options={lr=0.05}",
    )
    uninterrupted, final = await deployment.run("whole", *momentum)

    store = deployment.create_run("killed", *momentum)
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), kind, round_
    )
    assert again.status()[0] == "running"
    assert again.run_state().round == round_ - (kind is RoundPlanned)
    resumed = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert resumed.model_sha256 == final.model_sha256
    rows = read_report(again).to_json()["rounds"]
    assert [row["model_sha256"] for row in rows] == [
        row["model_sha256"] for row in uninterrupted["rounds"]
    ]


async def test_a_run_killed_after_its_last_commit_needs_no_participants(deployment):
    """The datacenter has deleted its checkpoints by then."""
    await deployment.start()
    store = deployment.create_run("run", "rounds=1")
    final = await Coordinator(RunParts.of(store, deployment.link)).run()
    again = deployment.reopen(store)
    deployment.link.peers.clear()
    assert await Coordinator(RunParts.of(again, deployment.link)).run() == final
    assert read_report(again).to_json()["status"] == "finished"


async def test_a_killed_run_whose_model_is_in_the_datacenter_fetches_it_again(
    run_with_datacenter, deployment
):
    _, coordinator, _ = await run_with_datacenter("strategy.policy=alternate", "rounds=2")
    again = await deployment.run_until_killed(coordinator, RoundCommitted, 1)
    assert again.run_state().model_in_datacenter
    resumed = Coordinator(RunParts.of(again, deployment.link))
    # Nor does the server have the served one, of which an older checkpoint may be there.
    assert resumed._start_hash(Plan("federated", "it is planned", start="served")) is None
    await resumed.run()
    assert [row["regime"] for row in read_report(again).to_json()["rounds"]] == [
        "datacenter",
        "federated",
    ]


async def test_a_resumed_run_waits_for_the_datacenter_that_has_the_model(
    run_with_datacenter, deployment, network
):
    """After a restart of the server it may return long after the devices."""
    _, coordinator, datacenter = await run_with_datacenter(
        "strategy.policy=alternate", "rounds=2", "attempts=1", "datacenter.ranks=0"
    )
    again = await deployment.run_until_killed(coordinator, RoundCommitted, 1)
    deployment.link.disconnect("dc", "it was disconnected")
    published = []
    resumed = Coordinator(RunParts.of(again, deployment.link))
    resumed.events.subscribe(published.append)
    running = asyncio.create_task(resumed.run())
    waiting = WaitingForParticipants(clients=0, datacenters=1, ready=3, missing=["dc"])
    await wait_until(lambda: waiting in published or running.done())
    await network.join("dc", datacenter.respond, role=link_pb2.DATACENTER)
    final = await running
    assert read_report(again).to_json()["rounds"][1]["attempt"] == 1
    assert final.model_sha256 == read_report(again).to_json()["rounds"][1]["model_sha256"]


async def test_a_resumed_attempt_waits_for_the_devices_that_were_in_it(
    deployment, network, monkeypatch
):
    """They may have unmasked its sum, and refuse another one of nearly the same devices."""
    names = ("a", "b", "c", "d")
    await deployment.start(names=names)
    fewer = (
        "seed=3",
        "federated.clients=0",
        "federated.cohort=4",
        "federated.quorum=3",
        "attempts=1",
    )
    store = deployment.create_run("run", *fewer)
    coordinator = Coordinator(RunParts.of(store, deployment.link))

    async def require(regime):
        assert await coordinator.roster.wait_for(devices=names)

    def die(*_, **fields):
        raise Killed

    monkeypatch.setattr(coordinator.roster, "require", require)
    with monkeypatch.context() as patched:
        patched.setattr(AttemptLog, "commit", die)  # the sum is unmasked by then
        with pytest.raises(Killed):
            await coordinator.run()
    deployment.link.disconnect("d", "it was disconnected")
    published = []
    again = Coordinator(RunParts.of(deployment.reopen(store), deployment.link))
    again.events.subscribe(published.append)
    running = asyncio.create_task(again.run())

    def waits_for_d():
        waits = [event for event in published if isinstance(event, WaitingForParticipants)]
        return any(event.missing == ["d"] for event in waits)

    await wait_until(lambda: waits_for_d() or running.done())
    network.dial(deployment.device("e"), "e")  # no other device is asked instead
    network.dial(deployment.device("f"), "f")
    await wait_until(lambda: {"e", "f"} <= again.roster.clients.keys() or running.done())
    network.dial(deployment.device("d"), "d")
    await running
    receipts = read_report(again.store).to_json()["rounds"][0]["receipts"]
    assert [receipt["participant"] for receipt in receipts] == list(names)


@pytest.mark.parametrize("at", [2, 3])
async def test_kept_models_and_the_served_average_survive_a_crash(deployment, planned, at):
    await deployment.start()
    plans = planned([{"keep": {"warm": "served"}}, {}, {"start": "warm"}, {}])
    settings = (*plans, "strategy.served_average=0.9")
    uninterrupted, final = await deployment.run("whole", *settings)

    store = deployment.create_run("killed", *settings)
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundCommitted, at
    )
    resumed = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert resumed.model_sha256 == final.model_sha256
    shas = [row["model_sha256"] for row in read_report(again).to_json()["rounds"]]
    assert shas == [row["model_sha256"] for row in uninterrupted["rounds"]]


async def test_a_run_with_gradient_transfers_resumes_to_the_same_bytes(
    run_with_datacenter, planned, deployment
):
    plans = planned([TRANSFER, TRANSFER])
    _, coordinator, datacenter = await run_with_datacenter(*plans)
    datacenter.gradient = torch.linspace(-2, 3, LAYOUT.size)
    final = await coordinator.run()

    store = deployment.create_run("killed", *plans, "federated.clients=3", "datacenter.ranks=1")
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundPlanned, 2
    )
    resumed = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert resumed.model_sha256 == final.model_sha256
    assert [request.from_step for request in gradient_requests(datacenter)] == [0, 50, 0, 50]


async def test_an_interrupted_wait_counts_and_a_stop_records_its_observation(
    deployment, tmp_path, monkeypatch
):
    await deployment.start()
    policy = write_policy(tmp_path, "waits", WAITS.format(seconds=3600.0, until=50))
    store = deployment.create_run("run", policy, "budget=9")
    monkeypatch.setattr(coordinator_module, "SAVE_ELAPSED_SECONDS", 0.01)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    now = coordinator.parts.clock.now
    coordinator.parts.clock.now = lambda: now() + 100 * waiting.is_set()
    waiting = asyncio.Event()
    coordinator.events.subscribe(lambda event: waiting.set() if isinstance(event, Paused) else None)
    stored = asyncio.Event()
    save_elapsed = store.save_elapsed
    store.save_elapsed = lambda elapsed: (save_elapsed(elapsed), waiting.is_set() and stored.set())
    running = asyncio.create_task(coordinator.run())
    await stored.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    again = deployment.reopen(store)
    await Coordinator(RunParts.of(again, deployment.link)).run()
    (stopped,) = [
        event for event in read_report(again).to_json()["events"] if event["kind"] == "stopped"
    ]
    assert (stopped["reason"], stopped["round"]) == ("it is late", 1)
    assert 100 <= stopped["decision"]["observation"]["elapsed"] < 150
    assert stopped["decision"]["observation"]["budget"] == 9
