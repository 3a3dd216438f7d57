"""The link as it is used: questions, answers, contents, and its port."""

import asyncio

import pytest
from tests.server.listeners import attached
from tests.server.work import answering, payload_of, train, waiting

from isthmus.errors import ParticipantLost, TaskError, UpdateError, UserError
from isthmus.transport.blobs import CHUNK_BYTES, InFile, describe, into
from isthmus.wire import link_pb2
from isthmus_server.transport.link import Link

# -- asking --------------------------------------------------------------------------------------


async def test_a_request_gets_its_reply(net):
    link = await net.listen()
    guest = await net.join("a", answering(examples=7))
    request = train(link)
    reply = await link.ask("a", request)
    assert reply.id == request.id
    assert reply.trained.examples == 7
    assert guest.asked == [request]


async def test_concurrent_requests_get_their_own_replies(net):
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


async def test_a_request_to_an_unconnected_participant_fails(net):
    link = await net.listen()
    with pytest.raises(ParticipantLost, match=r"^nobody is not connected$"):
        await link.ask("nobody", train(link))
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
async def test_a_model_that_the_worker_cannot_allocate_is_a_failure(net, error, sentence):
    link = await net.listen()
    guest = await net.join("a", answering())

    def refuse(request, size):
        raise error

    guest.buffer = refuse
    reply = await link.ask("a", train(link, describe(b"model")))
    assert reply.failure.reason == sentence
    assert guest.asked == []
    assert not guest.link.done()


async def test_an_abandoned_request_is_cancelled_and_its_late_reply_refused(net):
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
    assert guest.receipts == [(False, "too late: the request has ended")]


async def test_progress_arrives(net):
    link = await net.listen()
    listener = attached(link)

    async def work(guest, request, model):
        for step in range(1, 100):
            await asyncio.to_thread(guest.progress, link_pb2.Progress(steps=step, loss=0.5))
        return link_pb2.Reply(trained=link_pb2.Trained()), None

    await net.join("a", work)
    await link.ask("a", train(link))
    await net.until(lambda: listener.progress)
    name, progress = listener.progress[0]  # the others came too soon after it
    assert (name, progress.steps, progress.loss) == ("a", 1, 0.5)


# -- contents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 1])
async def test_blobs_are_transferred_in_both_directions(net, size):
    link = await net.listen()
    payload = payload_of(size)

    async def reverse(guest, request, model):
        result = bytearray(reversed(model or b""))
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    guest = await net.join("a", reverse)
    blob = describe(payload)
    link.publish(blob, payload)
    request = train(link, blob)
    reply = await link.ask("a", request)
    assert [bytes(buffer) for buffer in guest.buffers] == ([bytes(payload)] if size else [])
    back = bytearray(reply.trained.result.size)
    await link.fetch("a", reply.trained.result, into(back))
    assert back == bytes(reversed(payload))
    link.acknowledge("a", request.id, True)
    await net.until(lambda: guest.receipts == [(True, "")])


async def test_one_blob_is_sent_to_many_participants(net):
    link = await net.listen()
    payload = payload_of(2 * CHUNK_BYTES)
    blob = describe(payload)
    link.publish(blob, payload)
    guests = [await net.join(name, answering()) for name in "abcd"]
    await asyncio.gather(*(link.ask(name, train(link, blob)) for name in "abcd"))
    assert all(guest.buffers == [payload] for guest in guests)


async def test_a_blob_that_the_server_does_not_have_is_a_failure(net):
    link = await net.listen()
    payload = bytearray(b"model")
    await net.join("a", answering())
    link.publish(describe(payload), payload)
    link.retract(describe(payload))
    reply = await link.ask("a", train(link, describe(payload)))
    assert reply.failure.reason == "the server no longer has the model"


async def test_a_blob_whose_file_cannot_be_read_is_a_failure(net, tmp_path):
    link = await net.listen()
    await net.join("a", answering())
    blob = describe(bytes(CHUNK_BYTES))
    with (tmp_path / "blob").open("wb+") as file:
        link.publish(blob, InFile(file, blob.size))
        reply = await link.ask("a", train(link, blob))
    assert reply.failure.reason == "the server no longer has the model"


async def test_retracting_a_blob_fails_its_unfinished_transfers(net):
    link = await net.listen()
    payload = bytearray(64 * CHUNK_BYTES)  # more than is ever on its way at once
    blob = describe(payload)
    link.publish(blob, payload)
    async with net.raw() as (_, send, receive):
        await send(pull=link_pb2.Pull(sha256=blob.sha256))
        assert (await receive("chunk")).data
        link.retract(blob)
        arrived = CHUNK_BYTES
        async with asyncio.timeout(100):
            while not (chunk := await receive("chunk")).absent:
                arrived += len(chunk.data)
        assert arrived < len(payload)
        assert not link.peers["raw"].last_blob


async def test_a_blob_that_the_participant_does_not_have_is_refused(net):
    link = await net.listen()
    await net.join("a", answering(b"held"))
    await link.ask("a", train(link))
    with pytest.raises(UpdateError, match=r"^a does not hold the blob it named$"):
        await link.fetch("a", describe(b"other"), into(bytearray(5)))


async def test_a_blob_that_does_not_match_its_digest_is_refused(net):
    link = await net.listen()

    async def lie(guest, request, model):
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(b"named"))), b"other"

    await net.join("a", lie)
    reply = await link.ask("a", train(link))
    with pytest.raises(UpdateError, match=r"does not match its SHA-256"):
        await link.fetch("a", reply.trained.result, into(bytearray(5)))


# -- listening -----------------------------------------------------------------------------------


async def test_a_port_in_use_is_reported_in_one_sentence(net):
    await net.listen()
    other = Link(10.0)
    with pytest.raises(
        UserError, match=rf"^cannot listen on 127\.0\.0\.1:{net.port}; the port may be in use"
    ):
        await other.start(port=net.port)
    await other.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "example.org", ""])
async def test_an_address_reachable_from_other_machines_requires_encryption(host):
    with pytest.raises(UserError, match=r"is not loopback, and this link is not encrypted; use"):
        await Link(10.0).start(host)


async def test_stopping_the_link_fails_pending_requests(net):
    link = await net.listen()
    guest = await net.join("a", waiting(answering(), asyncio.Event()))
    asking = asyncio.create_task(link.ask("a", train(link)))
    await net.until(lambda: guest.asked)
    await link.stop()
    with pytest.raises(ParticipantLost, match=r"^the server is stopping$"):
        await asking
