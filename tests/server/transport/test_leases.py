"""Leases, pings and processes that come back on the link."""

import asyncio

import pytest
from tests.server.conftest import Guest
from tests.server.listeners import attached
from tests.server.work import answering, payload_of, train, waiting

from isthmus.errors import ParticipantLost
from isthmus.transport import backoff, uplink
from isthmus.transport.blobs import CHUNK_BYTES, describe, into
from isthmus.transport.uplink import Uplink
from isthmus.wire import link_pb2

LEASE = 2.0
"""Passes in real time, where the test is about the clock of the link itself."""
LONG = 99.0
"""Is over when the test says so."""


async def test_a_participant_with_a_broken_stream_is_lost_after_a_lease(net, clock):
    link = await net.listen(LONG)
    payload = payload_of(3 * CHUNK_BYTES)
    wire, port = await net.wire()
    guest = await net.join("a", answering(payload), port)
    listener = attached(link)
    reply = await link.ask("a", train(link))
    wire.limits["up"] = 0
    fetching = asyncio.create_task(
        link.fetch("a", reply.trained.result, into(bytearray(len(payload))))
    )
    guest.answer = waiting(answering(), asyncio.Event())
    asking = asyncio.create_task(link.ask("a", train(link)))
    await net.until(lambda: len(guest.asked) == 2)
    wire.cut(for_good=True)
    await clock.over(LONG)
    for pending in (asking, fetching):
        with pytest.raises(ParticipantLost, match=r"^lost: silent for longer than the lease of 99"):
            await pending
    await net.until(lambda: listener.left_reasons)
    assert listener.left_reasons == [("a", "lost: silent for longer than the lease of 99 s")]
    assert link.peers == {}


async def test_a_participant_that_is_connected_and_silent_is_lost(net):
    link = await net.listen(LEASE)
    async with net.raw() as (_, _, receive):
        await receive("welcome")
        asking = asyncio.create_task(link.ask("raw", train(link)))
        await receive("request")
        with pytest.raises(ParticipantLost, match="silent for longer than the lease"):
            await asking


async def test_pings_keep_both_sides_alive(net):
    link = await net.listen(LEASE)
    released = asyncio.Event()
    listener = attached(link)
    guest = await net.join("a", waiting(answering(), released))
    peer = link.peers["a"]
    stream = peer.stream
    asking = asyncio.create_task(link.ask("a", train(link)))
    asyncio.get_running_loop().call_later(2 * LEASE, released.set)
    await asking
    assert listener.left_reasons == []
    assert peer.stream is stream
    assert len(guest.asked) == 1


async def test_a_participant_reconnects_to_a_silent_server(net):
    link = await net.listen(LEASE)
    wire, port = await net.wire()
    await net.join("a", answering(), port)
    await link.ask("a", train(link))  # it has had its welcome
    wire.limits["down"] = 0
    await net.until(lambda: len(wire.carried) >= 2)
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


async def test_a_participant_reconnects_to_a_server_that_never_replied(net, monkeypatch):
    monkeypatch.setattr(uplink, "_WELCOME_SECONDS", LEASE)
    link = await net.listen(LEASE)
    wire, port = await net.wire()
    wire.next["down"] = 20  # less than what gRPC wants to hear first
    await net.join("a", answering(), port)
    assert len(wire.carried) >= 2
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


async def test_a_participant_reconnects_at_once_after_each_of_many_breaks(net, monkeypatch):
    monkeypatch.setattr(backoff, "STABLE_SECONDS", 0.0)
    link = await net.listen()
    wire, port = await net.wire()
    guest = Guest(answering())
    dialling = Uplink(f"127.0.0.1:{port}", "a", link_pb2.CLIENT, guest, longest_pause=60.0)
    net.guests.append(asyncio.create_task(dialling.run()))
    for breaks in range(12):
        await net.until(lambda breaks=breaks: len(wire.carried) > breaks and "a" in link.peers)
        assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"
        wire.cut()


async def test_a_participant_restarted_as_a_new_process_has_lost_its_work(net):
    link = await net.listen()
    guest = await net.join("a", waiting(answering(), asyncio.Event()))
    listener = attached(link)
    asking = asyncio.create_task(link.ask("a", train(link)))
    await net.until(lambda: guest.asked)
    await guest.leave()
    await net.until(lambda: link.peers["a"].stream is None)
    await net.join("a", answering(examples=5))
    with pytest.raises(ParticipantLost, match=r"^lost: its process ended, and a new one has come"):
        await asking
    await net.until(lambda: listener.joined_instances)
    assert len(listener.left_reasons) == len(listener.joined_instances) == 1
    assert (await link.ask("a", train(link))).trained.examples == 5


async def test_a_repeated_reply_is_used_once(net):
    # As when a participant finishes just while the server, after a break, asks again.
    link = await net.listen()
    async with net.raw() as (_, send, receive):
        await receive("welcome")
        request = train(link)
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


async def test_an_abandoned_download_does_not_disturb_the_next(net):
    link = await net.listen()
    payload = payload_of(5 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    wire, port = await net.wire()
    wire.next["down"] = CHUNK_BYTES // 2
    guest = await net.join("a", answering(), port)
    first = asyncio.create_task(link.ask("a", train(link, blob)))
    await wire.stalled.wait()
    await net.until(lambda: guest.buffers)
    wire.cut(for_good=True)
    await net.until(lambda: link.peers["a"].stream is None)
    first.cancel()
    wire.next["down"] = 5 * CHUNK_BYTES // 2
    wire.stalled.clear()
    wire.refusing = False
    second = asyncio.create_task(link.ask("a", train(link, blob)))
    await wire.stalled.wait()
    await net.until(lambda: guest.buffers[-1][: 2 * CHUNK_BYTES] == payload[: 2 * CHUNK_BYTES])
    wire.cut()
    await second
    assert len(guest.asked) == 1
    assert len(wire.carried) == 3
