"""What a round hears of aggregators whose sums it wants."""

import pytest

from isthmus.errors import ParticipantLost
from isthmus.wire import link_pb2
from isthmus_server.regimes.partial_sums import PartialSums
from isthmus_server.transport.link import Link


async def test_an_aggregator_that_is_not_connected_is_named_once():
    parts = PartialSums(Link(10.0), link_pb2.OpenSum(), 1, least_rate=1.0)
    with pytest.raises(ParticipantLost, match=r"^the aggregator sums is not connected$"):
        await parts._asked("sums", link_pb2.Request(id="1"))
