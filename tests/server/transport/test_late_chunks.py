"""What was on its way when its transfer was given up is counted; what nobody asked for is not."""

import asyncio
import hashlib

import pytest

from isthmus.wire import link_pb2
from isthmus_server.transport.peer import MovedBytes, Peer

DATA = b"0123456789"
SHA256 = hashlib.sha256(DATA).digest()


def chunk(offset, end, sha256=SHA256):
    return link_pb2.Chunk(sha256=sha256, offset=offset, data=DATA[offset:end])


@pytest.fixture
async def peer():
    """A participant of whose blob four bytes had arrived when its transfer was cancelled."""
    peer = Peer(link_pb2.Hello(name="a"))
    blob = link_pb2.Blob(sha256=SHA256, size=len(DATA))
    fetching = asyncio.create_task(peer.fetch(blob, lambda offset, data: None, None, ""))
    await asyncio.sleep(0)
    await peer.add_chunk(chunk(0, 4), 100)
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    return peer


async def test_the_rest_of_a_cancelled_transfer_is_counted_once(peer):
    await peer.add_chunk(chunk(4, 7), 100)
    await peer.add_chunk(chunk(7, 10), 100)
    await peer.add_chunk(chunk(7, 10), 100)
    assert peer.received.take([SHA256]) == 4
    assert peer.received.take([MovedBytes.LATE]) == 6


async def test_a_blob_that_nobody_asked_for_costs_nothing(peer):
    await peer.add_chunk(chunk(0, 10, b"\1" * 32), 100)
    assert peer.received.take([MovedBytes.LATE]) == 0


async def test_a_transfer_that_begins_again_counts_as_its_own(peer):
    blob = link_pb2.Blob(sha256=SHA256, size=len(DATA))
    fetching = asyncio.create_task(peer.fetch(blob, lambda offset, data: None, None, ""))
    await asyncio.sleep(0)
    await peer.add_chunk(chunk(0, 10), 100)
    await fetching
    assert peer.received.take([MovedBytes.LATE]) == 0
    assert peer.received.take([SHA256]) == 4 + 10
