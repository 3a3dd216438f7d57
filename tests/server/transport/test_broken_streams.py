"""The link when streams break, stall, or what is on its way is not wanted any more."""

import asyncio
import threading

import pytest
from tests.server.listeners import attached
from tests.server.work import answering, pattern, payload_of, train, waiting

from isthmus.transport.blobs import CHUNK_BYTES, describe, into
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2
from isthmus_server.transport import limits, peer

LEASE = 2.0
"""Passes in real time, where the test is about the clock of the link itself."""
LONG = 99.0
"""Is over when the test says so."""


class HeldWrite:
    """Where arriving bytes go, in a thread that is kept there until it is released."""

    def __init__(self):
        self.begun, self.released = asyncio.Event(), threading.Event()
        self.written = []
        self._loop = asyncio.get_running_loop()

    def __call__(self, offset, data):
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.released.wait(100)
        self.written.append(offset)


async def test_an_aborted_stream_ends_even_if_grpc_reports_an_error(net, monkeypatch):
    received = Stream.receive

    async def swallowing(*arguments, **named):
        try:
            return await received(*arguments, **named)
        except asyncio.CancelledError:
            raise asyncio.InvalidStateError("the call is over") from None

    monkeypatch.setattr(Stream, "receive", swallowing)
    await net.listen()
    guest = await net.join("a", answering(examples=1))
    guest.link.cancel()
    await asyncio.wait([guest.link])
    assert guest.link.cancelled()


async def test_a_participant_that_does_not_read_does_not_delay_others(net, monkeypatch):
    monkeypatch.setattr(limits, "ABORT_SECONDS", 0.1)
    link = await net.listen()
    async with net.raw(options=[("grpc.http2.lookahead_bytes", 0)]) as (_, send, receive):
        await receive("welcome")
        stream = link.peers["raw"].stream
        asked = train(link)
        asked.train_local.secure = bytes(2 << 20)
        asking = asyncio.create_task(link.ask("raw", asked))
        await net.until(stream._sending.locked)
        asking.cancel()
        done, _ = await asyncio.wait([asking], timeout=100)
        assert done
        await send(progress=link_pb2.Progress())
        link.disconnect("raw", "revoked")
        await net.until(lambda: not link._streams)  # it is not waited for either


async def test_an_interrupted_model_transfer_resumes_at_its_chunk(net):
    link = await net.listen()
    payload = payload_of(5 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    wire, port = await net.wire()
    wire.next["down"] = 5 * CHUNK_BYTES // 2
    guest = await net.join("a", answering(), port)
    asking = asyncio.create_task(link.ask("a", train(link, blob)))
    await wire.stalled.wait()
    arrived = 2 * CHUNK_BYTES
    await net.until(lambda: guest.buffers[0][:arrived] == payload[:arrived])
    wire.cut()
    reply = await asking
    assert reply.WhichOneof("outcome") == "trained"
    assert guest.buffers == [payload]
    assert len(guest.asked) == 1
    assert wire.carried[1]["down"] < 3.5 * CHUNK_BYTES


async def test_an_interrupted_result_transfer_resumes_at_its_chunk(net):
    link = await net.listen()
    payload = payload_of(5 * CHUNK_BYTES)
    wire, port = await net.wire()
    wire.next["up"] = 5 * CHUNK_BYTES // 2
    guest = await net.join("a", answering(payload), port)
    reply = await link.ask("a", train(link))
    back = bytearray(len(payload))
    fetching = asyncio.create_task(link.fetch("a", reply.trained.result, into(back)))
    await wire.stalled.wait()
    await net.until(lambda: link.peers["a"].bytes_in >= 2 * CHUNK_BYTES)
    wire.cut()
    await fetching
    assert back == payload
    assert len(guest.asked) == 1
    assert wire.carried[1]["up"] < 3.5 * CHUNK_BYTES


async def test_nothing_is_written_after_a_fetch_has_ended(net, monkeypatch):
    monkeypatch.setattr(peer, "THREAD_CHUNK_BYTES", 1)
    link = await net.listen()
    payload = payload_of(3 * CHUNK_BYTES)
    await net.join("a", answering(payload))
    reply = await link.ask("a", train(link))
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


async def test_a_blob_is_not_sent_further_after_its_acknowledgement(net, monkeypatch):
    monkeypatch.setattr(peer, "THREAD_CHUNK_BYTES", 1)
    link = await net.listen()
    payload = pattern(64 * CHUNK_BYTES)  # more than is ever on its way at once
    guest = await net.join("a", answering(payload))
    reply = await link.ask("a", train(link))
    held = HeldWrite()
    fetching = asyncio.create_task(link.fetch("a", reply.trained.result, held))
    await held.begun.wait()
    link.acknowledge("a", reply.id, True)
    await net.until(lambda: guest.receipts)
    held.released.set()
    for _ in range(64):  # replies and chunks take turns
        asked = train(link)
        await link.ask("a", asked)
        link.acknowledge("a", asked.id, True)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    assert 0 < len(held.written) < 32


async def test_work_continues_while_the_stream_is_broken_and_runs_once(net):
    link = await net.listen()
    released = asyncio.Event()
    wire, port = await net.wire()
    guest = await net.join("a", waiting(answering(examples=3), released), port)
    listener = attached(link)
    asking = asyncio.create_task(link.ask("a", train(link)))
    await net.until(lambda: guest.asked)
    wire.cut(for_good=True)
    await net.until(lambda: link.peers["a"].stream is None)
    released.set()
    wire.refusing = False
    reply = await asking
    assert reply.trained.examples == 3
    assert len(guest.asked) == 1
    assert listener.left_reasons == []


async def test_a_participant_without_a_stream_for_a_lease_drops_its_requests(net, clock):
    link = await net.listen(LONG)
    wire, port = await net.wire()
    guest = await net.join("a", answering(b"result"), port)
    await link.ask("a", train(link))  # never acknowledged
    wire.cut(for_good=True)
    await clock.over(LONG)
    assert "a" not in link.peers
    wire.refusing = False
    await net.until(lambda: guest.receipts)
    assert guest.receipts == [(False, "the server did not hear of this participant for too long")]
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


async def test_a_restarted_server_gets_replies_to_its_own_requests_only(net):
    link = await net.listen()
    released = asyncio.Event()
    wire, port = await net.wire()
    guest = await net.join("a", answering(examples=3), port)
    done = train(link)
    await link.ask("a", done)  # never acknowledged
    guest.answer = waiting(answering(examples=4), released)
    running = train(link)
    asking = asyncio.create_task(link.ask("a", running))
    await net.until(lambda: len(guest.asked) == 2)
    wire.cut(for_good=True)
    asking.cancel()
    await link.stop()

    again = await net.listen()
    wire.target = net.port
    wire.refusing = False
    await net.until(lambda: "a" in again.peers)
    await net.until(lambda: guest.cancelled == [running.id])
    assert guest.receipts == [(False, "the server was started anew")]
    released.set()
    await net.until(lambda: len(guest.receipts) == 2)
    guest.answer = answering(examples=5)
    for request in (train(again), train(again)):
        assert request.id not in (done.id, running.id)
        assert (await again.ask("a", request)).trained.examples == 5
    assert len(guest.asked) == 4


async def test_a_request_made_while_the_stream_is_broken_is_sent_on_the_next_stream(net):
    link = await net.listen()
    wire, port = await net.wire()
    guest = await net.join("a", answering(b"result"), port)
    await link.ask("a", train(link))
    wire.cut(for_good=True)
    await net.until(lambda: link.peers["a"].stream is None)
    asking = asyncio.create_task(link.ask("a", train(link)))
    back = bytearray(6)
    fetching = asyncio.create_task(link.fetch("a", describe(b"result"), into(back)))
    wire.refusing = False
    await asking
    await fetching
    assert back == b"result"
    assert len(guest.asked) == 2


@pytest.mark.parametrize("break_", ["while it is told", "before it is told"])
async def test_a_receipt_is_delivered_across_a_broken_stream_exactly_once(net, break_):
    link = await net.listen(60.0)
    wire, port = await net.wire()
    guest = await net.join("a", answering(b"result"), port)
    requests = [train(link) for _ in range(3)]
    for request in requests:
        await link.ask("a", request)
    if break_ == "before it is told":
        wire.cut(for_good=True)
        await net.until(lambda: link.peers["a"].stream is None)
    else:
        wire.limits["down"] = wire.carried[0]["down"] + 10  # and then they are swallowed
    link.acknowledge("a", requests[0].id, True)
    link.acknowledge("a", requests[1].id, False, "out of step")
    if break_ == "while it is told":
        await wire.stalled.wait()
    assert guest.receipts == []
    wire.cut()
    await net.until(lambda: len(guest.receipts) == 2)
    wire.cut()
    link.acknowledge("a", requests[2].id, True)
    await net.until(lambda: len(guest.receipts) == 3)
    assert guest.receipts == [(True, ""), (False, "out of step"), (True, "")]
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


@pytest.mark.parametrize("done", [False, True], ids=["waits for its model", "has replied"])
async def test_a_request_cancelled_while_the_stream_is_broken_is_released(net, done):
    link = await net.listen(60.0)
    payload = payload_of(2 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    released = asyncio.Event()
    wire, port = await net.wire()
    if not done:
        wire.next["down"] = CHUNK_BYTES
    guest = await net.join("a", waiting(answering(b"result"), released), port)
    asking = asyncio.create_task(link.ask("a", train(link, blob)))
    await net.until(lambda: guest.asked if done else guest.buffers)
    wire.cut(for_good=True)
    await net.until(lambda: link.peers["a"].stream is None)
    released.set()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    wire.refusing = False
    await net.until(lambda: guest.receipts)  # whatever it took for the request can go
    assert len(guest.asked) == done
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"
