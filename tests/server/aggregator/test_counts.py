"""What an aggregator says of the bytes of its devices."""

import asyncio
import types

from tests.server.waiting import wait_until

from isthmus.wire import link_pb2
from isthmus_server.aggregator import devices
from isthmus_server.transport import aggregators
from isthmus_server.transport.aggregators import ConnectedAggregator, DeviceChannel
from isthmus_server.transport.peer import Peer

SHA256 = b"s" * 32


def channel_of(device):
    """The channel of a device, whose vector of 2000 bytes its aggregator has been asked to add."""
    aggregator = ConnectedAggregator(Peer(link_pb2.Hello(name="sums")), None)
    channel = DeviceChannel(aggregator, 1, b"")
    channel.participant = device
    aggregator._channels[1] = channel
    vector = link_pb2.Blob(sha256=SHA256, size=2000)
    added = link_pb2.Request(id="1", add_vector=link_pb2.AddVector(channel=1, vector=vector))
    aggregator.peer.pending["1"] = (added, asyncio.Future())
    return channel


async def tell(channel, **passed):
    message = link_pb2.Passed(**{"channel": 1, "sha256": SHA256, "from_caller": True} | passed)
    await channel.aggregator.take(link_pb2.Envelope(passed=message))


async def test_bytes_that_a_device_sends_again_are_no_progress():
    device = Peer(link_pb2.Hello(name="a"))
    channel = channel_of(device)
    await tell(channel)  # it begins
    for _ in range(3):
        await tell(channel, bytes=1000, end=1000)
    assert device.transfer_time.advanced == 1000
    await tell(channel, bytes=500, end=1500)
    assert device.transfer_time.advanced == 1500
    # All of it has moved and is in the receipt.
    assert device.received.take([SHA256]) == 3500


async def test_an_aggregator_makes_no_transfer_longer_than_its_blob():
    device = Peer(link_pb2.Hello(name="a"))
    channel = channel_of(device)
    for end in range(1000, 10_000, 1000):
        await tell(channel, bytes=1000, end=end)
    await tell(channel, bytes=10**9, end=10**9)
    assert device.transfer_time.advanced == 2000
    model = link_pb2.Blob(sha256=b"m" * 32, size=500)
    request = link_pb2.Request(id="2", train_local=link_pb2.TrainLocal(model=model))
    device.pending["2"] = (request, asyncio.Future())
    for _ in range(2):
        await tell(channel, sha256=model.sha256, from_caller=False, bytes=400, end=400)
        await tell(channel, sha256=model.sha256, from_caller=False, bytes=400, end=800)
    assert device.transfer_time.advanced == 2500


async def test_an_aggregator_makes_no_message_much_larger_than_its_chunk():
    device = Peer(link_pb2.Hello(name="a"))
    channel = channel_of(device)
    await tell(channel, bytes=1000, end=1000, more=60)
    assert device.messages_received.take([SHA256]) == 60
    await tell(channel, bytes=1000, end=2000, more=10**12)
    assert device.messages_received.take([SHA256]) == 1000 + aggregators.MAX_WRAPPING
    await tell(channel, more=10**12)
    assert device.messages_sent.take([SHA256]) == aggregators.MAX_WRAPPING


async def test_an_aggregator_counts_no_blobs_that_its_device_does_not_need():
    device = Peer(link_pb2.Hello(name="a"))
    channel = channel_of(device)
    for number in range(100):
        other = bytes([number]) * 32
        await tell(channel, sha256=other, bytes=1000, end=1000)
        await tell(channel, sha256=other, bytes=1000, end=1000, from_caller=False)
    await tell(channel, bytes=1000, end=1000, from_caller=False)
    assert device.transfer_time.advanced == 0
    assert device.sent.total == device.received.total == 0
    assert not device.reached


class Told:
    """What an aggregator tells its server."""

    is_linked = True

    def __init__(self):
        self.messages = []

    async def tell(self, message):
        self.messages.append(message.passed)


async def test_a_server_is_told_of_a_slow_transfer_before_it_takes_it_for_ended(monkeypatch):
    monkeypatch.setattr(devices, "TOLD_SECONDS", 0.05)
    monkeypatch.setattr(devices, "FIRST_TOLD_SECONDS", 0.05)
    to = Told()
    device = devices._Device(1, None, to)
    for number in (1, 2):
        await device.moved(SHA256, 1000, 1010, number * 1000, from_caller=False)
        assert len(to.messages) == number - 1  # no message for each chunk
        await wait_until(lambda number=number: len(to.messages) == number)
    assert [(each.bytes, each.end) for each in to.messages] == [(1000, 1000), (1000, 2000)]
    await device.moved(SHA256, 1000, 1010, 3000, from_caller=False)
    device.left()
    assert device._telling.cancelled()


async def test_a_server_is_told_soon_that_something_comes(monkeypatch):
    """A round that ends soon would take the device for one of which nothing comes."""
    monkeypatch.setattr(devices, "FIRST_TOLD_SECONDS", 0.05)
    to = Told()
    device = devices._Device(1, None, to)
    await device.moved(SHA256, 1000, 1010, 1000, from_caller=True)
    async with asyncio.timeout(devices.TOLD_SECONDS / 2):
        await wait_until(lambda: to.messages)
    await device.moved(SHA256, 1000, 1010, 2000, from_caller=True)
    later = device._telling.when() - asyncio.get_running_loop().time()
    assert later > devices.TOLD_SECONDS / 2
    assert [(each.bytes, each.end) for each in to.messages] == [(1000, 1000)]
    device.left()


async def test_a_server_is_told_once_of_a_quick_transfer_of_some_megabytes():
    to = Told()
    device = devices._Device(1, None, to)
    for number in range(1, 9):
        await device.moved(SHA256, 1 << 20, (1 << 20) + 10, number << 20, from_caller=True)
    assert to.messages == []
    await device.tell()  # as at the end of each transfer
    [passed] = to.messages
    assert (passed.bytes, passed.more, passed.end) == (8 << 20, 80, 8 << 20)
    device.left()


async def test_a_device_has_time_while_its_aggregator_gets_the_model(monkeypatch):
    device = Peer(link_pb2.Hello(name="a"))
    channel = channel_of(device)
    model = link_pb2.Blob(sha256=b"m" * 32, size=1000)
    request = link_pb2.Request(id="2", train_local=link_pb2.TrainLocal(model=model))
    device.pending["2"] = (request, asyncio.Future())
    now = 100.0
    monkeypatch.setattr(aggregators, "time", types.SimpleNamespace(monotonic=lambda: now))
    told = {"sha256": model.sha256, "from_caller": False}
    await tell(channel, **told)
    for end in (400, 1000):
        now += 10.0
        await tell(channel, **told, end=end)
    now += 10.0
    await tell(channel, **told, bytes=1000, end=1000)  # to the device itself
    # As long as both took, up to the time of the model's bytes at the least rate.
    assert (device.transfer_time.seconds, device.transfer_time.advanced) == (30.0, 1000)
    assert device.sent.total == 1000
