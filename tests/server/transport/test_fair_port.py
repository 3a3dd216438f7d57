"""Whose connection is closed for a new one, and what counts as one address."""

import asyncio
import contextlib
import socket

import pytest
from tests.server.waiting import wait_until

from isthmus.errors import UserError
from isthmus_server.transport import fair_port
from isthmus_server.transport.fair_port import FairPort
from isthmus_server.transport.places import network_of

BUSY, IDLE = "127.0.0.2", "127.0.0.3"

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
"""What a client begins with: RFC 9113, section 3.4; its settings are empty."""
SETTINGS_ACKNOWLEDGED = bytes.fromhex("000000040100000000")


class Callers:
    """A port with four places, and connections to it from chosen addresses."""

    def __init__(self):
        self.port = FairPort(places=4)
        self.writers = []
        self.readers = []

    async def listen(self, host="127.0.0.1", port=0):
        options = {"message_bytes": 100, "idle_seconds": 99.0}
        self.number = await self.port.start({}, host, port, None, **options)

    async def open(self, address, host="127.0.0.1"):
        """Open a connection and wait until it has a place, or is refused; a task ends with it."""
        before = set(self.port._callers)
        where = (address, 0) if address else None
        reader, writer = await asyncio.open_connection(host, self.number, local_addr=where)
        self.writers.append(writer)
        ended = asyncio.create_task(read_to_the_end(reader))
        self.readers.append(ended)
        await wait_until(lambda: ended.done() or set(self.port._callers) - before)
        return ended

    def places(self):
        return sorted(caller.network for caller in self.port._callers)

    async def close(self):
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.gather(*self.readers)
        await self.port.stop()


@pytest.fixture
async def callers():
    callers = Callers()
    yield callers
    await callers.close()


async def read_to_the_end(reader):
    with contextlib.suppress(ConnectionError):  # one that is refused is reset
        await reader.read()


async def test_a_newcomer_gets_a_place_of_the_address_with_most(callers):
    await callers.listen()
    open_ = [await callers.open(BUSY) for _ in range(3)]
    await callers.open(IDLE)
    await callers.open("127.0.0.4")
    await wait_until(lambda: any(ended.done() for ended in open_))
    assert callers.places() == [BUSY, BUSY, IDLE, "127.0.0.4"]
    await callers.open("127.0.0.5")
    assert callers.places() == [BUSY, IDLE, "127.0.0.4", "127.0.0.5"]
    await callers.open("127.0.0.6")  # all have one
    assert "127.0.0.6" in callers.places()
    assert len(callers.places()) == 4


@pytest.mark.parametrize("idle", [False, True])
async def test_the_connections_of_one_address_give_way_only_when_they_are_idle(
    callers, idle, monkeypatch
):
    monkeypatch.setattr(fair_port, "_IDLE_SECONDS", -1.0 if idle else 99.0)
    await callers.listen()
    open_ = [await callers.open(BUSY) for _ in range(4)]
    last = await callers.open(BUSY)
    await wait_until(lambda: any(ended.done() for ended in [*open_, last]))
    assert last.done() is not idle
    assert callers.places() == [BUSY] * 4


async def test_a_closed_connection_leaves_its_place(callers):
    await callers.listen()
    for _ in range(4):
        await callers.open(BUSY)
    for writer in callers.writers:
        writer.close()
    await wait_until(lambda: not callers.places())
    await wait_until(lambda: not callers.port._networks)


async def test_what_is_sent_before_grpc_has_the_connection_is_passed_on(callers, monkeypatch):
    connect = fair_port._Caller.connect
    sent = asyncio.Event()

    async def connect_late(caller, seconds):
        await sent.wait()
        for _ in range(10):  # the event loop looks for bytes to read in each
            await asyncio.sleep(0)
        await connect(caller, seconds)

    monkeypatch.setattr(fair_port._Caller, "connect", connect_late)
    await callers.listen()
    reader, writer = await asyncio.open_connection("127.0.0.1", callers.number)
    callers.writers.append(writer)
    writer.write(HTTP2_PREFACE)
    await writer.drain()
    sent.set()
    await asyncio.wait_for(reader.readuntil(SETTINGS_ACKNOWLEDGED), 20)


async def test_a_port_in_use_is_reported(callers):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^cannot listen on 127.0.0.1:{port}; the port may be"):
            await callers.listen(port=port)


@pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="there is no IPv6; load its kernel module"
)
async def test_a_wildcard_is_for_both_families(callers):
    await callers.listen("0.0.0.0")
    await callers.open(BUSY)
    await callers.open(None, "::1")
    assert callers.places() == [BUSY, "::/64"]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address(address, network):
    assert network_of(address) == network
