"""A server that ends between the sums of ranges and updates goes on with the same range."""

import asyncio
import contextlib

import pytest
from tests.server.waiting import wait_until

from isthmus.errors import TaskError
from isthmus_privacy.purpose import ranges_run_id
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.runs.operations.run_copies import branch_run
from isthmus_server.storage.store import Store

SETTINGS = ("federated.clients=0", "federated.cohort=4", "rounds=2", "task.settings.lr=1000")


class Devices:
    """Devices of a deployment, of which a function learns of each request before it is executed."""

    def __init__(self, deployment, network, names):
        self.heard = lambda name, request: None
        self.names = names
        for name in names:
            device = deployment.device(name)
            device.work = self.wrapped(name, device.work)
            network.dial(device, name)

    def wrapped(self, name, work):
        async def hearing(request, *args):
            self.heard(name, request)
            return await work(request, *args)

        return hearing


@pytest.fixture
async def devices(deployment, network):
    await deployment.start(names=())
    devices = Devices(deployment, network, "abcd")
    await wait_until(lambda: set(devices.names) <= deployment.link.peers.keys())
    return devices


async def final_sha256(store, link):
    await Coordinator(RunParts.of(store, link)).run()
    return read_report(store).final.model_sha256


async def test_the_same_model_after_a_crash_between_the_sums(deployment, devices, tmp_path):
    undisturbed = deployment.create_run("first", *SETTINGS)
    expected = await final_sha256(undisturbed, deployment.link)

    store = deployment.create_run("second", *SETTINGS)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    running = asyncio.create_task(coordinator.run())

    def end_at_the_second_sum(name, request):
        if request.WhichOneof("work") == "agree":
            running.cancel()

    devices.heard = end_at_the_second_sum
    with contextlib.suppress(asyncio.CancelledError):
        await running
    known = store.ranges.of(1, coordinator.model.blob.sha256, "")
    assert known is not None

    branched = tmp_path / "branched"
    branch_run(store.directory, branched)
    with contextlib.closing(Store.open_to_continue(branched)) as other:
        assert other.ranges.of(1, known.model_hash, "") is None  # another run may train otherwise

    kinds = []
    devices.heard = lambda name, request: kinds.append((name, request))
    again = deployment.reopen(store)
    assert again.ranges.of(1, known.model_hash, "") == known  # from the disk
    assert await final_sha256(again, deployment.link) == expected
    summed = {
        request.secure_step.round
        for _, request in kinds
        if request.secure_step.run_id == ranges_run_id(again.run_id)
    }
    assert summed == {2}  # those of round 1 were not summed again
    first, second = read_report(again).rounds
    assert first.training["federated"]["clipped"] == second.training["federated"]["clipped"] == 0
    assert first.training["federated"]["range"] > 4


def is_unmasking_ranges(request, run_id):
    step = request.secure_step
    return step.run_id == ranges_run_id(run_id) and bool(step.consistency_signatures)


async def test_a_device_that_never_answers_after_the_ranges_does_not_stop_the_run(
    deployment, devices
):
    store = deployment.create_run("run", *SETTINGS, "attempts=2", "time.join_seconds=5")
    lost = set()

    def lose(name, request):
        unmasks = is_unmasking_ranges(request, store.run_id) and request.secure_step.round == 1
        if unmasks:
            lost.add(name)
        # Two of four are too many for the unmasking; one of them comes back.
        if lost and (name == "d" or (name == "c" and unmasks)):
            raise TaskError("the battery is empty")

    devices.heard = lose
    await final_sha256(store, deployment.link)
    first, second = read_report(store).rounds
    assert first.attempt > 1
    assert first.training["federated"]["range"] == 2.0**16
    assert first.training["federated"]["clipped"] == 0
    assert second.training["federated"]["range"] < 2.0**16  # found again


async def test_a_crash_while_ranges_are_unmasked_waits_for_no_device_for_ever(
    deployment, devices, network
):
    store = deployment.create_run("run", *SETTINGS, "time.join_seconds=2")
    running = asyncio.create_task(Coordinator(RunParts.of(store, deployment.link)).run())

    def end(name, request):
        if is_unmasking_ranges(request, store.run_id):
            running.cancel()

    devices.heard = end
    with contextlib.suppress(asyncio.CancelledError):
        await running

    def lose(name, request):
        if name == "d":
            raise TaskError("the battery is empty")

    devices.heard = lose
    again = deployment.reopen(store)
    await final_sha256(again, deployment.link)
    assert read_report(again).rounds[0].training["federated"]["clipped"] == 0
