import asyncio
import threading

import grpc
import grpc.aio
import pytest

from isthmus import uplink
from isthmus.contents import CHUNK_BYTES, describe, into
from isthmus.errors import ParticipantLost, Refused, TaskError, UpdateError, UserError
from isthmus.uplink import METHOD
from isthmus.wire import link_pb2
from isthmus_server import peers
from isthmus_server.callers import ANSWERS, MAX_FROM_PARTICIPANT, PUMPS_EACH
from isthmus_server.link import Link

LEASE = 0.3


def pattern(size):
    """Bytes without a zero, different in every chunk."""
    return bytearray(1 + (i + i // CHUNK_BYTES) % 251 for i in range(min(size, 1 << 12))) * (
        -(-size // (1 << 12))
    )


def payload_of(size):
    payload = pattern(size)[:size]
    for start in range(0, size, CHUNK_BYTES):
        payload[start] = 1 + start // CHUNK_BYTES
    return payload


def train(link, model=None):
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, model=model)
    return link_pb2.Request(id=link.new_id(), train_local=work)


def answering(payload=b"", examples=1):
    """Work that is done at once, with a result."""

    async def work(guest, request, model):
        trained = link_pb2.Trained(result=describe(payload), examples=examples)
        return link_pb2.Reply(trained=trained), payload

    return work


def waiting(work, event):
    async def wait(guest, request, model):
        await event.wait()
        return await work(guest, request, model)

    return wait


# -- asking --------------------------------------------------------------------------------------


async def test_a_request_gets_its_reply(net):
    link = await net.listen()
    guest = await net.join("a", answering(examples=7))
    request = train(link)
    reply = await link.ask("a", request)
    assert reply.id == request.id
    assert reply.trained.examples == 7
    assert guest.asked == [request]


async def test_many_requests_are_told_apart(net):
    link = await net.listen()

    async def echo(guest, request, model):
        return link_pb2.Reply(trained=link_pb2.Trained(examples=request.train_local.round)), None

    for name in "abc":
        await net.join(name, echo)
    requests = [train(link) for _ in range(30)]
    for number, request in enumerate(requests):
        request.train_local.round = number
    asked = [link.ask("abc"[n % 3], request) for n, request in enumerate(requests)]
    replies = await asyncio.gather(*asked)
    assert [reply.trained.examples for reply in replies] == list(range(30))


async def test_asking_somebody_who_is_not_here(net):
    link = await net.listen()
    with pytest.raises(ParticipantLost, match=r"^nobody is not connected$"):
        await link.ask("nobody", train(link))
    with pytest.raises(ParticipantLost, match=r"^nobody is not connected$"):
        await link.fetch("nobody", describe(b"x"), into(bytearray(1)))
    link.settle("nobody", "r1", True)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (TaskError("loss() failed at task.py:3"), "loss() failed at task.py:3"),
        (KeyError("x"), "internal error: KeyError: 'x'"),
    ],
)
async def test_an_error_of_the_worker_is_a_reply(net, error, sentence):
    link = await net.listen()

    async def work(guest, request, model):
        raise error

    await net.join("a", work)
    reply = await link.ask("a", train(link))
    assert reply.failure.reason == sentence


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UpdateError("5 bytes are too many"), "5 bytes are too many"),
        (OSError(28, "disk full"), "no room for its model: OSError(28, 'disk full')"),
        (MemoryError(), "no room for its model: MemoryError()"),
    ],
)
async def test_a_model_the_worker_has_no_room_for_is_a_failure(net, error, sentence):
    link = await net.listen()
    guest = await net.join("a", answering())

    def refuse(request, size):
        raise error

    guest.buffer = refuse
    reply = await link.ask("a", train(link, describe(b"model")))
    assert reply.failure.reason == sentence
    assert guest.asked == []
    assert not guest.link.done()


async def test_an_ask_that_is_given_up_tells_the_participant_and_refuses_its_late_reply(net):
    link = await net.listen()
    released = asyncio.Event()
    guest = await net.join("a", waiting(answering(), released))
    request = train(link)
    asking = asyncio.create_task(link.ask("a", request))
    await net.until(lambda: guest.asked)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await net.until(lambda: guest.cancelled == [request.id])
    released.set()
    await net.until(lambda: guest.receipts)
    assert guest.receipts == [(False, "too late: nobody waits for it")]


async def test_progress_arrives(net):
    link = await net.listen()
    seen = []
    link.on_progress = lambda name, progress: seen.append((name, progress.steps, progress.loss))

    async def work(guest, request, model):
        for step in range(1, 100):
            await asyncio.to_thread(guest.progress, link_pb2.Progress(steps=step, loss=0.5))
        return link_pb2.Reply(trained=link_pb2.Trained()), None

    await net.join("a", work)
    await link.ask("a", train(link))
    await net.until(lambda: seen)
    assert seen[0] == ("a", 1, 0.5)  # the others came too soon after it


# -- contents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 1])
async def test_contents_cross_in_both_directions(net, size):
    link = await net.listen()
    payload = payload_of(size)

    async def reverse(guest, request, model):
        result = bytearray(reversed(model or b""))
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    guest = await net.join("a", reverse)
    content = describe(payload)
    link.publish(content, payload)
    request = train(link, content)
    reply = await link.ask("a", request)
    assert [bytes(buffer) for buffer in guest.buffers] == ([bytes(payload)] if size else [])
    back = bytearray(reply.trained.result.size)
    await link.fetch("a", reply.trained.result, into(back))
    assert back == bytes(reversed(payload))
    link.settle("a", request.id, True)
    await net.until(lambda: guest.receipts == [(True, "")])


async def test_one_content_goes_to_many(net):
    link = await net.listen()
    payload = payload_of(2 * CHUNK_BYTES)
    content = describe(payload)
    link.publish(content, payload)
    guests = [await net.join(name, answering()) for name in "abcd"]
    await asyncio.gather(*(link.ask(name, train(link, content)) for name in "abcd"))
    assert all(guest.buffers == [payload] for guest in guests)


async def test_a_content_the_server_does_not_hold_is_a_failure(net):
    link = await net.listen()
    payload = bytearray(b"model")
    await net.join("a", answering())
    link.publish(describe(payload), payload)
    link.retract(describe(payload))
    reply = await link.ask("a", train(link, describe(payload)))
    assert reply.failure.reason == "the server does not hold the model any more"


async def test_who_waits_for_the_rest_of_a_retracted_content_is_told(net):
    link = await net.listen()
    payload = bytearray(64 * CHUNK_BYTES)  # more than is ever on its way at once
    content = describe(payload)
    link.publish(content, payload)
    async with net.raw() as (_, send, receive):
        await send(want=link_pb2.Want(sha256=content.sha256))
        assert (await receive("chunk")).data
        link.retract(content)
        arrived = CHUNK_BYTES
        async with asyncio.timeout(5):
            while not (chunk := await receive("chunk")).absent:
                arrived += len(chunk.data)
        assert arrived < len(payload)
        assert not link.peers["raw"].given


async def test_a_content_the_participant_does_not_hold_is_refused(net):
    link = await net.listen()
    await net.join("a", answering(b"held"))
    await link.ask("a", train(link))
    with pytest.raises(UpdateError, match=r"^a does not hold the content it named$"):
        await link.fetch("a", describe(b"other"), into(bytearray(5)))


async def test_a_content_that_is_not_what_was_named_is_refused(net):
    link = await net.listen()

    async def lie(guest, request, model):
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(b"named"))), b"other"

    await net.join("a", lie)
    reply = await link.ask("a", train(link))
    with pytest.raises(UpdateError, match=r"does not match its SHA-256"):
        await link.fetch("a", reply.trained.result, into(bytearray(5)))


# -- breaks --------------------------------------------------------------------------------------


async def test_a_model_that_was_cut_off_on_its_way_goes_on_at_its_chunk(net):
    link = await net.listen()
    payload = payload_of(5 * CHUNK_BYTES)
    content = describe(payload)
    link.publish(content, payload)
    wire, port = await net.wire()
    wire.next["down"] = 5 * CHUNK_BYTES // 2
    guest = await net.join("a", answering(), port)
    asking = asyncio.create_task(link.ask("a", train(link, content)))
    await wire.stalled.wait()
    arrived = 2 * CHUNK_BYTES
    await net.until(lambda: guest.buffers[0][:arrived] == payload[:arrived])
    wire.cut()
    reply = await asking
    assert reply.WhichOneof("outcome") == "trained"
    assert guest.buffers == [payload]
    assert len(guest.asked) == 1
    assert wire.carried[1]["down"] < 3.5 * CHUNK_BYTES


async def test_a_result_that_was_cut_off_on_its_way_goes_on_at_its_chunk(net):
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
    monkeypatch.setattr(peers, "IN_A_THREAD", 1)
    link = await net.listen()
    payload = payload_of(3 * CHUNK_BYTES)
    await net.join("a", answering(payload))
    reply = await link.ask("a", train(link))
    writing, released, written = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def write(offset, data):
        loop.call_soon_threadsafe(writing.set)
        assert released.wait(10)
        written.append(offset)

    fetching = asyncio.create_task(link.fetch("a", reply.trained.result, write))
    await writing.wait()
    fetching.cancel()
    done, _ = await asyncio.wait([fetching], timeout=0.05)
    assert not done
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert written == [0]


async def test_a_content_is_not_sent_on_after_it_was_settled(net, monkeypatch):
    monkeypatch.setattr(peers, "IN_A_THREAD", 1)
    link = await net.listen()
    payload = pattern(64 * CHUNK_BYTES)  # more than is ever on its way at once
    guest = await net.join("a", answering(payload))
    reply = await link.ask("a", train(link))
    writing, released, written = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def write(offset, data):
        loop.call_soon_threadsafe(writing.set)
        assert released.wait(10)
        written.append(offset)

    fetching = asyncio.create_task(link.fetch("a", reply.trained.result, write))
    await writing.wait()
    link.settle("a", reply.id, True)
    await net.until(lambda: guest.receipts)
    released.set()
    for _ in range(64):  # replies and chunks take turns
        asked = train(link)
        await link.ask("a", asked)
        link.settle("a", asked.id, True)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    assert 0 < len(written) < 32


async def test_work_goes_on_while_the_stream_is_broken_and_is_done_once(net):
    link = await net.listen()
    released = asyncio.Event()
    wire, port = await net.wire()
    guest = await net.join("a", waiting(answering(examples=3), released), port)
    left = []
    link.on_leave = lambda peer, reason: left.append(reason)
    asking = asyncio.create_task(link.ask("a", train(link)))
    await net.until(lambda: guest.asked)
    wire.cut(for_good=True)
    await net.until(lambda: link.peers["a"].stream is None)
    released.set()
    wire.refusing = False
    reply = await asking
    assert reply.trained.examples == 3
    assert len(guest.asked) == 1
    assert left == []


async def test_who_was_away_for_longer_than_a_lease_holds_on_to_nothing(net):
    link = await net.listen(LEASE)
    wire, port = await net.wire()
    guest = await net.join("a", answering(b"result"), port)
    await link.ask("a", train(link))  # never settled
    wire.cut(for_good=True)
    await net.until(lambda: "a" not in link.peers)
    wire.refusing = False
    await net.until(lambda: guest.receipts)
    assert guest.receipts == [(False, "the server did not hear of this participant for too long")]
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


async def test_a_server_that_was_started_anew_gets_answers_to_its_own_requests_only(net):
    link = await net.listen()
    released = asyncio.Event()
    wire, port = await net.wire()
    guest = await net.join("a", answering(examples=3), port)
    done = train(link)
    await link.ask("a", done)  # never settled
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


async def test_a_request_made_while_the_stream_is_broken_is_asked_when_it_is_back(net):
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
async def test_what_became_of_a_reply_is_told_across_a_break_and_counts_once(net, break_):
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
    link.settle("a", requests[0].id, True)
    link.settle("a", requests[1].id, False, "out of step")
    if break_ == "while it is told":
        await wire.stalled.wait()
    assert guest.receipts == []
    wire.cut()
    await net.until(lambda: len(guest.receipts) == 2)
    wire.cut()
    link.settle("a", requests[2].id, True)
    await net.until(lambda: len(guest.receipts) == 3)
    assert guest.receipts == [(True, ""), (False, "out of step"), (True, "")]
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


@pytest.mark.parametrize("done", [False, True], ids=["waits for its model", "has replied"])
async def test_what_is_cancelled_during_a_break_is_not_held_for_ever(net, done):
    link = await net.listen(60.0)
    payload = payload_of(2 * CHUNK_BYTES)
    content = describe(payload)
    link.publish(content, payload)
    released = asyncio.Event()
    wire, port = await net.wire()
    if not done:
        wire.next["down"] = CHUNK_BYTES
    guest = await net.join("a", waiting(answering(b"result"), released), port)
    asking = asyncio.create_task(link.ask("a", train(link, content)))
    await net.until(lambda: guest.asked if done else guest.buffers)
    wire.cut(for_good=True)
    await net.until(lambda: link.peers["a"].stream is None)
    released.set()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    wire.refusing = False
    await net.until(lambda: guest.receipts if done else guest.cancelled)
    assert len(guest.asked) == done
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


async def test_a_broken_stream_is_a_loss_after_a_lease(net):
    link = await net.listen(LEASE)
    payload = payload_of(3 * CHUNK_BYTES)
    wire, port = await net.wire()
    guest = await net.join("a", answering(payload), port)
    left = asyncio.Queue()
    link.on_leave = lambda peer, reason: left.put_nowait((peer.name, reason))
    reply = await link.ask("a", train(link))
    wire.limits["up"] = 0
    fetching = asyncio.create_task(
        link.fetch("a", reply.trained.result, into(bytearray(len(payload))))
    )
    guest.answer = waiting(answering(), asyncio.Event())
    asking = asyncio.create_task(link.ask("a", train(link)))
    await net.until(lambda: len(guest.asked) == 2)
    wire.cut(for_good=True)
    for pending in (asking, fetching):
        with pytest.raises(ParticipantLost, match=r"^lost: silent for longer than the lease of 0"):
            await pending
    assert await left.get() == ("a", "lost: silent for longer than the lease of 0.3 s")
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
    left = []
    link.on_leave = lambda peer, reason: left.append(reason)
    guest = await net.join("a", waiting(answering(), released))
    peer = link.peers["a"]
    stream = peer.stream
    asking = asyncio.create_task(link.ask("a", train(link)))
    asyncio.get_running_loop().call_later(4 * LEASE, released.set)
    await asking
    assert left == []
    assert peer.stream is stream
    assert len(guest.asked) == 1


async def test_a_server_that_is_silent_is_dialled_again(net):
    link = await net.listen(LEASE)
    wire, port = await net.wire()
    await net.join("a", answering(), port)
    await link.ask("a", train(link))  # it has had its welcome
    wire.limits["down"] = 0
    await net.until(lambda: len(wire.carried) >= 2)
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


async def test_a_server_that_is_silent_from_the_start_is_dialled_again(net, monkeypatch):
    monkeypatch.setattr(uplink, "_WELCOME_SECONDS", LEASE)
    link = await net.listen(LEASE)
    wire, port = await net.wire()
    wire.next["down"] = 20  # less than what gRPC wants to hear first
    await net.join("a", answering(), port)
    assert len(wire.carried) >= 2
    assert (await link.ask("a", train(link))).WhichOneof("outcome") == "trained"


async def test_a_participant_that_comes_back_as_a_new_process_has_lost_its_work(net):
    link = await net.listen()
    guest = await net.join("a", waiting(answering(), asyncio.Event()))
    joined, left = [], []
    link.on_join = lambda peer: joined.append(peer.instance)
    link.on_leave = lambda peer, reason: left.append(reason)
    asking = asyncio.create_task(link.ask("a", train(link)))
    await net.until(lambda: guest.asked)
    await guest.leave()
    await net.until(lambda: link.peers["a"].stream is None)
    await net.join("a", answering(examples=5))
    with pytest.raises(ParticipantLost, match=r"^lost: its process ended, and a new one has come"):
        await asking
    await net.until(lambda: joined)
    assert len(left) == len(joined) == 1
    assert (await link.ask("a", train(link))).trained.examples == 5


async def test_a_reply_that_comes_twice_is_used_once(net):
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
        want = await receive("want")
        await send(chunk=link_pb2.Chunk(sha256=want.sha256, data=b"x"))
        await fetching
        link.settle("raw", request.id, True)
        assert (await receive("receipt")).accepted
        await send(reply=reply)
        assert not (await receive("receipt")).accepted


async def test_a_download_nobody_wants_any_more_does_not_disturb_the_next(net):
    link = await net.listen()
    payload = payload_of(5 * CHUNK_BYTES)
    content = describe(payload)
    link.publish(content, payload)
    wire, port = await net.wire()
    wire.next["down"] = CHUNK_BYTES // 2
    guest = await net.join("a", answering(), port)
    first = asyncio.create_task(link.ask("a", train(link, content)))
    await wire.stalled.wait()
    await net.until(lambda: guest.buffers)
    wire.cut(for_good=True)
    await net.until(lambda: link.peers["a"].stream is None)
    first.cancel()
    wire.next["down"] = 5 * CHUNK_BYTES // 2
    wire.stalled.clear()
    wire.refusing = False
    second = asyncio.create_task(link.ask("a", train(link, content)))
    await wire.stalled.wait()
    await net.until(lambda: guest.buffers[-1][: 2 * CHUNK_BYTES] == payload[: 2 * CHUNK_BYTES])
    wire.cut()
    await second
    assert len(guest.asked) == 1
    assert len(wire.carried) == 3


# -- who may come in -----------------------------------------------------------------------------


async def test_a_name_is_taken_until_its_owner_is_gone(net):
    link = await net.listen()
    first = await net.join("a", answering(examples=1))
    async with net.raw(name="a", instance="another") as (call, _, _):
        code, sentence = await net.refusal(call)
        assert code == grpc.StatusCode.ABORTED
        assert sentence == "a participant named 'a' is connected"
    assert (await link.ask("a", train(link))).trained.examples == 1
    mine = link.peers["a"].instance
    second = await net.join("a", answering(examples=2))  # keeps trying
    await first.leave()
    await net.until(lambda: link.peers["a"].instance != mine)
    assert (await link.ask("a", train(link))).trained.examples == 2
    assert len(second.asked) == 1


async def test_another_version_of_the_link_is_refused_for_good(net, monkeypatch):
    await net.listen()
    monkeypatch.setattr(uplink, "VERSION", 9)
    monkeypatch.setattr(uplink, "OLDEST_VERSION", 8)
    with pytest.raises(Refused) as caught:
        await net.call(None, "a")
    assert str(caught.value) == (
        "the server refused 'a': link version 8 to 9 is spoken there and 1 to 2 here; "
        "upgrade the older side"
    )


async def test_a_newer_participant_that_still_speaks_our_version_is_welcome(net, monkeypatch):
    await net.listen()
    async with net.raw(version_max=3) as (_, _, receive):
        assert (await receive("welcome")).version == 2


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        ({"name": ""}, "a hello needs a name of 1 to 128 characters and an instance"),
        ({"name": "x" * 129}, "a hello needs a name of 1 to 128 characters and an instance"),
        ({"instance": ""}, "a hello needs a name of 1 to 128 characters and an instance"),
        ({"role": 0}, "role=0 is not one this server knows"),
        ({"role": 77}, "role=77 is not one this server knows"),
        ({"version_min": 2, "version_max": 1}, "link version 2 to 1 is spoken there and 1 to 2"),
    ],
)
async def test_a_hello_that_makes_no_sense_is_refused(net, hello, sentence):
    link = await net.listen()
    async with net.raw(**hello) as (call, _, _):
        code, told = await net.refusal(call)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert told.startswith(sentence)
    assert link.peers == {}


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (link_pb2.Envelope(ping=link_pb2.Ping()), "the first message must be a hello"),
        (link_pb2.Envelope(), "the first message must be a hello"),
        (None, "what came is not a message of this link"),
    ],
)
async def test_a_first_message_that_is_no_hello_is_refused(net, first, sentence):
    link = await net.listen()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{net.port}") as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"\xff\xff\xff" if first is None else first.SerializeToString())
        assert (await net.refusal(call))[1] == sentence
    assert link.peers == {}


async def test_noise_on_a_stream_ends_that_stream_and_no_other(net):
    link = await net.listen(LEASE)
    await net.join("a", answering(examples=4))
    async with net.raw() as (call, _, receive):
        await receive("welcome")
        await call.write(b"\xff\xff\xff")
        code, sentence = await net.refusal(call)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert sentence == "what came is not a message of this link"
        await net.until(lambda: "raw" not in link.peers)
    assert (await link.ask("a", train(link))).trained.examples == 4


async def test_chunks_and_replies_nobody_asked_for_are_passed_over(net):
    link = await net.listen()
    async with net.raw() as (_, send, receive):
        await receive("welcome")
        await send(chunk=link_pb2.Chunk(sha256=b"x" * 32, data=b"y" * 1000))
        await send(ping=link_pb2.Ping())
        await send(progress=link_pb2.Progress(id="r999"))
        await send(reply=link_pb2.Reply(id="r999"))
        assert (await receive("receipt")).id == "r999"
        assert link.peers["raw"].bytes_in == 0


@pytest.mark.parametrize(
    "body",
    [
        {"hello": link_pb2.Hello()},
        {"welcome": link_pb2.Welcome()},
        {"request": link_pb2.Request()},
        {"receipt": link_pb2.Receipt()},
        {"cancel": link_pb2.Cancel()},
        {"renewed": link_pb2.Renewed()},
    ],
    ids=lambda body: next(iter(body)),
)
async def test_what_only_a_server_says_ends_the_stream_of_a_participant(net, body):
    await net.listen()
    async with net.raw() as (call, send, receive):
        await receive("welcome")
        await send(**body)
        code, sentence = await net.refusal(call)
        assert code == grpc.StatusCode.PERMISSION_DENIED
        assert sentence == f"a client may not send '{next(iter(body))}'"


@pytest.mark.parametrize(
    "outcome",
    [
        {"exported": link_pb2.Exported()},  # what a datacenter answers, to another question
        {"opened": link_pb2.Opened()},
        {"secure_stepped": link_pb2.SecureStepped()},
        {},
    ],
    ids=lambda outcome: next(iter(outcome), "nothing"),
)
async def test_an_answer_to_another_question_is_a_failure(net, outcome):
    link = await net.listen(LEASE)
    async with net.raw() as (_, send, receive):
        await receive("welcome")
        asking = asyncio.create_task(link.ask("raw", train(link)))
        request = await receive("request")
        await send(reply=link_pb2.Reply(id=request.id, **outcome))
        reply = await asking
    assert reply.failure.reason.startswith("it answered something else than was asked")


def test_every_question_has_its_answers():
    asked, answered = link_pb2.Request.DESCRIPTOR, link_pb2.Reply.DESCRIPTOR
    assert {field.name for field in asked.oneofs_by_name["work"].fields} == ANSWERS.keys()
    known = {field.name for field in answered.oneofs_by_name["outcome"].fields}
    assert set().union(*ANSWERS.values()) == known - {"failure"}


async def test_a_caller_gets_a_few_transfers_at_a_time(net):
    link = await net.listen()
    payloads = [bytearray([number]) * (4 << 20) for number in range(PUMPS_EACH + 1)]
    for payload in payloads:
        link.publish(describe(payload), payload)
    async with net.raw() as (_, send, receive):
        await receive("welcome")
        for payload in payloads:  # and nothing is read: all of them are under way
            await send(want=link_pb2.Want(sha256=describe(payload).sha256))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive("receipt")
        assert caught.value.details() == "more than 4 transfers were asked for at a time"


async def test_a_message_that_is_too_large_is_never_read(net):
    link = await net.listen(LEASE)
    async with net.raw() as (_, send, receive):
        await receive("welcome")
        await send(chunk=link_pb2.Chunk(sha256=bytes(32), data=bytes(MAX_FROM_PARTICIPANT)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive("chunk")
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await net.join("a", answering(examples=4))
    assert (await link.ask("a", train(link))).trained.examples == 4


# -- listening -----------------------------------------------------------------------------------


async def test_a_port_in_use_is_one_sentence(net):
    await net.listen()
    other = Link(10.0)
    with pytest.raises(UserError, match=rf"^cannot listen on 127\.0\.0\.1:{net.port}; is the port"):
        await other.start(port=net.port)
    await other.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "example.org", ""])
async def test_an_address_others_can_reach_is_refused_without_encryption(host):
    with pytest.raises(UserError, match=r"is not loopback, and this link is not encrypted; use"):
        await Link(10.0).start(host)


async def test_stopping_ends_what_is_pending(net):
    link = await net.listen()
    guest = await net.join("a", waiting(answering(), asyncio.Event()))
    asking = asyncio.create_task(link.ask("a", train(link)))
    await net.until(lambda: guest.asked)
    await link.stop()
    with pytest.raises(ParticipantLost, match=r"^the server is stopping$"):
        await asking
