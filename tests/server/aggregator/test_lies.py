"""What the server takes from an aggregator that lies, over real TLS on loopback."""

import contextlib

import pytest
from tests.server.aggregator.test_fleets import AGGREGATORS, Site
from tests.server.waiting import wait_until

from isthmus.identity import tls
from isthmus.wire import link_pb2
from isthmus_server.transport.limits import MAX_STREAMS_PER_CERTIFICATE


@pytest.fixture
async def site(tmp_path):
    """A server with one device that has joined, and is connected to nobody."""
    site = Site(tmp_path)
    await site.listen()
    site.member_a = await site.member("a")
    yield site
    await site.close()


@contextlib.asynccontextmanager
async def lying(site):
    """The stream of an aggregator, on which the test sends messages itself."""
    member = await site.member(AGGREGATORS[0], kind="aggregator")
    hello = {"name": member.name, "role": link_pb2.AGGREGATOR, "identity": member.identity_public}
    async with site.raw(member.channel_credentials(), **hello) as (_, send, receive):
        await receive("welcome")
        yield send, receive


async def test_one_certificate_opens_no_more_streams_with_other_bytes_around_it(site):
    certificate = tls.pem(site.member_a.certificate)
    wanted = MAX_STREAMS_PER_CERTIFICATE + 3
    async with lying(site) as (send, receive):
        for channel in range(1, wanted + 1):
            around = b"%d" % channel * 100_000
            await send(caller=link_pb2.Caller(channel=channel, certificate=around + certificate))
        refused = [await receive("hang_up") for _ in range(3)]
        assert [each.reason for each in refused] == ["too many open streams"] * 3
        aggregator = site.link.aggregators.connected[AGGREGATORS[0]]
        await wait_until(lambda: aggregator.devices == MAX_STREAMS_PER_CERTIFICATE)
        kept = [channel.certificate for channel in aggregator._channels.values()]
        assert kept == [certificate] * MAX_STREAMS_PER_CERTIFICATE
