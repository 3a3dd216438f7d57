"""What the server takes from an aggregator that lies, over real TLS on loopback."""

import contextlib
import uuid

import pytest
from tests.server.aggregator.test_fleets import AGGREGATORS, Site
from tests.server.waiting import wait_until

from isthmus.errors import UpdateError
from isthmus.identity import tls
from isthmus.wire import link_pb2
from isthmus_server.aggregator.process import ServerLink
from isthmus_server.aggregator.sums import VectorSums
from isthmus_server.storage.events import RoundAttemptFailed, RoundCommitted
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


@pytest.fixture
async def fleet(tmp_path, make_job):
    """A server with four devices at one aggregator; `receipts` runs a round of theirs."""
    site = Site(tmp_path)
    await site.begin()
    await site.aggregator(AGGREGATORS[0])
    await site.devices(site.places[AGGREGATORS[0]])
    usual = ("federated.cohort=4", "rounds=1", "attempts=1", "strategy.policy=federated")

    async def receipts(*more):
        entry = site.runner.submit(make_job(*usual, *more), "me", uuid.uuid4().hex, 1.0)
        async for event in site.runner.events(entry.id, follow=True):
            if isinstance(event, RoundCommitted | RoundAttemptFailed):
                return {each.participant: each for each in event.record.receipts}
        raise AssertionError("it has ended without a round")

    site.receipts = receipts
    yield site
    await site.close()


def falsify(monkeypatch, change):
    """Have the aggregator change the first reply with a result that it passes on."""
    real = ServerLink.tell
    changed = []

    async def tell(self, message):
        inner = link_pb2.Envelope()
        if message.HasField("through"):
            inner.ParseFromString(message.through.message)
        if not changed and inner.HasField("reply") and change(inner.reply):
            changed.append(inner.reply.id)
            message.through.message = inner.SerializeToString()
        await real(self, message)

    monkeypatch.setattr(ServerLink, "tell", tell)


def heavier(reply):
    """Count more examples of an update than its device has."""
    if reply.HasField("trained"):
        reply.trained.examples += 1_000_000
    return reply.HasField("trained")


def other_vector(reply):
    """Name another masked vector than the device has signed."""
    if not reply.secure_stepped.HasField("masked"):
        return False
    reply.secure_stepped.masked.sha256 = b"x" * 32
    return True


SECURE = ("federated.secure_aggregation=true", "federated.clip=4.0", "federated.max_examples=9")
EITHER = "; the device or its aggregator 127.0.0.1 sent that"


@pytest.mark.parametrize(
    ("change", "settings", "why"),
    [
        (heavier, (), "its weight=10000"),
        (other_vector, SECURE, "its masked vector is not the one that it has signed"),
    ],
)
async def test_what_an_aggregator_may_have_falsified_is_not_told_as_its_devices_fault(
    fleet, monkeypatch, change, settings, why
):
    falsify(monkeypatch, change)
    receipts = await fleet.receipts("federated.quorum=3", *settings)
    (reason,) = [each.reason for each in receipts.values() if each.status == "rejected"]
    assert reason.startswith(why)
    assert reason.endswith(EITHER)


async def test_a_vector_of_which_only_its_aggregator_speaks_ill_may_be_sound(fleet, monkeypatch):
    real = VectorSums._add
    refused = []

    async def add(self, asked):
        if not refused:
            refused.append(asked.name)
            raise UpdateError("its update holds nan")
        await real(self, asked)

    monkeypatch.setattr(VectorSums, "_add", add)
    receipts = await fleet.receipts("federated.quorum=3")
    reasons = sorted(each.reason for each in receipts.values())
    assert reasons == ["", "", "", f"its update holds nan{EITHER}"]


async def test_an_aggregator_that_begins_no_sum_is_named_and_no_device_is(fleet, monkeypatch):
    async def refuse(self, asked):
        raise UpdateError("this aggregator has 1024 open sums; start it anew")

    monkeypatch.setattr(VectorSums, "_open", refuse)
    receipts = await fleet.receipts("federated.quorum=4")
    assert {each.reason for each in receipts.values() if each.status == "rejected"} == {
        "the aggregator 127.0.0.1 began no sum: this aggregator has 1024 open sums; start it anew"
    }


async def test_a_device_that_refuses_by_itself_is_alone_to_blame(fleet, monkeypatch):
    """An aggregator could say that, too; but then there is nothing that the server has judged."""

    def refuse(reply):
        if reply.HasField("trained"):
            reply.failure.reason = "it failed"
        return reply.HasField("failure")

    falsify(monkeypatch, refuse)
    receipts = await fleet.receipts("federated.quorum=3")
    (reason,) = [each.reason for each in receipts.values() if each.status == "rejected"]
    assert "sent that" not in reason
