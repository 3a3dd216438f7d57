"""Devices that reply and send nothing keep no place from others, who are not blamed for it."""

import asyncio
import types

import pytest
import torch
from tests.server.regimes.replies import LAYOUT, LEASE_SECONDS, update_reply, updating
from tests.server.regimes.test_plaintext import prepare, statuses  # noqa: F401 - a fixture
from tests.server.regimes.test_round_times import ShortRounds, secure_run  # noqa: F401 - a fixture
from tests.server.scripted_participant import delayed
from tests.server.waiting import wait_until

from isthmus.errors import TransferStalled
from isthmus.transport import uplink
from isthmus.transport.transfer_time import TransferTime
from isthmus.wire import link_pb2
from isthmus_server.regimes import upload_places
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.upload_places import NO_PLACE, UPLOADS_AT_ONCE, UploadPlaces
from isthmus_server.transport.peer import LOOKS, Peer, Place

SILENT = [f"silent-{number}" for number in range(UPLOADS_AT_ONCE)]
HONEST = ["x", "y"]
PAUSE = TransferTime.LONGEST_PAUSE + LEASE_SECONDS
STALLED = f"nothing of its result came for {PAUSE:g} s"


@pytest.fixture
def withheld(monkeypatch):
    """Payloads of which the uplinks of their devices send nothing; all else goes on."""
    payloads = []
    send_result = uplink.send_result

    async def send(stream, jobs, pull, *rest):
        if any(job.payload is each for each in payloads for job in jobs.values()):
            await asyncio.Event().wait()
        await send_result(stream, jobs, pull, *rest)

    monkeypatch.setattr(uplink, "send_result", send)
    return payloads


def withholding(withheld):
    """Replies with an update, and sends nothing of it."""

    async def respond(participant, request, model):
        reply, payload = update_reply(LAYOUT, [1.0, 2.0, 3.0])
        withheld.append(payload)
        return reply, payload

    return respond


async def with_all_places_taken(prepare, network, withheld):  # noqa: F811
    """An attempt in which silent devices have all places, and the honest ones have replied."""
    attempt = await prepare("federated.cohort=10", "federated.quorum=2")
    times = attempt.regime.context.round_times = ShortRounds()
    for name in SILENT:
        await network.join(name, withholding(withheld))
    others_first = asyncio.Event()
    for name in HONEST:
        await network.join(name, delayed(updating(), others_first))
    training = asyncio.create_task(attempt.run(*SILENT, *HONEST))
    peers = network.link.peers
    await wait_until(lambda: all(peers[name].fetches for name in SILENT))
    others_first.set()
    await wait_until(lambda: all(peers[name].unacknowledged for name in HONEST))
    assert not any(peers[name].fetches for name in HONEST)
    return training, times


async def pass_a_pause(timeouts, pause=PAUSE):
    """Each look at a transfer makes the wait for the next one, which then ends, too."""
    await timeouts.expire(pause / LOOKS)


async def test_eight_silent_uploads_do_not_stop_a_round(prepare, network, timeouts, withheld):  # noqa: F811
    training, times = await with_all_places_taken(prepare, network, withheld)
    await pass_a_pause(timeouts)
    result = await training
    assert result.pseudo_gradient.tolist() == [1.0, 2.0, 3.0]
    of = {receipt.participant: receipt for receipt in result.receipts}
    assert all(of[name].status == "accepted" and not of[name].late for name in HONEST)
    for name in SILENT:
        assert (of[name].status, of[name].reason, of[name].late) == ("dropped", STALLED, True)
    assert times._unready.keys() == set(SILENT)


async def test_who_waits_for_a_place_is_not_late(prepare, network, timeouts, withheld):  # noqa: F811
    training, times = await with_all_places_taken(prepare, network, withheld)
    await timeouts.expire(1200.0)  # as ShortRounds has it
    with pytest.raises(AttemptFailed) as caught:
        await training
    of = {receipt.participant: receipt for receipt in caught.value.receipts}
    for name in HONEST:
        assert (of[name].status, of[name].reason, of[name].late) == ("dropped", NO_PLACE, False)
    assert all(of[name].late for name in SILENT)
    assert times._unready.keys() == set(SILENT)


async def test_a_place_that_is_used_below_the_least_rate_is_freed_for_others(
    prepare,  # noqa: F811
    network,
    withheld,
    monkeypatch,
):
    """One byte now and then moves, and would keep a place for the whole round."""
    monkeypatch.setattr(upload_places, "_LOOK_SECONDS", 0.05)
    training, _ = await with_all_places_taken(prepare, network, withheld)
    monkeypatch.setattr(upload_places.TransferTime, "LONGEST_PAUSE", 0.0)
    result = await training
    of = {receipt.participant: receipt for receipt in result.receipts}
    assert {of[name].status for name in HONEST} == {"accepted"}
    for name in SILENT:
        assert of[name].reason == (
            "its result came at less than 20000 bytes per second (time.least_rate) while others "
            "waited for its place"
        )


async def test_a_place_is_freed_of_a_device_whose_vector_comes_too_slowly_to_its_aggregator(
    monkeypatch,
):
    """Not while it waits there for other devices, of which it is not to blame."""
    monkeypatch.setattr(upload_places, "UPLOADS_AT_ONCE", 1)
    monkeypatch.setattr(upload_places, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(upload_places.TransferTime, "LONGEST_PAUSE", 0.0)
    device = Peer(link_pb2.Hello(name="slow"))
    device.place = Place(Peer(link_pb2.Hello(name="sums")), 7)
    places = UploadPlaces(types.SimpleNamespace(peers={"slow": device}), least_rate=20_000.0)
    looks = []
    free_unused = places._free_unused

    def look():
        looks.append(len(places._held))
        free_unused()

    monkeypatch.setattr(places, "_free_unused", look)

    async def hold(name, until):
        async with places.place(name):
            await until.wait()

    async with asyncio.timeout(30):
        slow = asyncio.create_task(hold("slow", asyncio.Event()))
        await wait_until(lambda: places._held)
        at_once = asyncio.Event()
        at_once.set()
        other = asyncio.create_task(hold("other", at_once))
        await wait_until(lambda: len(looks) > 2)
        assert not slow.done()
        asked = link_pb2.Request(id="1", add_vector=link_pb2.AddVector(channel=8))
        device.place.aggregator.pending["1"] = (asked, asyncio.Future())
        seen = len(looks)
        await wait_until(lambda: len(looks) > seen + 2)
        assert not slow.done()
        asked.add_vector.channel = 7
        with pytest.raises(TransferStalled, match="at less than 20000 bytes per second"):
            await slow
        await other


async def test_a_silent_vector_does_not_stop_a_secure_round(
    secure_run,  # noqa: F811
    timeouts,
    withheld,
    monkeypatch,
):
    monkeypatch.setattr(upload_places, "UPLOADS_AT_ONCE", 1)
    times = ShortRounds()
    link = secure_run.network.link
    first = asyncio.Event()

    def withhold(reply, payload):
        withheld.append(payload)
        return payload

    device = secure_run.devices["a"]
    device.tamper = withhold
    for name in "bcde":
        work = secure_run.devices[name].work

        async def later(request, model, progress, work=work):
            if request.secure_step.HasField("inbox"):
                await first.wait()
            return await work(request, model, progress)

        secure_run.devices[name].work = later
    training = asyncio.create_task(secure_run.train(round_times=times))
    await wait_until(lambda: link.peers["a"].fetches)
    first.set()
    await wait_until(lambda: all(link.peers[name].unacknowledged for name in "bcde"))
    await pass_a_pause(timeouts, TransferTime.LONGEST_PAUSE + link.lease_seconds)
    result = await training
    assert statuses(result.receipts) == {"a": "dropped", **dict.fromkeys("bcde", "accepted")}
    assert result.receipts[0].late
    assert torch.allclose(result.pseudo_gradient, (await secure_run.plain_mean("bcde")).float())
    assert times._unready.keys() == {"a"}
