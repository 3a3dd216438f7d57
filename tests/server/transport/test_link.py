"""The link in normal use: requests, replies, blobs and ports."""

import asyncio
import weakref

import pytest
from tests.server.listeners import attached
from tests.server.scripted_participant import delayed, payload_of, replying, training_request
from tests.server.waiting import wait_until

from isthmus.errors import ParticipantLost, TaskError, UpdateError, UserError
from isthmus.transport.blobs import CHUNK_BYTES, InFile, Piece, describe, into
from isthmus.transport.requests import MAX_MODELS, MAX_REQUESTS
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2
from isthmus_server.transport.link import Link

# -- asking --------------------------------------------------------------------------------------


async def test_a_request_gets_its_reply(network):
    link = await network.listen()
    participant = await network.join("a", replying(examples=7))
    request = training_request(link)
    reply = await link.ask("a", request)
    assert reply.id == request.id
    assert reply.trained.examples == 7
    (received,) = participant.requests
    assert received.train_local == request.train_local
    assert received.id != request.id  # a server may repeat its own


async def test_concurrent_requests_get_their_own_replies(network):
    link = await network.listen()

    async def echo(participant, request, model):
        return link_pb2.Reply(trained=link_pb2.Trained(examples=request.train_local.round)), None

    for name in "abc":
        await network.join(name, echo)
    requests = [training_request(link) for _ in range(30)]
    for number, request in enumerate(requests):
        request.train_local.round = number
    asked = [link.ask("abc"[n % 3], request) for n, request in enumerate(requests)]
    replies = await asyncio.gather(*asked)
    assert [reply.trained.examples for reply in replies] == list(range(30))


async def test_a_request_to_an_unconnected_participant_fails(network):
    link = await network.listen()
    with pytest.raises(ParticipantLost, match=r"^nobody is not connected$"):
        await link.ask("nobody", training_request(link))
    with pytest.raises(ParticipantLost, match=r"^nobody is not connected$"):
        await link.fetch("nobody", describe(b"x"), into(bytearray(1)))
    link.acknowledge("nobody", "r1", True)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (TaskError("loss() failed at task.py:3"), "loss() failed at task.py:3"),
        (KeyError("x"), "internal error: KeyError: 'x'"),
    ],
)
async def test_an_error_of_the_worker_is_a_reply(network, error, sentence):
    link = await network.listen()

    async def work(participant, request, model):
        raise error

    await network.join("a", work)
    reply = await link.ask("a", training_request(link))
    assert reply.failure.reason == sentence


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UpdateError("5 bytes are too many"), "5 bytes are too many"),
        (OSError(28, "disk full"), "no room for its model: OSError(28, 'disk full')"),
        (MemoryError(), "no room for its model: MemoryError()"),
    ],
)
async def test_a_model_that_the_worker_cannot_allocate_is_a_failure(network, error, sentence):
    link = await network.listen()
    participant = await network.join("a", replying())

    def refuse(request, size):
        raise error

    participant.buffer = refuse
    reply = await link.ask("a", training_request(link, describe(b"model")))
    assert reply.failure.reason == sentence
    assert participant.requests == []
    assert not participant.connection.done()


async def test_few_requests_have_memory_for_a_model_at_a_time(network):
    link = await network.listen()
    released, model = asyncio.Event(), payload_of(1000)
    participant = await network.join("a", delayed(replying(), released))
    blob = describe(model)
    link.publish(blob, model)
    requests = [training_request(link, blob) for _ in range(MAX_MODELS + 3)]
    asking = [asyncio.create_task(link.ask("a", request)) for request in requests]
    await wait_until(lambda: sum(task.done() for task in asking) == 3)
    assert len(participant.buffers) == MAX_MODELS
    refused = [task.result() for task in asking if task.done()]
    assert all("send the next one after the receipt" in r.failure.reason for r in refused)

    # It still works on those that it was told to give up.
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await wait_until(lambda: len(participant.cancelled) == MAX_MODELS)
    reply = await link.ask("a", training_request(link, blob))
    assert "requests with a model are open" in reply.failure.reason
    released.set()
    await wait_until(lambda: len(participant.receipts) >= MAX_MODELS)
    reply = await link.ask("a", training_request(link, blob))
    assert not reply.HasField("failure")


async def test_requests_that_a_server_gave_up_count_while_they_run(network):
    """A receipt for a running request made room for the next one, without a limit."""
    link = await network.listen()
    released = asyncio.Event()
    participant = await network.join("a", delayed(replying(), released))
    stream = link.peers["a"].stream
    for number in range(MAX_REQUESTS):
        request = link_pb2.Request(id=str(number), train_local=link_pb2.TrainLocal())
        await stream.send(link_pb2.Envelope(request=request))
        await stream.send(link_pb2.Envelope(receipt=link_pb2.Receipt(id=str(number))))
    await wait_until(lambda: len(participant.cancelled) == MAX_REQUESTS)
    request = link_pb2.Request(id="more", train_local=link_pb2.TrainLocal())
    await stream.send(link_pb2.Envelope(request=request))
    await wait_until(lambda: link.peers["a"].stream not in (stream, None))
    assert len(participant.requests) == MAX_REQUESTS
    released.set()
    await wait_until(lambda: len(participant.receipts) == MAX_REQUESTS)


async def test_an_abandoned_request_is_cancelled_and_its_late_reply_refused(network):
    link = await network.listen()
    released = asyncio.Event()
    participant = await network.join("a", delayed(replying(), released))
    request = training_request(link)
    asking = asyncio.create_task(link.ask("a", request))
    await wait_until(lambda: participant.requests)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await wait_until(lambda: participant.cancelled == participant.requests)
    released.set()
    await wait_until(lambda: participant.receipts)
    assert participant.receipts == [(False, "too late: the request has ended")]


async def test_progress_arrives(network):
    link = await network.listen()
    listener = attached(link)

    async def work(participant, request, model):
        for step in range(1, 100):
            await asyncio.to_thread(participant.progress, link_pb2.Progress(steps=step, loss=0.5))
        return link_pb2.Reply(trained=link_pb2.Trained()), None

    await network.join("a", work)
    await link.ask("a", training_request(link))
    await wait_until(lambda: listener.progress)
    name, progress = listener.progress[0]  # the others came too soon after it
    assert (name, progress.steps, progress.loss) == ("a", 1, 0.5)


async def test_a_note_right_before_the_reply_arrives(network):
    link = await network.listen()
    listener = attached(link)

    async def work(participant, request, model):
        participant.progress(link_pb2.Progress(note="zero_stage=3 was chosen"))
        return link_pb2.Reply(trained=link_pb2.Trained()), None

    await network.join("a", work)
    await link.ask("a", training_request(link))
    assert [progress.note for _, progress in listener.progress] == ["zero_stage=3 was chosen"]


# -- contents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 1])
async def test_blobs_are_transferred_in_both_directions(network, size):
    link = await network.listen()
    payload = payload_of(size)

    async def reverse(participant, request, model):
        result = bytearray(reversed(model or b""))
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    participant = await network.join("a", reverse)
    blob = describe(payload)
    link.publish(blob, payload)
    request = training_request(link, blob)
    reply = await link.ask("a", request)
    assert [bytes(buffer) for buffer in participant.buffers] == ([bytes(payload)] if size else [])
    back = bytearray(reply.trained.result.size)
    await link.fetch("a", reply.trained.result, into(back))
    assert back == bytes(reversed(payload))
    link.acknowledge("a", request.id, True)
    await wait_until(lambda: participant.receipts == [(True, "")])


async def test_no_chunk_is_kept_until_the_next_one_is_here(network, monkeypatch):
    """A stream that waits has no bytes in memory: those of many participants would add up."""
    received = Stream.receive
    last = {}
    kept = []

    async def recording(stream, *limit, **named):
        if (chunk := last.pop(stream, None)) is not None:
            kept.append(chunk() is not None)
        message = await received(stream, *limit, **named)
        if isinstance(message, Piece):
            last[stream] = weakref.ref(message.data)
        return message

    monkeypatch.setattr(Stream, "receive", recording)
    link = await network.listen()
    payload = payload_of(4 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    await network.join("a", replying(payload))
    reply = await link.ask("a", training_request(link, blob))
    await link.fetch("a", reply.trained.result, into(bytearray(len(payload))))
    assert len(kept) > 4  # in both directions
    assert not any(kept)


async def test_one_blob_is_sent_to_many_participants(network):
    link = await network.listen()
    payload = payload_of(2 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    participants = [await network.join(name, replying()) for name in "abcd"]
    await asyncio.gather(*(link.ask(name, training_request(link, blob)) for name in "abcd"))
    assert all(participant.buffers == [payload] for participant in participants)


async def test_a_blob_that_the_server_does_not_have_is_a_failure(network):
    link = await network.listen()
    payload = bytearray(b"model")
    await network.join("a", replying())
    link.publish(describe(payload), payload)
    link.retract(describe(payload))
    reply = await link.ask("a", training_request(link, describe(payload)))
    assert reply.failure.reason == "the server no longer has the model"


async def test_a_blob_whose_file_cannot_be_read_is_a_failure(network, tmp_path):
    link = await network.listen()
    await network.join("a", replying())
    blob = describe(bytes(CHUNK_BYTES))
    with (tmp_path / "blob").open("wb+") as file:
        link.publish(blob, InFile(file, blob.size))
        reply = await link.ask("a", training_request(link, blob))
    assert reply.failure.reason == "the server no longer has the model"


async def test_retracting_a_blob_fails_its_unfinished_transfers(network):
    link = await network.listen()
    payload = bytearray(64 * CHUNK_BYTES)  # more than is ever on its way at once
    blob = describe(payload)
    link.publish(blob, payload)
    async with network.raw_stream() as (_, send, receive):
        await send(pull=link_pb2.Pull(sha256=blob.sha256))
        assert (await receive("chunk")).data
        link.retract(blob)
        arrived = CHUNK_BYTES
        async with asyncio.timeout(100):
            while not (chunk := await receive("chunk")).absent:
                arrived += len(chunk.data)
        assert arrived < len(payload)
        assert not link.peers["raw"].last_blob


async def test_a_blob_that_the_participant_does_not_have_is_refused(network):
    link = await network.listen()
    await network.join("a", replying(b"held"))
    await link.ask("a", training_request(link))
    with pytest.raises(UpdateError, match=r"^a does not hold the blob it named$"):
        await link.fetch("a", describe(b"other"), into(bytearray(5)))


async def test_a_blob_that_does_not_match_its_digest_is_refused(network):
    link = await network.listen()

    async def lie(participant, request, model):
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(b"named"))), b"other"

    await network.join("a", lie)
    reply = await link.ask("a", training_request(link))
    with pytest.raises(UpdateError, match=r"does not match its SHA-256"):
        await link.fetch("a", reply.trained.result, into(bytearray(5)))


# -- listening -----------------------------------------------------------------------------------


async def test_a_port_in_use_is_reported_in_one_sentence(network):
    await network.listen()
    other = Link(10.0)
    with pytest.raises(
        UserError, match=rf"^cannot listen on 127\.0\.0\.1:{network.port}; the port may be in use"
    ):
        await other.start(port=network.port)
    await other.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "example.org", ""])
async def test_an_address_reachable_from_other_machines_requires_encryption(host):
    with pytest.raises(UserError, match=r"is not loopback, and this link is not encrypted; use"):
        await Link(10.0).start(host)


async def test_stopping_the_link_fails_pending_requests(network):
    link = await network.listen()
    participant = await network.join("a", delayed(replying(), asyncio.Event()))
    asking = asyncio.create_task(link.ask("a", training_request(link)))
    await wait_until(lambda: participant.requests)
    await link.stop()
    with pytest.raises(ParticipantLost, match=r"^the server is stopping$"):
        await asking
