"""Participants that take a request's blob from a source of their own, and not from the link."""

import asyncio
import io
import threading

import pytest
from tests.server.scripted_participant import payload_of, replying, training_request
from tests.server.waiting import wait_until

from isthmus.transport.blob_sources import NamedSource
from isthmus.transport.blobs import CHUNK_BYTES, describe
from isthmus.wire import link_pb2

SIZE = 5 * CHUNK_BYTES + 3


class Waiting(NamedSource):
    """A source that has a blob once it is released."""

    def __init__(self, payload):
        super().__init__("file:/waiting")
        self.payload = payload
        self.opened = threading.Event()
        self.released = threading.Event()
        self.calls = 0

    def open(self, sha256, size, offset):
        self.calls += 1
        self.opened.set()
        assert self.released.wait(100)
        return io.BytesIO(self.payload[offset:])


@pytest.fixture
async def published(network):
    """A model that participants can pull, and its name."""
    link = await network.listen()
    payload = payload_of(SIZE)
    blob = describe(payload)
    link.publish(blob, payload)
    return payload, blob


async def test_a_model_comes_from_a_folder_and_not_on_the_link(network, published, tmp_path):
    payload, blob = published
    (tmp_path / blob.sha256.hex()).write_bytes(payload)
    source = NamedSource(f"file:{tmp_path}")
    participants = {"a": await network.join("a", replying(), sources=[source])}
    participants["b"] = await network.join("b", replying())
    for name, participant in participants.items():
        reply = await network.link.ask(name, training_request(network.link, blob))
        assert reply.WhichOneof("outcome") == "trained"
        assert participant.buffers == [payload]
    sent = {name: peer.sent.total for name, peer in network.link.peers.items()}
    assert sent == {"a": 0, "b": SIZE}


@pytest.mark.parametrize("content", [None, bytes(SIZE), b"short"], ids=["no", "other", "short"])
async def test_without_the_model_in_a_source_the_link_has_it(network, published, tmp_path, content):
    payload, blob = published
    if content is not None:
        (tmp_path / blob.sha256.hex()).write_bytes(content)
    source = NamedSource(f"file:{tmp_path}")
    participant = await network.join("a", replying(), sources=[source])
    await network.link.ask("a", training_request(network.link, blob))
    assert participant.buffers == [payload]
    assert network.link.peers["a"].sent.total == SIZE


async def test_a_package_is_taken_too_and_records_of_an_app_are_not(network, published):
    payload, blob = published
    source = Waiting(payload)
    source.released.set()
    participant = await network.join("a", replying(), sources=[source])
    package = link_pb2.OpenRun(run_id="run", package=link_pb2.Package(blob=blob))
    await network.link.ask("a", link_pb2.Request(id=network.link.new_id(), open=package))
    assert (source.calls, network.link.peers["a"].sent.total) == (1, 0)
    records = link_pb2.AppMessage(run_id="run", records=blob)
    await network.link.ask("a", link_pb2.Request(id=network.link.new_id(), app=records))
    assert (source.calls, network.link.peers["a"].sent.total) == (1, SIZE)
    assert participant.buffers == [payload, payload]


async def test_a_source_is_not_asked_for_the_roster_of_a_sum(network, published):
    """It cannot have it, and learns when this participant is in a sum; the step would wait."""
    payload, blob = published
    source = Waiting(payload)
    participant = await network.join("a", replying(), sources=[source])
    step = link_pb2.SecureStep(run_id="run", roster=blob)
    await network.link.ask("a", link_pb2.Request(id=network.link.new_id(), secure_step=step))
    assert (source.calls, network.link.peers["a"].sent.total) == (0, SIZE)
    assert participant.buffers == [payload]


async def test_a_stream_that_breaks_meanwhile_changes_nothing(network, published):
    payload, blob = published
    source = Waiting(payload)
    proxy, port = await network.start_proxy()
    participant = await network.join("a", replying(), port, sources=[source])
    asking = asyncio.create_task(network.link.ask("a", training_request(network.link, blob)))
    await wait_until(source.opened.is_set)
    stream = network.link.peers["a"].stream
    proxy.cut()
    await wait_until(lambda: network.link.peers["a"].stream not in (None, stream))
    source.released.set()
    reply = await asking
    assert reply.WhichOneof("outcome") == "trained"
    assert participant.buffers == [payload]
    assert (source.calls, len(participant.requests)) == (1, 1)
    assert network.link.peers["a"].sent.total == 0


async def test_after_a_cancelled_request_its_memory_is_not_written(network, published):
    payload, blob = published
    source = Waiting(payload)
    participant = await network.join("a", replying(), sources=[source])
    asking = asyncio.create_task(network.link.ask("a", training_request(network.link, blob)))
    await wait_until(source.opened.is_set)
    asking.cancel()
    await wait_until(lambda: participant.receipts)
    source.released.set()
    # The next request is served as any other, and by then the first source has given its bytes.
    await network.link.ask("a", training_request(network.link, blob))
    first, second = participant.buffers
    assert second == payload
    assert not any(first)
