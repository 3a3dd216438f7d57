"""Devices behind aggregators, over real TLS on loopback: models, losses and refusals."""

import asyncio
import contextlib
import errno
import json
import re
import uuid

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner
from tests.conftest import TABLE
from tests.free_ports import free_ports
from tests.server.read.console.serving import ask, served
from tests.server.service.conftest import Fleet
from tests.server.waiting import wait_until

from isthmus.doctor import checks
from isthmus.errors import AdmissionRefused, TransferStalled, UpdateError, UserError
from isthmus.identity import tls
from isthmus.task import Participant
from isthmus.transport import dial_order
from isthmus.transport import uplink as links
from isthmus.transport.blobs import describe
from isthmus.transport.transfer_time import TransferTime
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_server.aggregator import devices
from isthmus_server.aggregator.blobs import KeptBlobs
from isthmus_server.aggregator.process import AggregatorProcess, ServerLink
from isthmus_server.aggregator.sums import VectorSums
from isthmus_server.cli.server import server
from isthmus_server.fleet.presence import FleetPresence, read_snapshot
from isthmus_server.regimes import partial_sums, upload_places
from isthmus_server.storage.records import RoundRecord
from isthmus_server.storage.store import Store
from isthmus_server.transport import aggregator_room, aggregators
from isthmus_server.transport.aggregators import LEFT
from isthmus_server.transport.limits import MAX_MESSAGE_BYTES, Refusal

DEVICES = ("a", "b", "c", "d")
AGGREGATORS = ("127.0.0.1", "127.0.0.1_2")


class Site(Fleet):
    """A server with aggregators, which devices are connected to."""

    async def begin(self):
        (self.state / "tasks").mkdir()
        (self.state / "tasks/task.py").write_text(TABLE + "    pass\n")
        await self.listen(queue=True)
        self.members = {name: await self.member(name) for name in DEVICES}
        self.places = {}
        self.processes = []
        self.running = {}
        self.agents = {}

    async def aggregator(self, name, member=None, port=None):
        """A running aggregator, which may begin again at its port; returns its task."""
        port = free_ports(1) if port is None else port
        member = member or await self.member(name, kind="aggregator")
        process = AggregatorProcess(member)
        ready = asyncio.Event()
        run = process.run("127.0.0.1", port, server=self.address, ready=ready.set)
        task = asyncio.create_task(run)
        self.connections.append(task)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        self.processes.append(process)
        self.places[name] = f"127.0.0.1:{process.port}"
        return task

    async def devices(self, *places, after=()):
        """Connect each device to one of the places in turn, instead of where it was.

        After all of these, each has the addresses in `after`.
        """
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        for peer in list(self.link.peers.values()):
            self.link.disconnect(peer.name, "it has left")
        await wait_until(lambda: not self.link.peers)
        for number, name in enumerate(DEVICES):
            agent = Agent(
                Participant(name=name, regime="federated"),
                None,
                tasks=self.state / "tasks",
                signing_key=self.members[name].identity,
            )
            own = number % len(places)
            uplink = agent.uplink(
                places[own], self.members[name], others=(*places[own + 1 :], *places[:own], *after)
            )
            uplink.longest_pause = 0.05
            self.running[name] = asyncio.create_task(uplink.run())
            self.connections.append(self.running[name])
        await wait_until(lambda: set(DEVICES) <= self.link.peers.keys())

    async def run(self, job):
        """Run a job to its end; returns its committed rounds."""
        entry = self.runner.submit(job, "me", uuid.uuid4().hex, 1.0)
        async for event in self.runner.events(entry.id, follow=True):
            last = event
        assert last.state == "finished", last
        with contextlib.closing(Store.open(self.state / "runs" / entry.id)) as store:
            ended = list(store.attempts())
            self.run_id = store.run_id
        self.failed = [each for each in ended if not isinstance(each, RoundRecord)]
        return [each for each in ended if isinstance(each, RoundRecord)]


@pytest.fixture
async def site(tmp_path):
    site = Site(tmp_path)
    await site.begin()
    yield site
    await site.close()


@pytest.fixture
def job(make_job):
    usual = ("federated.cohort=4", "federated.quorum=2", "rounds=2", "strategy.policy=federated")
    return lambda *more: make_job(*usual, "time.join_seconds=300", *more)


async def test_updates_are_added_at_aggregators_and_the_model_is_the_same(site, job, caplog):
    caplog.set_level("INFO", logger="isthmus_server.aggregator")
    await site.devices(site.address)
    alone = await site.run(job())
    for name in AGGREGATORS:
        await site.aggregator(name)
    await site.devices(*site.places.values())
    assert {peer.place.aggregator.name for peer in site.link.peers.values()} == set(AGGREGATORS)
    together = await site.run(job())
    assert [row.model_sha256 for row in together] == [row.model_sha256 for row in alone]
    handed = [text for text in caplog.messages if text.startswith("hands over the sum")]
    assert handed == [
        f"hands over the sum of 2 vectors of {site.run_id}, round {round_}, attempt 1"
        for round_ in (1, 1, 2, 2)
    ]
    for one, other in zip(together, alone, strict=True):
        moved = [[(each.bytes_in, each.bytes_out) for each in row.receipts] for row in (one, other)]
        assert moved[0] == moved[1]


def devices_page(state):
    with served(state) as listener:
        return ask(listener, "/devices")[2]


async def test_operators_see_which_device_is_at_which_aggregator(site, caplog):
    caplog.set_level("INFO", logger="isthmus_server.transport")
    for name in AGGREGATORS:
        await site.aggregator(name)
    await site.devices(*site.places.values(), site.address)
    at = dict(zip(DEVICES, (*AGGREGATORS, "", AGGREGATORS[0]), strict=True))
    presence = FleetPresence(site.state, site.link, dict)
    async with presence.kept():
        await wait_until(lambda: read_snapshot(site.state) is not None)
        arguments = ["participants", str(site.state)]
        listed = json.loads(CliRunner().invoke(server, [*arguments, "--json"]).output)
        text = CliRunner().invoke(server, arguments).output.splitlines()
        page = await asyncio.to_thread(devices_page, site.state)
    rows = {row["name"]: row for row in listed["participants"]}
    assert {name: rows[name]["aggregator"] for name in DEVICES} == at
    assert [rows[name]["devices"] for name in AGGREGATORS] == [2, 1]
    assert [rows[name]["state"] for name in AGGREGATORS] == ["online"] * 2
    words = [line.split() for line in text]
    assert [AGGREGATORS[1], "aggregator", "online", "-", "1", "device"] in [
        row[:6] for row in words
    ]
    assert ["b", "client", "online", AGGREGATORS[1]] in [row[:4] for row in words]
    assert re.search(
        f"<td>{AGGREGATORS[0]}</td><td>aggregator</td>.*online.*<td>2 devices</td>", page
    )
    assert re.search(f"<td>d</td><td>client</td>.*online.*<td>{AGGREGATORS[0]}</td>", page)
    for name, place in at.items():
        said = f"{name} is connected through the aggregator {place}"
        assert (said in caplog.messages) is bool(place)


async def test_rounds_go_on_without_the_devices_of_a_lost_aggregator(site, job, monkeypatch):
    lost, _ = [await site.aggregator(name) for name in AGGREGATORS]
    await site.devices(*site.places.values(), site.address)
    handed_over = VectorSums._hand_over

    async def hand_over(self, asked):
        if asked.added and not lost.done() and len(asked.added) == 2:
            monkeypatch.undo()
            lost.cancel()
            await asyncio.sleep(3600)
        return await handed_over(self, asked)

    monkeypatch.setattr(VectorSums, "_hand_over", hand_over)
    first, second = await site.run(job("federated.quorum=2"))
    dropped = [each for each in first.receipts if each.status == "dropped"]
    assert [each.status for each in first.receipts].count("accepted") == 2
    for each in dropped:
        assert each.reason.startswith("the sum of the aggregator 127.0.0.1 was lost: silent for ")
        assert each.sent
        assert not each.late
    assert [each.status for each in second.receipts] == ["accepted"] * 4


async def test_a_device_returns_to_its_aggregator_when_its_next_stream_has_ended(site):
    member = await site.member(AGGREGATORS[0], kind="aggregator")
    task = await site.aggregator(AGGREGATORS[0], member)
    await site.devices(site.places[AGGREGATORS[0]], site.address)
    first = site.link.peers["a"]
    assert first.place is not None
    port = int(site.places[AGGREGATORS[0]].rpartition(":")[2])
    task.cancel()
    await wait_until(lambda: first.stream is not None and first.place is None)
    await site.aggregator(AGGREGATORS[0], member, port)
    assert first.place is None  # as long as its stream holds
    first.serving.cancel()
    await wait_until(lambda: "a" in site.link.peers and site.link.peers["a"].place is not None)


@pytest.fixture
def asks_soon(monkeypatch):
    """Devices at a later address ask earlier ones after a moment."""
    monkeypatch.setattr(dial_order, "FIRST_RETURN_SECONDS", 0.3)
    monkeypatch.setattr(dial_order, "LONGEST_RETURN_SECONDS", 0.3)
    monkeypatch.setattr(links, "_IDLE_SECONDS", 0.1)


async def test_a_device_without_a_request_returns_to_its_aggregator_by_itself(
    site, asks_soon, caplog
):
    member = await site.member(AGGREGATORS[0], kind="aggregator")
    task = await site.aggregator(AGGREGATORS[0], member)
    await site.devices(site.places[AGGREGATORS[0]], site.address)
    first = site.link.peers["a"]
    port = int(site.places[AGGREGATORS[0]].rpartition(":")[2])
    task.cancel()
    await wait_until(lambda: first.stream is not None and first.place is None)
    serving = first.serving
    await asyncio.sleep(1)
    assert first.serving is serving  # while nothing answers there, its stream holds
    caplog.set_level("INFO", logger="isthmus.transport")
    await site.aggregator(AGGREGATORS[0], member, port)
    await wait_until(lambda: first.stream is not None and first.place is not None)
    assert site.link.peers["a"] is first
    back = f"goes back from {site.address} to {site.places[AGGREGATORS[0]]}"
    assert back in caplog.messages  # of others, too, which wait for another time


async def test_devices_return_to_their_aggregators_in_rounds_without_a_loss(site, job, asks_soon):
    member = await site.member(AGGREGATORS[0], kind="aggregator")
    task = await site.aggregator(AGGREGATORS[0], member)
    place = site.places[AGGREGATORS[0]]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await site.devices(site.address)
    alone = await site.run(job("rounds=6"))
    await site.devices(place, after=(site.address,))
    running = asyncio.create_task(site.run(job("rounds=6", "federated.quorum=4")))
    await site.aggregator(AGGREGATORS[0], member, int(place.rpartition(":")[2]))
    rows = await running
    assert not site.failed
    assert [row.model_sha256 for row in rows] == [row.model_sha256 for row in alone]
    await wait_until(lambda: all(each.place for each in site.link.peers.values()))


async def test_devices_wait_for_an_aggregator_whose_server_starts_again(site, monkeypatch):
    await site.aggregator(AGGREGATORS[0])
    await site.devices(site.places[AGGREGATORS[0]], after=(site.address,))
    peers = [site.link.peers[name] for name in DEVICES]
    assert all(each.place for each in peers)
    (process,) = site.processes
    monkeypatch.setattr(ServerLink, "is_linked", False)
    process.devices.end_all()
    await wait_until(lambda: not any(each.stream for each in peers))
    await asyncio.sleep(1)
    assert not any(each.stream for each in peers)  # none has gone on to the server
    monkeypatch.undo()
    await wait_until(lambda: all(each.stream and each.place for each in peers))


async def test_an_aggregator_without_a_server_says_so_after_a_devices_first_message(
    site, monkeypatch
):
    """A gRPC client that writes to a stream that has just ended does not learn why it has."""
    await site.aggregator(AGGREGATORS[0])
    monkeypatch.setattr(ServerLink, "is_linked", False)
    credentials = site.members["a"].channel_credentials()
    async with grpc.aio.secure_channel(site.places[AGGREGATORS[0]], credentials) as channel:
        call = channel.stream_stream(links.METHOD)()
        answer = asyncio.create_task(call.read())
        await asyncio.wait((answer,), timeout=0.3)
        assert not answer.done()
        await call.write(b"hello")
        with pytest.raises(grpc.aio.AioRpcError, match="has no link to its server now"):
            await answer


async def test_a_device_at_its_check_in_waits_for_an_aggregator_once(site, monkeypatch):
    await site.aggregator(AGGREGATORS[0])
    await site.devices(site.places[AGGREGATORS[0]], after=(site.address,))
    peer = site.link.peers["a"]
    monkeypatch.setattr(ServerLink, "is_linked", False)
    site.link._call_back(peer, 2.0)
    await wait_until(lambda: "a" not in site.link.peers)
    # Between two tries are 0.25 to 0.5 seconds, and hours if a check-in is once a day.
    async with asyncio.timeout(60):
        await wait_until(lambda: "a" in site.link.peers)
    assert site.link.peers["a"].place is None


async def test_doctor_blames_no_clock_for_an_aggregator_without_a_server(site, monkeypatch):
    await site.aggregator(AGGREGATORS[0])
    monkeypatch.setattr(ServerLink, "is_linked", False)
    member = site.members["a"]
    place = site.places[AGGREGATORS[0]]
    found = await asyncio.to_thread(checks.clock, member, member.road(None, place))
    remedy = "try again, as its server may be starting; if it is the same, tell the operator"
    why = f"{place}: this aggregator has no link to its server now"
    assert found == checks.Diagnosis("FAIL", "answer", why, remedy)


async def test_a_device_that_comes_as_the_link_to_the_server_breaks_is_told_so(site, monkeypatch):
    """Else it waited half a minute for a welcome."""
    await site.aggregator(AGGREGATORS[0])

    def break_after(link):
        was_linked = link._stream is not None
        link._stream = None
        return was_linked

    monkeypatch.setattr(ServerLink, "is_linked", property(break_after))
    credentials = site.members["a"].channel_credentials()
    async with (
        asyncio.timeout(20),
        grpc.aio.secure_channel(site.places[AGGREGATORS[0]], credentials) as channel,
    ):
        call = channel.stream_stream(links.METHOD)()
        await call.write(b"hello")  # which nobody answers
        with pytest.raises(grpc.aio.AioRpcError, match="has no link to its server now"):
            await call.read()


async def test_a_sum_that_is_not_fetched_in_time_is_lost_and_freed(site, job, monkeypatch):
    for name in AGGREGATORS:
        await site.aggregator(name)
    await site.devices(*site.places.values())
    monkeypatch.setattr(partial_sums, "HAND_OVER_SECONDS", 3.0)  # the other one needs less
    fetch = site.link.fetch
    hung = []

    async def hang_once(name, *more):
        if not hung:
            hung.append(name)
            await asyncio.sleep(3600)
        await fetch(name, *more)

    monkeypatch.setattr(site.link, "fetch", hang_once)
    (row,) = await site.run(job("rounds=1", "time.least_rate=1e9"))
    reasons = [each.reason for each in row.receipts if each.status == "dropped"]
    assert reasons == [f"the sum of the aggregator {hung[0]} was lost: it did not come in time"] * 2
    held = [process.devices._to._sums for process in site.processes]
    await wait_until(lambda: not any(sums._sums for sums in held))


async def test_masked_vectors_are_added_at_aggregators(site, job, caplog):
    for name in AGGREGATORS:
        await site.aggregator(name)
    await site.devices(*site.places.values(), site.address)
    caplog.set_level("INFO", logger="isthmus_server.aggregator")
    secure = ("federated.secure_aggregation=true", "rounds=1")
    (together,) = await site.run(job(*secure, "federated.quorum=3"))
    assert [each.status for each in together.receipts] == ["accepted"] * 4
    handed = [text for text in caplog.messages if text.startswith("hands over the sum")]
    # Of the ranges of the updates, and of the updates; the third aggregate is the server's own.
    assert sorted(handed) == [
        f"hands over the sum of {count} of {site.run_id}{part}, round 1, attempt 1"
        for count in ("1 vector", "2 vectors")
        for part in ("", "/ranges")
    ]
    await site.devices(site.address)
    (alone,) = await site.run(job(*secure, "federated.quorum=3"))
    # Secure sums are rounded at random.
    assert together.metrics["loss"] == pytest.approx(alone.metrics["loss"], abs=1e-5)
    again = [text for text in caplog.messages if text.startswith("hands over the sum")]
    assert again == handed  # the second job's devices are at the server


async def test_devices_for_whose_vectors_an_aggregator_has_no_place_are_not_late(
    site, job, monkeypatch
):
    """One vector at a time, and the first one never comes."""
    await site.aggregator(AGGREGATORS[0])
    await site.devices(site.places[AGGREGATORS[0]])
    monkeypatch.setattr(aggregator_room, "VECTORS_AT_ONCE", 2)

    async def never(self, *asked):
        await asyncio.Event().wait()

    monkeypatch.setattr(devices.Devices, "fetch", never)
    secure = ("federated.secure_aggregation=true", "federated.clip=4.0", "federated.max_examples=9")
    limits = ("federated.quorum=3", "time.secure_upload_seconds=3", "attempts=1")
    entry = site.runner.submit(job(*secure, *limits), "me", uuid.uuid4().hex, 1.0)
    async for event in site.runner.events(entry.id, follow=True):
        if event.kind == "attempt_failed":
            break
    reasons = [(each.reason, each.late) for each in event.record.receipts]
    late = ("it did not finish sending in time", True)
    assert sorted(reasons) == sorted([late] + [(upload_places.NO_PLACE, False)] * 3)


async def test_vectors_at_aggregators_take_no_place_of_the_server(site, job, monkeypatch):
    """Those at the server come while those at the aggregator have not, and the other way round."""
    await site.aggregator(AGGREGATORS[0])
    await site.devices(site.places[AGGREGATORS[0]], site.address)
    monkeypatch.setattr(upload_places, "UPLOADS_AT_ONCE", 1)
    at_aggregator = []
    at_server = []
    get = devices.Devices.fetch
    fetch = site.link.fetch

    async def get_last(self, *asked):
        at_aggregator.append(asked)
        await wait_until(lambda: len(at_server) == 2)
        await get(self, *asked)

    async def fetch_first(name, *more):
        if name in DEVICES:
            await wait_until(lambda: len(at_aggregator) == 2)
            at_server.append(name)
        await fetch(name, *more)

    monkeypatch.setattr(devices.Devices, "fetch", get_last)
    monkeypatch.setattr(site.link, "fetch", fetch_first)
    (row,) = await site.run(job("rounds=1", "federated.quorum=4"))
    assert [each.status for each in row.receipts] == ["accepted"] * 4


async def test_masked_vectors_of_a_lost_aggregator_drop_out_before_anything_is_unmasked(
    site, job, monkeypatch
):
    lost, _ = [await site.aggregator(name) for name in AGGREGATORS]
    await site.devices(site.places[AGGREGATORS[0]], *[site.places[AGGREGATORS[1]]] * 3)
    handed_over = VectorSums._hand_over

    alone = []

    async def hand_over(self, asked):
        if len(asked.added) == 1:  # of the aggregator with one device
            alone.append(asked.sum)
        if len(alone) == 2:  # of the updates, after that of their ranges
            monkeypatch.undo()
            lost.cancel()
            await asyncio.sleep(3600)
        return await handed_over(self, asked)

    monkeypatch.setattr(VectorSums, "_hand_over", hand_over)
    (row,) = await site.run(
        job("federated.secure_aggregation=true", "rounds=1", "federated.quorum=3")
    )
    (failed,) = site.failed
    lost_part = "the sum of the aggregator 127.0.0.1 was lost: silent for longer than the lease of "
    # The secure sum of so few devices needs all of them.
    assert f"3 of 4 vectors came; 4 are needed (a: {lost_part}" in failed.error
    assert [each.status for each in row.receipts] == ["accepted"] * 4


async def test_who_is_no_aggregator_of_this_server_is_refused_in_one_sentence(site, monkeypatch):
    (site.folder / "elsewhere").mkdir()
    stranger = Fleet(site.folder / "elsewhere")
    await stranger.listen()
    foreign = await stranger.member("127.0.0.1", kind="aggregator")
    with pytest.raises(UserError, match="is the membership of a client"):
        AggregatorProcess(site.members["a"])
    own = await site.member("127.0.0.1", kind="aggregator")
    # Another server's aggregator does not even trust this server.
    sentence = (
        "the aggregator '127.0.0.1' cannot be used here: the server at localhost:[0-9]+ is of "
        "another fleet: its certificate is not of the authority that this machine has joined; "
        "check the address; at a new server join again"
    )
    with pytest.raises(AdmissionRefused, match=f"^{sentence}$"):
        async with asyncio.timeout(30):
            await site.aggregator("127.0.0.1", foreign)
    await stranger.close()
    monkeypatch.setattr(links, "VERSION", 3)
    monkeypatch.setattr(links, "OLDEST_VERSION", 3)
    sentence = "it supports link version 3 and this server supports version 2; upgrade the older"
    with pytest.raises(AdmissionRefused, match=sentence):
        await site.aggregator("127.0.0.1", own)
    monkeypatch.undo()
    site.registry().revoke("127.0.0.1")
    with pytest.raises(AdmissionRefused, match="has been revoked"):
        await site.aggregator("127.0.0.1", own)


async def test_a_device_of_another_role_or_fleet_is_refused_at_an_aggregator(site):
    await site.aggregator(AGGREGATORS[0])
    for member in (site.members["a"], await site.member("me", kind="datacenter")):
        site.registry().revoke(member.name)
        role = link_pb2.Role.Value(member.kind.upper())
        uplink = links.Uplink(
            site.places[AGGREGATORS[0]], member.name, role, None, membership=member
        )
        with pytest.raises(AdmissionRefused, match="has been revoked"):
            await uplink.run()


@pytest.fixture
async def behind(site, monkeypatch):
    """A site whose `raw` opens streams at its aggregator."""
    await site.aggregator(AGGREGATORS[0])
    monkeypatch.setattr(site, "address", site.places[AGGREGATORS[0]])
    site.connected = site.link.aggregators.connected[AGGREGATORS[0]]
    yield site
    assert site.link.aggregators.connected[AGGREGATORS[0]] is site.connected


async def status(call):
    """With what a stream ends."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


async def test_a_message_that_is_too_large_to_be_passed_ends_one_device_s_stream(behind):
    async with behind.raw(behind.members["a"]) as (call, send, receive):
        await receive("welcome")
        note = "x" * (MAX_MESSAGE_BYTES - 40)
        message = link_pb2.Envelope(progress=link_pb2.Progress(id="1", note=note))
        assert MAX_MESSAGE_BYTES - 64 < message.ByteSize() <= MAX_MESSAGE_BYTES
        await send(progress=message.progress)
        assert await status(call) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_aggregator_cannot_have_a_certificate_issued_for_a_device(behind):
    member = behind.members["a"]
    async with behind.raw(member) as (_, send, receive):
        await receive("welcome")

        async def answer_to(key):
            request = member.next_request()
            await send(renew=link_pb2.Renew(signing_request=request))
            proof = tls.prove(key, (await receive("renewed")).nonce, request)
            await send(renew=link_pb2.Renew(signing_request=request, proof=proof))
            return await receive("renewed")

        reason = (await answer_to(tls.new_key())).reason
        assert reason == "the key of the present certificate did not sign this"
        # The second with the first key, as of a device that could not store the first certificate;
        # the third with the key of the newest.
        for stored in (False, True, True):
            assert not (await answer_to(member.key)).reason
            if stored:
                member.key = member._next_key


async def test_a_stream_that_the_aggregator_ends_is_ended_at_the_server(behind):
    async with behind.raw(behind.members["a"]) as (call, _, receive):
        await receive("welcome")
        peer = behind.link.peers["a"]
        (device,) = behind.processes[0].devices._devices.values()
        device.end(Refusal("it does not read", grpc.StatusCode.UNAVAILABLE))
        assert await status(call) is grpc.StatusCode.UNAVAILABLE
        await wait_until(lambda: peer.stream is None and not behind.connected.devices)


async def test_one_device_too_many_is_refused_and_the_others_stay(behind, monkeypatch):
    monkeypatch.setattr(aggregators, "MAX_CHANNELS", 1)
    async with behind.raw(behind.members["a"]) as (_, _, receive):
        await receive("welcome")
        async with behind.raw(behind.members["b"]) as (call, _, _):
            assert await status(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert behind.connected.devices == 1


async def test_a_pull_of_no_sha256_ends_the_stream_of_its_device(behind):
    async with behind.raw(behind.members["a"]) as (call, send, receive):
        await receive("welcome")
        await send(pull=link_pb2.Pull(sha256=b"short"))
        assert await status(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_nobody_waits_for_a_device_that_is_not_admitted(behind, monkeypatch):
    waits = asyncio.Event()
    admit = behind.link.enrolments.admit

    async def slowly(hello, certificate):
        if hello.name == "a":
            await waits.wait()
        return await admit(hello, certificate)

    monkeypatch.setattr(behind.link.enrolments, "admit", slowly)
    async with behind.raw(behind.members["a"]) as (call, send, _):
        for _ in range(aggregators.WAITING_MESSAGES + 2):
            await send(leave=link_pb2.Leave())
        assert await status(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with behind.raw(behind.members["b"]) as (_, _, receive):
            await receive("welcome")
        waits.set()


async def test_a_vector_of_which_nothing_comes_is_given_up(behind, monkeypatch):
    monkeypatch.setattr(devices, "STALLED_SECONDS", 0.2)
    here = behind.processes[0].devices
    async with behind.raw(behind.members["a"]) as (_, _, receive):
        await receive("welcome")
        (number,) = here._devices
        blob = link_pb2.Blob(sha256=bytes(32), size=1)
        with pytest.raises(UpdateError, match=r"nothing of its vector came for 0\.2 s") as caught:
            await here.fetch(number, blob, lambda *_: None)
        assert caught.value.code == LEFT


async def test_a_vector_that_waits_behind_another_of_its_device_is_not_given_up(
    behind, monkeypatch
):
    """A slow link has them one after the other."""
    monkeypatch.setattr(devices, "STALLED_SECONDS", 2.0)
    here = behind.processes[0].devices
    payload = bytes(range(30))
    first, second = describe(payload), describe(b"2")
    async with behind.raw(behind.members["a"]) as (_, send, receive):
        await receive("welcome")
        (number,) = here._devices
        fetching = [
            asyncio.create_task(here.fetch(number, blob, lambda *_: None))
            for blob in (first, second)
        ]
        for offset, value in enumerate(payload):
            await asyncio.sleep(0.1)
            chunk = link_pb2.Chunk(sha256=first.sha256, offset=offset, data=bytes((value,)))
            await send(chunk=chunk)
        await fetching[0]
        await send(chunk=link_pb2.Chunk(sha256=second.sha256, data=b"2"))
        await fetching[1]


@pytest.fixture
def told(monkeypatch):
    """What aggregators have told of bytes that have moved: how many, and whether they were last."""
    told = []
    usual = aggregators.ConnectedAggregator.take

    async def take(self, message):
        if message.HasField("passed"):
            told.append((message.passed.bytes, message.passed.is_last))
        await usual(self, message)

    monkeypatch.setattr(aggregators.ConnectedAggregator, "take", take)
    return told


async def test_a_vector_is_told_of_once(behind, told):
    """Its transfer begins when the server asks for it."""
    opening = link_pb2.OpenSum(masked=link_pb2.MaskedSum(length=1, bits=16))
    parts = partial_sums.PartialSums(behind.link, opening, 2, least_rate=1e3)
    places = upload_places.UploadPlaces(behind.link, least_rate=1e3)
    vector = describe(b"ab")
    async with behind.raw(behind.members["a"]) as (_, send, receive):
        await receive("welcome")
        adding = asyncio.create_task(parts.add(parts.place("a"), vector, "a", 0, places))
        await receive("pull")
        moved = behind.link.peers["a"].transfer_time
        begun = moved.moved_at
        assert begun > 0  # since its connection nothing else has moved
        await send(chunk=link_pb2.Chunk(sha256=vector.sha256, data=b"ab"))
        await adding
        assert told == [(2, False)]
        assert moved.count == 2
        assert moved.seconds == moved.moved_at - begun
        parts.end()


async def test_the_end_of_a_model_is_told_with_the_last_of_its_bytes(behind, told):
    payload = bytes(1000)
    model = describe(payload)
    behind.link.publish(model, payload)
    async with behind.raw(behind.members["a"]) as (_, send, receive):
        await receive("welcome")
        work = link_pb2.TrainLocal(model=model)
        request = link_pb2.Request(id=behind.link.new_id(), train_local=work)
        asking = asyncio.create_task(behind.link.ask("a", request))
        await receive("request")
        peer = behind.link.peers["a"]
        await send(pull=link_pb2.Pull(sha256=model.sha256))
        await receive("chunk")
        await wait_until(lambda: peer.last_blob == model.sha256)
        assert told == [(0, False), (1000, True)]
        # Of one that is here already there is nothing else to tell.
        peer.last_blob = b""
        await send(pull=link_pb2.Pull(sha256=model.sha256, offset=1000))
        await wait_until(lambda: peer.last_blob == model.sha256)
        assert told[2:] == [(0, True)]
        asking.cancel()


async def test_a_device_whose_stream_has_broken_with_a_chunk_gets_smaller_ones(behind):
    """Also at an aggregator: a chunk that takes longer than a lease would end each stream."""
    payload = bytes(600_000)
    model = describe(payload)
    behind.link.publish(model, payload)
    work = link_pb2.TrainLocal(model=model)
    request = link_pb2.Request(id=behind.link.new_id(), train_local=work)
    sizes = []
    asking = None
    for _ in range(2):
        async with behind.raw(behind.members["a"]) as (_, send, receive):
            await receive("welcome")
            asking = asking or asyncio.create_task(behind.link.ask("a", request))
            await receive("request")
            await send(pull=link_pb2.Pull(sha256=model.sha256))
            sizes.append(len((await receive("chunk")).data))
        await wait_until(lambda: not behind.processes[0].devices)
    assert sizes == [256 << 10, 64 << 10]
    assert len(behind.processes[0].devices._before) == 1
    asking.cancel()


async def test_a_device_whose_vector_broke_its_stream_sends_the_next_one_in_small_chunks(
    site, job, monkeypatch
):
    """It does not go on with it, so that the next one would break the stream in the same way."""
    await site.aggregator(AGGREGATORS[0])
    await site.devices(site.places[AGGREGATORS[0]])
    fetch = devices.Devices.fetch
    chunk_bytes = TransferTime.chunk_bytes
    broken = []
    after_a_break = []

    async def break_once(self, channel, vector, write):
        await fetch(self, channel, vector, write)
        if not broken:
            broken.append(channel)
            self._devices[channel].end(Refusal("it broke", grpc.StatusCode.UNAVAILABLE))
            await wait_until(lambda: channel not in self._devices)
            raise UpdateError("it left")

    def noted(self, usual, *, again):
        if again:
            after_a_break.append(chunk_bytes(self, 1 << 20, again=again))
        return chunk_bytes(self, usual, again=again)

    monkeypatch.setattr(devices.Devices, "fetch", break_once)
    monkeypatch.setattr(TransferTime, "chunk_bytes", noted)
    rows = await site.run(job("federated.quorum=4"))
    assert len(rows) == 2
    assert len(site.failed) == 1
    assert after_a_break == [64 << 10]  # and not in the next round


async def test_a_device_that_waits_for_its_welcome_is_not_pinged(behind, monkeypatch):
    """It would take a ping for another first message, and come back only to wait again."""
    waits = asyncio.Event()
    admit = behind.link.enrolments.admit

    async def slowly(hello, certificate):
        await waits.wait()
        return await admit(hello, certificate)

    monkeypatch.setattr(behind.link.enrolments, "admit", slowly)
    monkeypatch.setattr(behind.processes[0].devices._heartbeats, "lease_seconds", 0.2)
    async with behind.raw(behind.members["a"]) as (call, _, _):
        reading = asyncio.create_task(call.read())
        done, _ = await asyncio.wait((reading,), timeout=1.0)
        assert not done
        waits.set()
        assert link_pb2.Envelope.FromString(await reading).HasField("welcome")
        assert link_pb2.Envelope.FromString(await call.read()).HasField("ping")
        assert await status(call) is grpc.StatusCode.OK  # it has answered none


async def test_a_device_goes_elsewhere_if_there_is_no_room_for_its_model(behind, monkeypatch):
    async def full(self, sha256):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(KeptBlobs, "_download", full)
    async with behind.raw(behind.members["a"]) as (call, send, receive):
        await receive("welcome")
        await send(pull=link_pb2.Pull(sha256=bytes(32)))
        assert await status(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == (
            "this aggregator cannot keep a model: No space left on device"
        )


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED])
async def test_devices_go_elsewhere_if_their_aggregator_ends_each_stream_after_the_welcome(
    site, monkeypatch, status
):
    usual = devices.Devices._send

    async def send(self, device, data):
        await usual(self, device, data)
        device.end(Refusal("it is broken", status))

    monkeypatch.setattr(devices.Devices, "_send", send)
    await site.aggregator(AGGREGATORS[0])
    await site.devices(site.places[AGGREGATORS[0]], site.address)
    here = site.link.peers
    await wait_until(lambda: all(here[each].stream and not here[each].place for each in DEVICES))
    # What each address says is the end.
    site.registry().revoke("a")
    async with asyncio.timeout(30):
        with pytest.raises(AdmissionRefused, match="the server refused 'a'"):
            await site.running["a"]


async def test_a_device_goes_on_elsewhere_if_its_aggregator_has_no_room_for_its_model(
    site, job, monkeypatch
):
    async def full(self, sha256):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(KeptBlobs, "_download", full)
    await site.aggregator(AGGREGATORS[0])
    await site.devices(site.places[AGGREGATORS[0]], site.address)
    async with asyncio.timeout(30):
        first, second = await site.run(job("federated.quorum=4"))
    assert not site.failed
    for each in (first, second):
        assert [receipt.status for receipt in each.receipts] == ["accepted"] * 4


async def test_the_rest_of_a_vector_that_was_given_up_does_not_reach_the_server(
    behind, monkeypatch
):
    monkeypatch.setattr(devices, "STALLED_SECONDS", 0.2)
    came = []
    usual = behind.link.__class__._handle

    async def handle(self, peer, stream, message):
        came.append(message.WhichOneof("body") if isinstance(message, link_pb2.Envelope) else "")
        await usual(self, peer, stream, message)

    monkeypatch.setattr(behind.link.__class__, "_handle", handle)
    here = behind.processes[0].devices
    async with behind.raw(behind.members["a"]) as (_, send, receive):
        await receive("welcome")
        (number,) = here._devices
        blob = link_pb2.Blob(sha256=bytes(32), size=4)
        with pytest.raises(UpdateError, match="nothing of its vector came"):
            await here.fetch(number, blob, lambda *_: None)
        await send(chunk=link_pb2.Chunk(sha256=blob.sha256, offset=0, data=b"late"))
        await send(progress=link_pb2.Progress(id="1"))
        await wait_until(lambda: came)
        assert came == ["progress"]
        # What the server asks for itself passes again.
        fetching = asyncio.create_task(behind.link.fetch("a", blob, lambda *_: None))
        await receive("pull")
        await receive("pull")
        await send(chunk=link_pb2.Chunk(sha256=blob.sha256, offset=0, data=b"late"))
        with pytest.raises(UpdateError, match="does not match its SHA-256"):
            await fetching


async def test_a_place_is_free_when_the_aggregator_has_given_its_vector_up(behind, monkeypatch):
    asked = []
    cancel = VectorSums.cancel
    monkeypatch.setattr(VectorSums, "cancel", lambda *more: asked.append(more))
    opening = link_pb2.OpenSum(masked=link_pb2.MaskedSum(length=1, bits=16))
    parts = partial_sums.PartialSums(behind.link, opening, 2, least_rate=1e3)
    places = upload_places.UploadPlaces(behind.link, least_rate=1e3)
    async with behind.raw(behind.members["a"]) as (_, _, receive):
        await receive("welcome")
        place = parts.place("a")
        room = behind.link.aggregators.room(place.aggregator)
        blob = link_pb2.Blob(sha256=bytes(32), size=2)
        adding = asyncio.create_task(parts.add(place, blob, "a", 0, places))
        await receive("pull")
        adding.cancel()
        await wait_until(lambda: asked)
        assert adding.cancelled()
        assert room._held.total() == 1
        cancel(*asked[0])
        await wait_until(lambda: not room._held)
        assert not place.aggregator.pending
        parts.end()
        (held,) = (process.devices._to._sums for process in behind.processes)
        await wait_until(lambda: not held._sums)


async def test_a_vector_below_the_least_rate_keeps_no_place_at_an_aggregator(behind, monkeypatch):
    """One byte now and then moves, so that the aggregator does not give it up."""
    monkeypatch.setattr(upload_places, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(aggregator_room, "VECTORS_AT_ONCE", 2)
    opening = link_pb2.OpenSum(masked=link_pb2.MaskedSum(length=2, bits=16))
    parts = partial_sums.PartialSums(behind.link, opening, 4, least_rate=1.0)
    places = upload_places.UploadPlaces(behind.link, least_rate=1.0)
    blob = link_pb2.Blob(sha256=bytes(32), size=4)
    async with (
        behind.raw(behind.members["a"]) as (_, send, receive),
        behind.raw(behind.members["b"]) as (_, _, receive_other),
    ):
        await receive("welcome")
        await receive_other("welcome")
        slow = asyncio.create_task(parts.add(parts.place("a"), blob, "a", 0, places))
        await receive("pull")
        await send(chunk=link_pb2.Chunk(sha256=blob.sha256, offset=0, data=b"1"))
        other = asyncio.create_task(parts.add(parts.place("b"), blob, "b", 0, places))
        await wait_until(lambda: places.has_lacked("b"))
        monkeypatch.setattr(upload_places.TransferTime, "LONGEST_PAUSE", 0.0)
        with pytest.raises(TransferStalled, match="less than 1 bytes per second"):
            await slow
        await receive_other("pull")
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        parts.end()


@pytest.mark.parametrize("is_fetched", [False, True])
async def test_a_device_of_which_the_server_takes_nothing_holds_up_no_other(
    behind, monkeypatch, is_fetched
):
    """Also not for longer than a moment while the server fetches something from it."""
    taken = asyncio.Event()

    async def never(peer, asked):
        await taken.wait()
        return link_pb2.Renewed(reason="too late")

    monkeypatch.setattr(behind.link, "_renewed", never)
    monkeypatch.setattr(aggregators, "HELD_UP_SECONDS", 0.2 if is_fetched else 3600)
    async with behind.raw(behind.members["a"]) as (call, send, receive):
        await receive("welcome")
        if is_fetched:
            blob = link_pb2.Blob(sha256=bytes(32), size=1)
            fetching = asyncio.create_task(behind.link.fetch("a", blob, lambda *_: None))
            await receive("pull")
        for _ in range(aggregators.WAITING_MESSAGES + 2):
            await send(renew=link_pb2.Renew())
        async with behind.raw(behind.members["b"]) as (_, _, receive_other):
            await receive_other("welcome")
        assert await status(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "it sends more than the server takes" in await call.details()
        if is_fetched:
            fetching.cancel()
        taken.set()
