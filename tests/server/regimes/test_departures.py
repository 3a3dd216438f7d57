"""A device that leaves in the middle of a round: the others do not wait for what cannot be."""

import asyncio
import time

import pytest
from tests.server.waiting import wait_until

from isthmus.transport.uplink import Uplink
from isthmus.wire import link_pb2
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundAttemptFailed

NAMES = "abcd"


@pytest.fixture
async def fleet(deployment):
    """Devices of which each waits for its own gate before it trains."""
    await deployment.start(names=())
    deployment.gates = {name: asyncio.Event() for name in NAMES}
    deployment.uplinks = {}

    async def connect(names):
        for name in names:
            device = deployment.device(name)
            device.before_training = deployment.gates[name].wait
            uplink = deployment.uplinks[name] = Uplink(
                f"127.0.0.1:{deployment.network.port}",
                name,
                link_pb2.CLIENT,
                device,
                identity=device.identity,
                on_welcome=device.welcomed,
            )
            deployment.network.connections.append(asyncio.create_task(uplink.run()))
        await wait_until(lambda: set(names) <= deployment.link.peers.keys())

    deployment.connect = connect
    return deployment


def is_asked_to_train(uplink):
    # Read each time: a welcome replaces the jobs, and can arrive after the server knows the device.
    return any(job.request.HasField("train_local") for job in uplink._jobs.values())


@pytest.mark.parametrize("when", ["training", "trained"])
async def test_a_round_without_its_quorum_fails_at_once(fleet, when):
    """In 75 of the round's 100 seconds the others would have trained for nothing."""
    await fleet.connect("abc")
    store = fleet.create_run("run", "rounds=1", "time.round_seconds=100", "time.join_seconds=30")
    coordinator = Coordinator(RunParts.of(store, fleet.link))
    failed = asyncio.Event()
    coordinator.events.subscribe(
        lambda event: failed.set() if isinstance(event, RoundAttemptFailed) else None
    )
    running = asyncio.create_task(coordinator.run())
    await wait_until(lambda: is_asked_to_train(fleet.uplinks["a"]))
    if when == "trained":
        fleet.gates["a"].set()
        await wait_until(lambda: not fleet.uplinks["a"]._jobs)
    begun = time.monotonic()
    await fleet.uplinks["a"].leave(600.0)
    await failed.wait()
    assert time.monotonic() - begun < 50
    (attempt,) = read_report(store).failed_attempts
    reasons = {receipt.participant: receipt.reason for receipt in attempt.receipts}
    assert reasons["a"] == (
        "lost: it left after training" if when == "trained" else "lost: it has left"
    )
    assert reasons["b"] == reasons["c"] == "the quorum could not be reached any more"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_round_with_enough_others_goes_on_without_it(fleet):
    await fleet.connect(NAMES)
    quorum = ("federated.cohort=4", "federated.quorum=3", "time.round_seconds=100", "rounds=1")
    store = fleet.create_run("run", *quorum)
    running = asyncio.create_task(Coordinator(RunParts.of(store, fleet.link)).run())
    await wait_until(lambda: is_asked_to_train(fleet.uplinks["a"]))
    for name in "bcd":
        fleet.gates[name].set()
    begun = time.monotonic()
    await fleet.uplinks["a"].leave(600.0)
    await running
    assert time.monotonic() - begun < 50
    (record,) = read_report(store).rounds
    statuses = {receipt.participant: receipt.status for receipt in record.receipts}
    assert statuses == {"a": "dropped", "b": "accepted", "c": "accepted", "d": "accepted"}
