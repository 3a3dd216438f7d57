"""Leases, pings and reconnecting processes on the link."""

import asyncio

import pytest
from tests.server.listeners import attached
from tests.server.scripted_participant import (
    ScriptedParticipant,
    delayed,
    payload_of,
    replying,
    training_request,
)
from tests.server.waiting import wait_until

from isthmus.errors import ParticipantLost
from isthmus.transport import backoff, dial_order, uplink
from isthmus.transport.blobs import CHUNK_BYTES, describe, into
from isthmus.transport.uplink import Uplink
from isthmus.wire import link_pb2

LEASE = 2.0
"""Seconds of real time, in tests of the link's own clock."""
LONG = 99.0
"""Seconds of simulated time, which the test advances."""


async def test_a_participant_with_a_broken_stream_is_lost_after_a_lease(network, timeouts):
    link = await network.listen(LONG)
    payload = payload_of(3 * CHUNK_BYTES)
    proxy, port = await network.start_proxy()
    participant = await network.join("a", replying(payload), port)
    listener = attached(link)
    reply = await link.ask("a", training_request(link))
    proxy.limits["up"] = 0
    fetching = asyncio.create_task(
        link.fetch("a", reply.trained.result, into(bytearray(len(payload))))
    )
    participant.respond = delayed(replying(), asyncio.Event())
    asking = asyncio.create_task(link.ask("a", training_request(link)))
    await wait_until(lambda: len(participant.requests) == 2)
    proxy.cut(for_good=True)
    await timeouts.expire(LONG)
    for pending in (asking, fetching):
        with pytest.raises(ParticipantLost, match=r"^lost: silent for longer than the lease of 99"):
            await pending
    await wait_until(lambda: listener.left_reasons)
    assert listener.left_reasons == [("a", "lost: silent for longer than the lease of 99 s")]
    assert link.peers == {}


async def test_a_participant_that_is_connected_and_silent_is_lost(network):
    link = await network.listen(LEASE)
    async with network.raw_stream() as (_, _, receive):
        await receive("welcome")
        asking = asyncio.create_task(link.ask("raw", training_request(link)))
        await receive("request")
        with pytest.raises(ParticipantLost, match="silent for longer than the lease"):
            await asking


async def test_pings_keep_both_sides_alive(network):
    link = await network.listen(LEASE)
    released = asyncio.Event()
    listener = attached(link)
    participant = await network.join("a", delayed(replying(), released))
    peer = link.peers["a"]
    stream = peer.stream
    asking = asyncio.create_task(link.ask("a", training_request(link)))
    asyncio.get_running_loop().call_later(2 * LEASE, released.set)
    await asking
    assert listener.left_reasons == []
    assert peer.stream is stream
    assert len(participant.requests) == 1


async def test_a_participant_reconnects_to_a_silent_server(network):
    link = await network.listen(LEASE)
    proxy, port = await network.start_proxy()
    await network.join("a", replying(), port)
    await link.ask("a", training_request(link))  # it has had its welcome
    proxy.limits["down"] = 0
    await wait_until(lambda: len(proxy.carried) >= 2)
    assert (await link.ask("a", training_request(link))).WhichOneof("outcome") == "trained"


async def test_a_participant_reconnects_to_a_server_that_never_replied(network, monkeypatch):
    monkeypatch.setattr(uplink, "_WELCOME_SECONDS", LEASE)
    link = await network.listen(LEASE)
    proxy, port = await network.start_proxy()
    proxy.next_limits["down"] = 20  # less than what gRPC wants to hear first
    await network.join("a", replying(), port)
    assert len(proxy.carried) >= 2
    assert (await link.ask("a", training_request(link))).WhichOneof("outcome") == "trained"


async def test_a_participant_reconnects_at_once_after_each_of_many_breaks(network, monkeypatch):
    monkeypatch.setattr(backoff, "STABLE_SECONDS", 0.0)
    link = await network.listen()
    proxy, port = await network.start_proxy()
    participant = ScriptedParticipant(replying())
    dialling = Uplink(f"127.0.0.1:{port}", "a", link_pb2.CLIENT, participant, longest_pause=60.0)
    network.connections.append(asyncio.create_task(dialling.run()))
    for breaks in range(12):
        await wait_until(lambda breaks=breaks: len(proxy.carried) > breaks and "a" in link.peers)
        assert (await link.ask("a", training_request(link))).WhichOneof("outcome") == "trained"
        proxy.cut()


async def test_a_participant_restarted_as_a_new_process_has_lost_its_work(network):
    link = await network.listen()
    participant = await network.join("a", delayed(replying(), asyncio.Event()))
    listener = attached(link)
    asking = asyncio.create_task(link.ask("a", training_request(link)))
    await wait_until(lambda: participant.requests)
    await participant.disconnect()
    await wait_until(lambda: link.peers["a"].stream is None)
    await network.join("a", replying(examples=5))
    with pytest.raises(ParticipantLost, match=r"^lost: its process ended, and a new one has come"):
        await asking
    await wait_until(lambda: listener.joined_instances)
    assert len(listener.left_reasons) == len(listener.joined_instances) == 1
    assert (await link.ask("a", training_request(link))).trained.examples == 5


async def test_a_repeated_reply_is_used_once(network):
    # As when a participant finishes just while the server, after a break, asks again.
    link = await network.listen()
    async with network.raw_stream() as (_, send, receive):
        await receive("welcome")
        request = training_request(link)
        asking = asyncio.create_task(link.ask("raw", request))
        await receive("request")
        reply = link_pb2.Reply(id=request.id, trained=link_pb2.Trained(result=describe(b"x")))
        await send(reply=reply)
        await asking
        await send(reply=reply)
        fetching = asyncio.create_task(link.fetch("raw", describe(b"x"), into(bytearray(1))))
        pull = await receive("pull")
        await send(chunk=link_pb2.Chunk(sha256=pull.sha256, data=b"x"))
        await fetching
        link.acknowledge("raw", request.id, True)
        assert (await receive("receipt")).accepted
        await send(reply=reply)
        assert not (await receive("receipt")).accepted


async def test_an_abandoned_download_does_not_disturb_the_next(network):
    link = await network.listen()
    payload = payload_of(5 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    proxy, port = await network.start_proxy()
    proxy.next_limits["down"] = CHUNK_BYTES // 2
    participant = await network.join("a", replying(), port)
    first = asyncio.create_task(link.ask("a", training_request(link, blob)))
    await proxy.stalled.wait()
    await wait_until(lambda: participant.buffers)
    proxy.cut(for_good=True)
    await wait_until(lambda: link.peers["a"].stream is None)
    first.cancel()
    proxy.next_limits["down"] = 5 * CHUNK_BYTES // 2
    proxy.stalled.clear()
    proxy.refusing = False
    second = asyncio.create_task(link.ask("a", training_request(link, blob)))
    await proxy.stalled.wait()
    await wait_until(
        lambda: participant.buffers[-1][: 2 * CHUNK_BYTES] == payload[: 2 * CHUNK_BYTES]
    )
    proxy.cut()
    await second
    assert len(participant.requests) == 1
    assert len(proxy.carried) == 3


async def test_a_participant_that_goes_back_waits_for_no_one_who_does_not_notice(
    network, monkeypatch
):
    monkeypatch.setattr(dial_order, "FIRST_RETURN_SECONDS", 0.2)
    monkeypatch.setattr(dial_order, "LONGEST_RETURN_SECONDS", 0.2)
    monkeypatch.setattr(uplink, "_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(uplink, "_LEAVE_SECONDS", 1.0)
    first = await network.listen()
    first_proxy, first_port = await network.start_proxy()
    first_proxy.cut(for_good=True)
    await network.listen()
    proxy, port = await network.start_proxy()
    await network.join("a", replying(), first_port, others=(f"127.0.0.1:{port}",))
    proxy.limits["up"] = 0  # the server still pings
    first_proxy.refusing = False
    async with asyncio.timeout(20):
        await wait_until(lambda: "a" in first.peers)
