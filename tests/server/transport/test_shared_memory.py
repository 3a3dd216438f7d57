"""Blobs between a server and participants that it has started: open files instead of messages."""

import asyncio
import errno
import os

import pytest
from tests.server.loopback import refusal
from tests.server.scripted_participant import replying, training_request
from tests.server.waiting import wait_until

from isthmus.errors import UpdateError
from isthmus.system.memory_file import MemoryFile
from isthmus.transport import requests
from isthmus.transport.blobs import describe, into
from isthmus.transport.shared_memory import has_random_name, machine, named
from isthmus.wire import link_pb2

SIZE = 1 << 20
HERE = machine()
pytestmark = pytest.mark.skipif(not HERE, reason="memory is shared on Linux only")


def shared(data):
    memory = MemoryFile(len(data))
    memory[:] = bytes(data)
    return memoryview(memory)


def taken(into_):
    """Takes a file whole, into a list."""

    def take(file):
        with file:
            into_.append(file.read())

    return take


def leaving_unnamed(payload):
    """Replies at once with an update that its link is to name."""
    return replying(payload, link_pb2.Blob(size=len(payload)))


async def exchanged(network, port=None, *, link_shares=True, device_shares=True):
    """Pass a model down and an update up; returns what each side got."""
    link = await network.listen(shares=link_shares)
    proxy, through = await network.start_proxy()
    model, update = shared(os.urandom(SIZE)), shared(os.urandom(SIZE))
    seen = []

    async def respond(participant, request, received):
        seen.append(bytes(received))
        return await replying(update)(participant, request, received)

    await network.join("a", respond, through, shares=device_shares)
    link.publish(describe(model), model)
    reply = await link.ask("a", training_request(link, describe(model)))
    whole, pieces = [], bytearray(SIZE)
    await link.fetch("a", reply.trained.result, into(pieces), taken(whole))
    assert seen == [bytes(model)]
    assert (whole or [bytes(pieces)]) == [bytes(update)]
    peer = link.peers["a"]
    assert peer.received.total == SIZE
    assert peer.sent.total == SIZE
    (carried,) = proxy.carried
    return carried["up"], carried["down"], bool(whole)


async def test_between_processes_that_share_memory_no_blob_is_sent(network):
    up, down, whole = await exchanged(network)
    assert whole
    assert max(up, down) < SIZE // 100


@pytest.mark.parametrize("sides", [{"link_shares": False}, {"device_shares": False}])
async def test_it_takes_both_sides_to_share(network, sides):
    up, down, whole = await exchanged(network, **sides)
    assert not whole
    assert min(up, down) > SIZE


async def test_a_file_that_cannot_be_opened_is_replaced_by_messages(network, monkeypatch):
    def refuse(file, size):
        raise PermissionError

    monkeypatch.setattr(requests, "opened", refuse)
    monkeypatch.setattr("isthmus_server.transport.peer.opened", refuse)
    up, down, whole = await exchanged(network)
    assert not whole
    assert min(up, down) > SIZE


async def test_a_model_that_was_withdrawn_while_it_was_read_is_not_used(network, monkeypatch):
    link = await network.listen(shares=True)
    model = shared(os.urandom(SIZE))
    blob = describe(model)
    read = requests.read_into

    def read_and_withdraw(file, buffer):
        read(file, buffer)
        loop.call_soon_threadsafe(link.retract, blob)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(requests, "read_into", read_and_withdraw)
    participant = await network.join("a", replying(), shares=True)
    link.publish(blob, model)
    reply = await link.ask("a", training_request(link, blob))
    assert reply.failure.reason == "the server no longer has the model"
    assert participant.requests == []


async def test_an_update_that_is_refused_while_it_is_taken_fails_the_fetch(network):
    link = await network.listen(shares=True)
    await network.join("a", replying(shared(b"12345")), shares=True)
    reply = await link.ask("a", training_request(link))

    def refuse(file):
        file.close()
        raise UpdateError("its header differs")

    with pytest.raises(UpdateError, match="its header differs"):
        await link.fetch("a", reply.trained.result, into(bytearray(5)), refuse)


async def test_a_file_that_nobody_asked_for_ends_the_stream(network):
    link = await network.listen(shares=True)
    async with network.raw_stream() as (call, send, receive):
        await receive("welcome")
        await wait_until(lambda: "raw" in link.peers)
        blob = describe(b"secret")
        fetching = asyncio.create_task(link.fetch("raw", blob, into(bytearray(6))))
        pull = await receive("pull")
        assert pull.machine == ""
        file = link_pb2.OpenFile(process=os.getpid(), descriptor=0)
        await send(chunk=link_pb2.Chunk(sha256=blob.sha256, file=file))
        code, sentence = await refusal(call)
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
    assert (code.name, sentence) == (
        "INVALID_ARGUMENT",
        "it offered a file that was not asked for",
    )


@pytest.mark.parametrize("way", ["again", "on the next stream"])
async def test_a_pull_for_the_bytes_is_not_answered_with_a_file(network, way, tmp_path):
    """Once a file could not be opened, or the stream broke, the server asks for the bytes."""
    link = await network.listen(shares=True)
    blob = describe(b"update")
    good = tmp_path / "file"
    good.write_bytes(b"secret")
    whole = []
    none = link_pb2.OpenFile(process=os.getpid(), descriptor=1 << 20)
    with good.open("rb") as file:
        async with network.raw_stream() as (call, send, receive):
            await receive("welcome")
            await wait_until(lambda: "raw" in link.peers)
            fetching = asyncio.create_task(
                link.fetch("raw", blob, into(bytearray(6)), taken(whole))
            )
            assert (await receive("pull")).machine == HERE
            here = link_pb2.OpenFile(process=os.getpid(), descriptor=file.fileno())
            if way == "again":
                await send(chunk=link_pb2.Chunk(sha256=blob.sha256, file=none))
                assert (await receive("pull")).machine == ""
                await send(chunk=link_pb2.Chunk(sha256=blob.sha256, file=here))
                assert (await refusal(call))[0].name == "INVALID_ARGUMENT"
        if way == "on the next stream":
            async with network.raw_stream() as (call, send, receive):
                assert (await receive("pull")).machine == ""
                await send(chunk=link_pb2.Chunk(sha256=blob.sha256, file=here))
                assert (await refusal(call))[0].name == "INVALID_ARGUMENT"
    with pytest.raises(UpdateError, match="a file that was not asked for"):
        await fetching
    assert whole == []


async def unnamed(network, update=None, *, link_shares=True, device_shares=True, reads=True):
    """Have a device train and leave its update unnamed; returns the link and the update's name.

    `reads`: the request has a model, which the device reads from a file if both sides share.
    """
    link = await network.listen(shares=link_shares)
    update = shared(b"update") if update is None else update
    device = await network.join("a", leaving_unnamed(update), shares=device_shares)
    model = shared(b"model")
    link.publish(describe(model), model)
    reply = await link.ask("a", training_request(link, describe(model) if reads else None))
    assert [bytes(each) for each in device.buffers] == [b"model"] * reads
    return link, reply.trained.result


async def test_an_update_that_passes_as_a_file_is_named_without_its_sha256(network):
    link, name = await unnamed(network)
    assert has_random_name(name)
    whole = []
    await link.fetch("a", name, into(bytearray(6)), taken(whole))
    assert whole == [b"update"]


@pytest.mark.parametrize(
    "options",
    [
        {"link_shares": False},
        {"device_shares": False},
        {"reads": False},
        {"update": bytearray(b"update")},
        {"update": memoryview(MemoryFile(8))[:6]},
    ],
    ids=["the server shares nothing", "the device neither", "no model", "no file", "a part"],
)
async def test_other_updates_are_named_by_their_sha256(network, options):
    """Also if the server has not shown that it opens files: it may be of another machine."""
    link, name = await unnamed(network, **options)
    assert name == describe(options.get("update", b"update"))
    whole = []
    pieces = bytearray(6)
    await link.fetch("a", name, into(pieces), taken(whole))
    assert (whole or [bytes(pieces)]) == [bytes(options.get("update", b"update"))]


async def test_an_update_without_a_sha256_that_nobody_takes_comes_in_messages(network):
    """So a strategy of Flower fetches it, and an extension of a user's own."""
    link, name = await unnamed(network)
    assert has_random_name(name)
    pieces = bytearray(6)
    await link.fetch("a", name, into(pieces))
    assert pieces == b"update"


async def test_an_update_without_a_sha256_that_cannot_be_opened_comes_in_messages(
    network, monkeypatch
):
    def refuse(file, size):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("isthmus_server.transport.peer.opened", refuse)
    link, name = await unnamed(network)
    assert has_random_name(name)
    whole = []
    pieces = bytearray(6)
    await link.fetch("a", name, into(pieces), taken(whole))
    assert (whole, bytes(pieces)) == ([], b"update")


async def test_an_update_without_a_sha256_goes_on_after_its_stream_has_broken(network):
    """The next stream asks for the bytes from where they were, with the same name."""
    update = os.urandom(4 * SIZE)
    link = await network.listen(shares=True)
    proxy, through = await network.start_proxy()
    await network.join("a", leaving_unnamed(shared(update)), through, shares=True)
    model = shared(b"model")
    link.publish(describe(model), model)
    reply = await link.ask("a", training_request(link, describe(model)))
    pieces = bytearray(len(update))

    def write(offset, data):
        into(pieces)(offset, data)
        if not offset:
            loop.call_soon_threadsafe(proxy.cut)

    loop = asyncio.get_running_loop()
    await link.fetch("a", reply.trained.result, write)
    assert pieces == update
    assert len(proxy.carried) == 2


async def test_a_random_name_is_refused_where_nothing_is_shared(network):
    """A device on another machine gets nothing accepted that is not what it has named."""
    link = await network.listen()
    await network.join("a", replying(b"update", named(b"update")))
    reply = await link.ask("a", training_request(link))
    with pytest.raises(UpdateError, match="does not match its SHA-256"):
        await link.fetch("a", reply.trained.result, into(bytearray(6)), taken([]))


async def test_a_sha256_is_verified_where_memory_is_shared_too(network):
    link = await network.listen(shares=True)
    await network.join("a", replying(b"update", describe(b"before")), shares=True)
    reply = await link.ask("a", training_request(link))
    with pytest.raises(UpdateError, match="does not match its SHA-256"):
        await link.fetch("a", reply.trained.result, into(bytearray(6)), taken([]))
