"""The link when streams break or stall, and when requests are abandoned during a transfer."""

import asyncio
import threading

import pytest
from tests.server.listeners import attached
from tests.server.scripted_participant import (
    delayed,
    pattern,
    payload_of,
    replying,
    training_request,
)
from tests.server.waiting import wait_until

from isthmus.transport.blobs import CHUNK_BYTES, Assembly, Piece, describe, into
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2
from isthmus_server.transport import limits, peer

LEASE = 2.0
"""Seconds of real time, in tests of the link's own clock."""
LONG = 99.0
"""Seconds of simulated time, which the test advances."""


class HeldWrite:
    """A destination of received bytes that blocks its thread until it is released."""

    def __init__(self):
        self.begun, self.released = asyncio.Event(), threading.Event()
        self.written = []
        self._loop = asyncio.get_running_loop()

    def __call__(self, offset, data):
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.released.wait(100)
        self.written.append(offset)


async def test_an_aborted_stream_ends_even_if_grpc_reports_an_error(network, monkeypatch):
    received = Stream.receive

    async def swallowing(*arguments, **named):
        try:
            return await received(*arguments, **named)
        except asyncio.CancelledError:
            raise asyncio.InvalidStateError("the call is over") from None

    monkeypatch.setattr(Stream, "receive", swallowing)
    await network.listen()
    participant = await network.join("a", replying(examples=1))
    participant.connection.cancel()
    await asyncio.wait([participant.connection])
    assert participant.connection.cancelled()


async def test_a_participant_that_does_not_read_does_not_delay_others(network, monkeypatch):
    monkeypatch.setattr(limits, "ABORT_SECONDS", 0.1)
    link = await network.listen()
    async with network.raw_stream(options=[("grpc.http2.lookahead_bytes", 0)]) as (
        _,
        send,
        receive,
    ):
        await receive("welcome")
        stream = link.peers["raw"].stream
        asked = training_request(link)
        asked.train_local.secure = bytes(2 << 20)
        asking = asyncio.create_task(link.ask("raw", asked))
        await wait_until(stream._sending.locked)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=100)
        assert done
        await send(progress=link_pb2.Progress())
        link.disconnect("raw", "revoked")
        await wait_until(lambda: not link._streams)  # it is not waited for either


async def test_an_interrupted_model_transfer_resumes_at_its_chunk(network):
    link = await network.listen()
    payload = payload_of(5 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    proxy, port = await network.start_proxy()
    proxy.next_limits["down"] = 5 * CHUNK_BYTES // 2
    participant = await network.join("a", replying(), port)
    asking = asyncio.create_task(link.ask("a", training_request(link, blob)))
    await proxy.stalled.wait()
    arrived = 2 * CHUNK_BYTES
    await wait_until(lambda: participant.buffers[0][:arrived] == payload[:arrived])
    proxy.cut()
    reply = await asking
    assert reply.WhichOneof("outcome") == "trained"
    assert participant.buffers == [payload]
    assert len(participant.requests) == 1
    assert proxy.carried[1]["down"] < 3.5 * CHUNK_BYTES


async def test_an_interrupted_result_transfer_resumes_at_its_chunk(network):
    link = await network.listen()
    payload = payload_of(5 * CHUNK_BYTES)
    proxy, port = await network.start_proxy()
    proxy.next_limits["up"] = 5 * CHUNK_BYTES // 2
    participant = await network.join("a", replying(payload), port)
    reply = await link.ask("a", training_request(link))
    back = bytearray(len(payload))
    fetching = asyncio.create_task(link.fetch("a", reply.trained.result, into(back)))
    await proxy.stalled.wait()
    await wait_until(lambda: link.peers["a"].received.total >= 2 * CHUNK_BYTES)
    proxy.cut()
    await fetching
    assert back == payload
    assert len(participant.requests) == 1
    assert proxy.carried[1]["up"] < 3.5 * CHUNK_BYTES


async def test_nothing_is_written_after_a_fetch_has_ended(network, monkeypatch):
    monkeypatch.setattr(peer, "THREAD_CHUNK_BYTES", 1)
    link = await network.listen()
    payload = payload_of(3 * CHUNK_BYTES)
    await network.join("a", replying(payload))
    reply = await link.ask("a", training_request(link))
    held = HeldWrite()
    fetching = asyncio.create_task(link.fetch("a", reply.trained.result, held))
    await held.begun.wait()
    fetching.cancel()
    done, _ = await asyncio.wait([fetching], timeout=0.05)
    assert not done
    held.released.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert held.written == [0]


async def test_a_blob_is_not_sent_further_after_its_acknowledgement(network, monkeypatch):
    monkeypatch.setattr(peer, "THREAD_CHUNK_BYTES", 1)
    link = await network.listen()
    payload = pattern(64 * CHUNK_BYTES)  # more than is ever on its way at once
    participant = await network.join("a", replying(payload))
    reply = await link.ask("a", training_request(link))
    held = HeldWrite()
    fetching = asyncio.create_task(link.fetch("a", reply.trained.result, held))
    await held.begun.wait()
    link.acknowledge("a", reply.id, True)
    await wait_until(lambda: participant.receipts)
    held.released.set()
    for _ in range(64):  # replies and chunks take turns
        asked = training_request(link)
        await link.ask("a", asked)
        link.acknowledge("a", asked.id, True)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    assert 0 < len(held.written) < 32


async def test_work_continues_while_the_stream_is_broken_and_runs_once(network):
    link = await network.listen()
    released = asyncio.Event()
    proxy, port = await network.start_proxy()
    participant = await network.join("a", delayed(replying(examples=3), released), port)
    listener = attached(link)
    asking = asyncio.create_task(link.ask("a", training_request(link)))
    await wait_until(lambda: participant.requests)
    proxy.cut(for_good=True)
    await wait_until(lambda: link.peers["a"].stream is None)
    released.set()
    proxy.refusing = False
    reply = await asking
    assert reply.trained.examples == 3
    assert len(participant.requests) == 1
    assert listener.left_reasons == []


async def test_a_participant_without_a_stream_for_a_lease_drops_its_requests(network, timeouts):
    link = await network.listen(LONG)
    proxy, port = await network.start_proxy()
    participant = await network.join("a", replying(b"result"), port)
    await link.ask("a", training_request(link))  # never acknowledged
    proxy.cut(for_good=True)
    await timeouts.expire(LONG)
    assert "a" not in link.peers
    proxy.refusing = False
    await wait_until(lambda: participant.receipts)
    assert participant.receipts == [
        (False, "the server did not hear of this participant for too long")
    ]
    assert (await link.ask("a", training_request(link))).WhichOneof("outcome") == "trained"


async def test_a_restarted_server_gets_replies_to_its_own_requests_only(network):
    link = await network.listen()
    released = asyncio.Event()
    proxy, port = await network.start_proxy()
    participant = await network.join("a", replying(examples=3), port)
    done = training_request(link)
    await link.ask("a", done)  # never acknowledged
    participant.respond = delayed(replying(examples=4), released)
    running = training_request(link)
    asking = asyncio.create_task(link.ask("a", running))
    await wait_until(lambda: len(participant.requests) == 2)
    proxy.cut(for_good=True)
    asking.cancel()
    await link.stop()

    again = await network.listen()
    proxy.target = network.port
    proxy.refusing = False
    await wait_until(lambda: "a" in again.peers)
    await wait_until(lambda: participant.cancelled == participant.requests[1:])
    assert participant.receipts == [(False, "the server was started anew")]
    released.set()
    await wait_until(lambda: len(participant.receipts) == 2)
    participant.respond = replying(examples=5)
    for request in (training_request(again), training_request(again)):
        assert request.id not in (done.id, running.id)
        assert (await again.ask("a", request)).trained.examples == 5
    assert len(participant.requests) == 4


async def test_a_request_made_while_the_stream_is_broken_is_sent_on_the_next_stream(network):
    link = await network.listen()
    proxy, port = await network.start_proxy()
    participant = await network.join("a", replying(b"result"), port)
    await link.ask("a", training_request(link))
    proxy.cut(for_good=True)
    await wait_until(lambda: link.peers["a"].stream is None)
    asking = asyncio.create_task(link.ask("a", training_request(link)))
    back = bytearray(6)
    fetching = asyncio.create_task(link.fetch("a", describe(b"result"), into(back)))
    proxy.refusing = False
    await asking
    await fetching
    assert back == b"result"
    assert len(participant.requests) == 2


@pytest.mark.parametrize("break_", ["while it is told", "before it is told"])
async def test_a_receipt_is_delivered_across_a_broken_stream_exactly_once(network, break_):
    link = await network.listen(60.0)
    proxy, port = await network.start_proxy()
    participant = await network.join("a", replying(b"result"), port)
    requests = [training_request(link) for _ in range(3)]
    for request in requests:
        await link.ask("a", request)
    if break_ == "before it is told":
        proxy.cut(for_good=True)
        await wait_until(lambda: link.peers["a"].stream is None)
    else:
        proxy.limits["down"] = proxy.carried[0]["down"] + 10  # and then they are swallowed
    link.acknowledge("a", requests[0].id, True)
    link.acknowledge("a", requests[1].id, False, "out of step")
    if break_ == "while it is told":
        await proxy.stalled.wait()
    assert participant.receipts == []
    proxy.cut()
    await wait_until(lambda: len(participant.receipts) == 2)
    proxy.cut()
    link.acknowledge("a", requests[2].id, True)
    await wait_until(lambda: len(participant.receipts) == 3)
    assert participant.receipts == [(True, ""), (False, "out of step"), (True, "")]
    assert (await link.ask("a", training_request(link))).WhichOneof("outcome") == "trained"


@pytest.mark.parametrize("done", [False, True], ids=["waits for its model", "has replied"])
async def test_a_request_cancelled_while_the_stream_is_broken_is_released(network, done):
    link = await network.listen(60.0)
    payload = payload_of(2 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    released = asyncio.Event()
    proxy, port = await network.start_proxy()
    if not done:
        proxy.next_limits["down"] = CHUNK_BYTES
    participant = await network.join("a", delayed(replying(b"result"), released), port)
    asking = asyncio.create_task(link.ask("a", training_request(link, blob)))
    await wait_until(lambda: participant.requests if done else participant.buffers)
    proxy.cut(for_good=True)
    await wait_until(lambda: link.peers["a"].stream is None)
    released.set()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    proxy.refusing = False
    await wait_until(lambda: participant.receipts)  # whatever it took for the request can go
    assert len(participant.requests) == done
    assert (await link.ask("a", training_request(link))).WhichOneof("outcome") == "trained"


async def test_a_small_chunk_is_written_without_a_task_of_its_own():
    payload = bytes(1000)
    done = asyncio.get_running_loop().create_future()
    fetch = peer.Fetch(Assembly(describe(payload), lambda *_: None), done)
    adding = fetch.add(Piece(fetch.assembly.blob.sha256, 0, memoryview(payload)))
    with pytest.raises(StopIteration):  # its first step is the last
        adding.send(None)
    assert done.done()
