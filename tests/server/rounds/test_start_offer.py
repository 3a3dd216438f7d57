"""Devices get the files that a model starts from on the link, before the run is opened on them."""

import asyncio
import re
import types
from pathlib import Path

import pytest
from tests.server.loopback import LoopbackNetwork
from tests.server.waiting import wait_until

from isthmus.job import load_job, write_job
from isthmus.start.manifest import ListedFile, StartManifest
from isthmus.task import Participant
from isthmus.transport.requests import listed_messages
from isthmus.transport.uplink import Uplink
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.owner_limits import LimitsGuard, parse
from isthmus_clients.device.weights.keeper import WeightKeeper
from isthmus_clients.device.weights.store import WeightStore, hash_of
from isthmus_server.read.report.progress import waiting_for
from isthmus_server.rounds import roster
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.start_offer import StartOffer
from isthmus_server.storage.events import CohortAwaited, WaitingForParticipants
from isthmus_server.transport.peer import Fetched

JOB = """
name = "table"
[task]
source = "task.py:Learn"
[model]
start = "base"
sha256 = "{sha256}"
"""
MB = 1 << 20


class Offered:
    """A server with a file of a start, of any size, and devices that get it."""

    def __init__(self, folder, size):
        self.folder = folder
        self.path = folder / "base.safetensors"
        with self.path.open("wb") as file:
            file.write(b"begin")
            file.truncate(size)
        self.file = ListedFile("model", "model.safetensors", hash_of(self.path), size)
        (folder / "job.toml").write_text(JOB.format(sha256=self.file.sha256))
        self.job = load_job(folder / "job.toml")
        self.network = LoopbackNetwork()
        self.events = []

    async def start(self, **options):
        self.link = await self.network.listen(**options)
        run = link_pb2.OpenRun(run_id="run", job=write_job(self.job), base=str(self.folder))
        files = listed_messages(StartManifest((self.file,)))
        prepare = link_pb2.Prepare(run_id="run", job=run.job, files=files)
        sha256 = bytes.fromhex(self.file.sha256)
        self.roster = ParticipantRoster(
            self.link,
            self.job,
            run,
            DeviceAvailability(self.job, Clock()),
            self.events.append,
            start=StartOffer(prepare, {sha256: self.path}),
        )
        self.roster.start()

    def dial(self, name, limits="weights_mb = 500\n", port=None):
        """A device; only the server's request to open the run is not its real work."""
        state = self.folder / name
        (state / "tasks").mkdir(parents=True, exist_ok=True)
        guard = LimitsGuard(parse(limits, "policy.toml"), state / "usage.json")
        store = WeightStore(state / "weights")
        keeper = WeightKeeper(store, guard, state / "tasks", look_seconds=0.01)
        agent = Agent(
            Participant(name=name, regime="federated"),
            None,
            tasks=state / "tasks",
            guard=guard,
            weights=keeper,
        )
        agent._open = types.MethodType(
            lambda *_: link_pb2.Reply(opened=link_pb2.Opened(examples=3)), agent
        )
        uplink: Uplink = agent.uplink(f"127.0.0.1:{port or self.network.port}")
        uplink.longest_pause = 0.05
        self.network.connections.append(asyncio.create_task(uplink.run()))
        return store

    async def stop(self):
        await self.roster.stop(finished=True)
        assert not self.link.published_blobs
        for task in self.network.connections:
            task.cancel()
        await asyncio.gather(*self.network.connections, return_exceptions=True)
        for proxy in self.network.proxies:
            await proxy.stop()
        await self.link.stop()


@pytest.fixture
def peak():
    """The most memory of this process since it was asked last, in bytes."""

    def peak(kind="VmHWM"):
        status = Path("/proc/self/status").read_text()
        found = int(re.search(rf"{kind}:\s+(\d+)", status)[1]) << 10
        Path("/proc/self/clear_refs").write_text("5")
        return found

    return peak


async def test_a_device_is_ready_when_the_files_are_here(tmp_path):
    offered = Offered(tmp_path, 3 * MB)
    await offered.start()
    store = offered.dial("phone")
    await wait_until(lambda: offered.roster.clients)
    assert hash_of(store.path(offered.file.sha256)) == offered.file.sha256
    assert offered.link.peers["phone"].download_of("other") == "downloading the model, 0 %"
    await offered.stop()


async def test_memory_does_not_depend_on_the_size_of_the_files(tmp_path, peak):
    """Server and device are in this process; pages of files are not counted."""
    growth = {}
    for size in (4 * MB, 200 * MB):
        folder = tmp_path / str(size)
        folder.mkdir()
        offered = Offered(folder, size)
        await offered.start()
        before = peak("VmRSS")
        offered.dial("phone")
        await wait_until(lambda offered=offered: offered.roster.clients)
        growth[size] = peak() - before
        await offered.stop()
    assert growth[200 * MB] - growth[4 * MB] < 40 * MB


async def test_a_link_that_breaks_continues_where_it_was(tmp_path):
    offered = Offered(tmp_path, 8 * MB)
    await offered.start()
    proxy, port = await offered.network.start_proxy()
    proxy.next_limits = {"down": 5 * MB}
    store = offered.dial("phone", port=port)
    await proxy.stalled.wait()
    begun = store.begun(offered.file)
    proxy.cut()
    await wait_until(lambda: offered.roster.clients)
    assert begun >= 2 * MB
    carried = sum(each["down"] for each in proxy.carried)
    assert carried < 12 * MB
    await offered.stop()


async def test_what_the_server_waits_for_says_how_far_a_download_is(tmp_path):
    offered = Offered(tmp_path, 8 * MB)
    await offered.start()
    offered.dial("slow", "weights_mb = 500\nbytes_per_day = 4300000\n")
    offered.dial("other", "")
    said = "slow is downloading the model, 50 % (its owner allows 4300000 bytes a day)"
    await wait_until(lambda: said in offered.roster._downloads())
    await wait_until(lambda: "other" in offered.roster.declined)
    assert "weights_mb in policy.toml" in offered.roster.declined["other"][1]
    assert offered.link.peers["slow"].fetched[1] == Fetched(
        50, "its owner allows 4300000 bytes a day"
    )
    # Rounds do not wait for it, as it may take hours.
    assert offered.roster._connected() == set()
    waiting = asyncio.create_task(offered.roster.until(lambda: False, clients=2, seconds=0.2))
    assert not await waiting
    [event] = [each for each in offered.events if isinstance(each, WaitingForParticipants)][:1]
    assert waiting_for(event) == f"waiting for 2 devices; ready: 0 of 2 devices; {said}"
    await offered.stop()


async def says(send, request, percent):
    """A device says how much of the files it has."""
    fetched = link_pb2.Fetched(bytes=percent, of=100)
    await send(progress=link_pb2.Progress(id=request.id, fetched=fetched))


def waits_told(offered):
    """How often it was published that the run waits."""
    return sum(isinstance(event, WaitingForParticipants) for event in offered.events)


async def test_a_download_that_says_the_same_again_and_again_ends_no_wait_later(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(roster, "_REPEAT_SECONDS", 0.05)
    offered = Offered(tmp_path, MB)
    await offered.start()
    async with offered.network.raw_stream(name="liar") as (_, send, receive):
        request = await receive("request")

        async def alternate():
            while True:
                before = waits_told(offered)
                for percent in (0, 1):
                    await says(send, request, percent)
                await wait_until(lambda before=before: waits_told(offered) > before)

        alternating = asyncio.create_task(alternate())
        async with asyncio.timeout(30):
            assert not await offered.roster.until(lambda: False, clients=2, seconds=1.0)
        alternating.cancel()
        await asyncio.gather(alternating, return_exceptions=True)
    await offered.stop()


@pytest.mark.parametrize("ends_later", [True, False])
async def test_the_wait_for_another_device_is_not_longer_because_a_download_gets_on(
    tmp_path, monkeypatch, ends_later
):
    """And one that is for the device itself, because the run cannot go on without, is."""
    monkeypatch.setattr(roster, "_REPEAT_SECONDS", 0.05)
    offered = Offered(tmp_path, MB)
    time = offered.job.time.model_copy(update={"cohort_seconds": 1.0})
    offered.job = offered.job.model_copy(update={"time": time})
    await offered.start()
    network = offered.network
    async with (
        network.raw_stream(name="mute") as (_, mute_sends, mute_receives),
        network.raw_stream(name="slow") as (_, send, receive),
    ):
        prepare = await mute_receives("request")
        await mute_sends(reply=link_pb2.Reply(id=prepare.id, prepared=link_pb2.Prepared()))
        assert (await mute_receives("request")).HasField("open")  # and never opens
        request = await receive("request")
        told = 0

        async def get_on():
            nonlocal told
            for percent in range(1, 101):
                before = waits_told(offered)
                told = percent
                await says(send, request, percent)
                await wait_until(lambda before=before: waits_told(offered) > before)

        getting_on = asyncio.create_task(get_on())
        if ends_later:
            assert not await offered.roster.until(lambda: False, clients=2, seconds=3.0)
            assert told == 100
        else:
            await offered.roster.gather_cohort(1, 2)
            assert told < 100
            (awaited,) = (each for each in offered.events if isinstance(each, CohortAwaited))
            assert awaited.given_up == ["mute"]
        getting_on.cancel()
        await asyncio.gather(getting_on, return_exceptions=True)
    await offered.stop()
