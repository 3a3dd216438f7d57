"""Admission to the link, and limits on what each participant may send."""

import asyncio
import contextlib
import subprocess
import sys

import grpc
import grpc.aio
import pytest
from tests.privacy.protocol import ProtocolRound, Stage
from tests.server.loopback import refusal
from tests.server.scripted_participant import replying, training_request
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused
from isthmus.job.federated import MAX_SECURE_COHORT
from isthmus.transport import uplink
from isthmus.transport.blobs import describe
from isthmus.transport.uplink import METHOD
from isthmus.wire import link_pb2
from isthmus_server.transport.limits import (
    MAX_MESSAGE_BYTES,
    MAX_TRANSFERS_PER_PARTICIPANT,
    REPLY_KINDS,
)

LEASE = 99.0
_NAMES = "a hello needs a name and an instance of 1 to 128 printable characters each"


CANCELLED = """
import asyncio
from isthmus_server.transport.link import Link

async def main(turns):
    starting = asyncio.create_task(Link(10.0).start())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])

for turns in (1, 2, 3):
    asyncio.run(main(turns))
"""


def test_a_server_that_is_cancelled_while_it_begins_to_listen_leaves_no_traceback():
    ran = subprocess.run(
        [sys.executable, "-c", CANCELLED], capture_output=True, text=True, check=True
    )
    assert ran.stderr == ""


async def test_a_name_is_taken_while_its_participant_is_connected(network):
    link = await network.listen()
    first = await network.join("a", replying(examples=1))
    async with network.raw_stream(name="a", instance="another") as (call, _, _):
        code, sentence = await refusal(call)
        assert code == grpc.StatusCode.ABORTED
        assert sentence == "a participant named 'a' is connected"
    assert (await link.ask("a", training_request(link))).trained.examples == 1
    mine = link.peers["a"].instance
    second = await network.join("a", replying(examples=2))  # keeps trying
    await first.disconnect()
    await wait_until(lambda: link.peers["a"].instance != mine)
    assert (await link.ask("a", training_request(link))).trained.examples == 2
    assert len(second.requests) == 1


async def test_an_unsupported_link_version_is_refused_permanently(network, monkeypatch):
    await network.listen()
    monkeypatch.setattr(uplink, "VERSION", 9)
    monkeypatch.setattr(uplink, "OLDEST_VERSION", 8)
    with pytest.raises(AdmissionRefused) as caught:
        await network.dial(None, "a")
    assert str(caught.value) == (
        "the server refused 'a': it supports link versions 8 to 9 and this server supports "
        "version 2; upgrade the older side"
    )


async def test_a_newer_participant_that_supports_this_version_is_accepted(network, monkeypatch):
    await network.listen()
    async with network.raw_stream(version_max=3) as (_, _, receive):
        assert (await receive("welcome")).version == 2


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        ({"name": ""}, _NAMES),
        ({"name": "x" * 129}, _NAMES),
        ({"instance": ""}, _NAMES),
        ({"instance": "x" * 129}, _NAMES),
        ({"role": 0}, "role=0 is not one this server knows"),
        ({"role": 77}, "role=77 is not one this server knows"),
        ({"version_min": 3, "version_max": 2}, "it supports link versions 3 to 2 and this server"),
    ],
)
async def test_an_invalid_hello_is_refused(network, hello, sentence):
    link = await network.listen()
    async with network.raw_stream(**hello) as (call, _, _):
        code, told = await refusal(call)
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert told.startswith(sentence)
    assert link.peers == {}


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (link_pb2.Envelope(ping=link_pb2.Ping()), "the first message must be a hello"),
        (link_pb2.Envelope(), "the first message must be a hello"),
        (None, "the received data is not a message of this link"),
    ],
)
async def test_a_first_message_other_than_a_hello_is_refused(network, first, sentence):
    link = await network.listen()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{network.port}") as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(b"\xff\xff\xff" if first is None else first.SerializeToString())
        assert (await refusal(call))[1] == sentence
    assert link.peers == {}


async def test_invalid_bytes_end_only_their_own_stream(network, timeouts):
    link = await network.listen(LEASE)
    await network.join("a", replying(examples=4))
    async with network.raw_stream() as (call, _, receive):
        await receive("welcome")
        await call.write(b"\xff\xff\xff")
        code, sentence = await refusal(call)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert sentence == "the received data is not a message of this link"
        await timeouts.expire(LEASE)
        assert "raw" not in link.peers
    assert (await link.ask("a", training_request(link))).trained.examples == 4


async def test_a_message_to_an_aborted_stream_is_kept_for_the_next_one(network, monkeypatch):
    """A receipt that was sent while a stream was refused raised an error that nothing handled."""
    link = await network.listen()
    sent = asyncio.get_running_loop().create_future()

    async def refuse(stream, context):
        await stream.receive()
        with contextlib.suppress(grpc.aio.AbortError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "rubbish")
        receipt = link_pb2.Envelope(receipt=link_pb2.Receipt(id="1"))
        await stream.spawn(stream.send(receipt))
        await stream.send_quietly(receipt)
        sent.set_result(None)

    monkeypatch.setattr(link, "_serve", refuse)
    async with network.raw_stream() as (call, _, _):
        assert (await refusal(call))[0] == grpc.StatusCode.INVALID_ARGUMENT
        async with asyncio.timeout(60):
            await sent


async def test_a_new_stream_of_a_process_replaces_its_older_ones(network):
    link = await network.listen()
    payload = bytearray(1000)
    link.publish(describe(payload), payload)
    async with network.raw_stream() as (before, _, receive):
        await receive("welcome")
        async with network.raw_stream() as (_, send, receive):
            await receive("welcome")
            assert await refusal(before) == (
                grpc.StatusCode.ABORTED,
                "this process has opened another stream",
            )
            await wait_until(lambda: link._streams == {b"": 1})
            await send(pull=link_pb2.Pull(sha256=describe(payload).sha256))
            assert len((await receive("chunk")).data) == 1000


async def test_a_reply_to_an_unknown_request_is_not_stored(network):
    link = await network.listen()
    async with network.raw_stream() as (call, send, receive):
        await receive("welcome")
        await send(reply=link_pb2.Reply(id="x" * 1000))
        assert await refusal(call) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "it replied to a request that was never sent",
        )
        assert not link.peers["raw"].outbox


async def test_chunks_and_replies_that_were_not_requested_are_ignored(network):
    link = await network.listen()
    async with network.raw_stream() as (_, send, receive):
        await receive("welcome")
        await send(chunk=link_pb2.Chunk(sha256=b"x" * 32, data=b"y" * 1000))
        await send(ping=link_pb2.Ping())
        await send(progress=link_pb2.Progress(id="r999"))
        await send(reply=link_pb2.Reply(id="r999"))
        assert (await receive("receipt")).id == "r999"
        assert link.peers["raw"].received.total == 0


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
async def test_a_server_message_from_a_participant_ends_its_stream(network, body):
    await network.listen()
    async with network.raw_stream() as (call, send, receive):
        await receive("welcome")
        await send(**body)
        code, sentence = await refusal(call)
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
async def test_a_reply_of_another_kind_is_a_failure(network, outcome):
    link = await network.listen()
    async with network.raw_stream() as (_, send, receive):
        await receive("welcome")
        asking = asyncio.create_task(link.ask("raw", training_request(link)))
        request = await receive("request")
        await send(reply=link_pb2.Reply(id=request.id, **outcome))
        reply = await asking
    assert reply.failure.reason.startswith("it answered something else than was asked")


def test_every_kind_of_request_has_permitted_replies():
    asked, answered = link_pb2.Request.DESCRIPTOR, link_pb2.Reply.DESCRIPTOR
    assert {field.name for field in asked.oneofs_by_name["work"].fields} == REPLY_KINDS.keys()
    known = {field.name for field in answered.oneofs_by_name["outcome"].fields}
    assert set().union(*REPLY_KINDS.values()) == known - {"failure"}


async def test_concurrent_transfers_of_a_participant_are_limited(network):
    link = await network.listen()
    payloads = [
        bytearray([number]) * (4 << 20) for number in range(MAX_TRANSFERS_PER_PARTICIPANT + 1)
    ]
    for payload in payloads:
        link.publish(describe(payload), payload)
    async with network.raw_stream() as (_, send, receive):
        await receive("welcome")
        for payload in payloads:  # and nothing is read: all of them are under way
            await send(pull=link_pb2.Pull(sha256=describe(payload).sha256))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive("receipt")
        assert caught.value.details() == "more than 4 transfers were requested at a time"


def test_the_keys_of_the_largest_secure_cohort_are_one_message():
    protocol = ProtocolRound().until(Stage.SHARE_KEYS)
    entry = protocol.roster.entries[0]
    longest = 2 * (63 - len(entry.name))  # a name is in the entry and in its enrolment
    size = (len(entry.to_bytes()) + longest) * MAX_SECURE_COHORT
    assert 0.8 * MAX_MESSAGE_BYTES < size < 0.98 * MAX_MESSAGE_BYTES


async def test_a_message_that_is_too_large_is_not_read(network):
    link = await network.listen()
    async with network.raw_stream() as (_, send, receive):
        await receive("welcome")
        await send(chunk=link_pb2.Chunk(sha256=bytes(32), data=bytes(MAX_MESSAGE_BYTES)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await receive("chunk")
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await network.join("a", replying(examples=4))
    assert (await link.ask("a", training_request(link))).trained.examples == 4
