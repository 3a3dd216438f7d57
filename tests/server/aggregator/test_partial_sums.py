"""What a round hears of aggregators whose sums it wants."""

import asyncio
import time

import pytest
from tests.server.waiting import wait_until

from isthmus.errors import ParticipantLost
from isthmus.wire import link_pb2
from isthmus_server.regimes.partial_sums import PartialSums
from isthmus_server.regimes.transfer_allowance import TransferAllowance
from isthmus_server.regimes.upload_places import UploadPlaces
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import Peer, Place


async def test_an_aggregator_that_is_not_connected_is_named_once():
    parts = PartialSums(Link(10.0), link_pb2.OpenSum(), 1, least_rate=1.0)
    with pytest.raises(ParticipantLost, match=r"^the aggregator sums is not connected$"):
        await parts._asked("sums", link_pb2.Request(id="1"))


async def test_a_round_knows_that_a_vector_is_on_its_way_to_an_aggregator():
    """Else one that begins to come when the round ends would be late, as it is not at the server.

    The aggregator tells of what has come in a moment, and not of each chunk.
    """
    link = Link(10.0)
    device = link.peers["a"] = Peer(link_pb2.Hello(name="a"))
    aggregator = Peer(link_pb2.Hello(name="sums"))
    answered = asyncio.Event()

    async def ask(name, request):
        if request.HasField("add_vector"):
            await answered.wait()
        return link_pb2.Reply(added=link_pb2.Added())

    link.ask_aggregator = ask
    allowance = TransferAllowance(link, ["a"], least_rate=1000.0)
    now = time.monotonic()
    device.transfer_time.begin(now - 14.0)
    device.transfer_time.add(4_000_000, now - 10.0)  # its model, before the training
    assert allowance.seconds("a", now) == pytest.approx(4.0)
    parts = PartialSums(link, link_pb2.OpenSum(), 1, least_rate=1000.0)
    vector = link_pb2.Blob(sha256=b"v" * 32, size=4_000_000)
    places = UploadPlaces(link, least_rate=1000.0)
    adding = asyncio.create_task(parts.add(Place(aggregator, 1), vector, "a", 1, places))
    await wait_until(lambda: device.adding)
    soon = time.monotonic() + 2.0
    assert allowance.seconds("a", soon) == pytest.approx(34.0)
    answered.set()
    await adding
    assert not device.is_moving
    assert allowance.seconds("a", soon) == pytest.approx(4.0)
