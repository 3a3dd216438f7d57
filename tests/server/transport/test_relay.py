"""What is passed on between a caller and gRPC, and how much of it waits here."""

import asyncio
import collections
import contextlib
import os
import random
import socket

import pytest
from tests.server.waiting import wait_until

from isthmus_server.transport import relay as relays
from isthmus_server.transport.relay import Relay


class Passed:
    """A relay with a server behind it, and connections that pass through it."""

    def __init__(self, path):
        self.path = str(path)
        self.near = asyncio.Queue()

    async def __aenter__(self):
        async def serve(reader, writer):
            await self.near.put((reader, writer))

        self.server = await asyncio.start_unix_server(serve, self.path)
        self.relay = Relay(self.path, places=64, reserved=100)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.writers = []
        return self

    async def dial(self, network="127.0.0.1"):
        """The caller's end of a new connection from an address."""
        caller = await asyncio.open_connection(*self.listener.getsockname())
        self.writers.append(caller[1])
        accepted, _ = self.listener.accept()
        accepted.setblocking(False)
        self.relay.take(accepted, network)
        return caller

    async def open(self, network="127.0.0.1"):
        """Both ends of a new connection: the caller's, and that behind the relay."""
        caller = await self.dial(network)
        near = await asyncio.wait_for(self.near.get(), 20)
        self.writers.append(near[1])
        return caller, near

    async def __aexit__(self, *_):
        for writer in self.writers:
            if not writer.is_closing():
                writer.transport.abort()
        await self.relay.stop()
        self.listener.close()
        self.server.close()


@pytest.fixture
async def passed(tmp_path):
    async with Passed(tmp_path / "grpc") as passed:
        yield passed


async def test_both_directions_carry_the_same_bytes_at_once(passed):
    sizes = [1, 100, 4096, 70_000, relays._PART, 3 * relays._PART + 1]
    chosen = random.Random(7)

    async def send(writer, data):
        rest = data
        while rest:
            count = chosen.choice(sizes)
            writer.write(rest[:count])
            await writer.drain()
            rest = rest[count:]

    ends = [end for _ in range(3) for end in [await passed.open()]]
    work = []
    for caller, near in ends:
        for (_, writer), (reader, _) in ((caller, near), (near, caller)):
            data = os.urandom(2_000_000)
            work += [send(writer, data), reader.readexactly(len(data))]
            work.append(asyncio.sleep(0, data))
    done = await asyncio.gather(*work)
    for received, expected in zip(done[1::3], done[2::3], strict=True):
        assert received == expected


async def test_the_end_of_one_side_ends_the_other_after_all_that_came_before(passed):
    for ending in (0, 1):
        ends = await passed.open()
        _, writer = ends[ending]
        reader, _ = ends[1 - ending]
        data = os.urandom(3_000_000)
        writer.write(data)
        writer.close()
        assert await reader.read(-1) == data
    assert len(passed.relay) == 0


async def test_little_waits_for_a_caller_that_takes_nothing(passed, timeouts):
    """And the connection is closed once it has taken nothing for a minute."""
    (reader, caller), (_, near) = await passed.open()
    caller.transport.pause_reading()
    near.write(bytes(30_000_000))
    (connection,) = passed.relay._connections
    await wait_until(lambda: connection._waiting)
    for _ in range(200):
        await asyncio.sleep(0)
    waiting = [left for left, _ in connection._waiting.values()]
    assert sum(map(len, waiting)) <= relays._PART
    # The sockets' own buffers take more for a while: the rest waits with who has sent it.
    assert near.transport.get_write_buffer_size() > 15_000_000
    await timeouts.expire(relays._STALLED_SECONDS)
    assert len(passed.relay) == 0
    caller.transport.resume_reading()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 20)


async def test_an_address_that_has_most_places_gets_no_more(passed, monkeypatch):
    monkeypatch.setattr(relays, "_IDLE_SECONDS", 1000.0)
    monkeypatch.setattr(relays, "_SILENT_SECONDS", 1000.0)
    for _ in range(passed.relay.places):
        await passed.open()
    caller, _ = await passed.dial()
    assert await asyncio.wait_for(caller.read(), 20) == b""
    assert len(passed.relay) == passed.relay.places == 64


async def test_one_address_cannot_take_all_places(passed):
    """Others get up to half of them; an idle connection of one's own makes room as well."""
    theirs = [await passed.open("192.0.2.7") for _ in range(passed.relay.places)]
    (first, _), _ = theirs[0]
    mine = [await passed.open("198.51.100.9") for _ in range(32)]
    assert await asyncio.wait_for(first.read(), 20) == b""
    for (_, writer), (reader, _) in mine:
        writer.write(b"here")
        assert await reader.readexactly(4) == b"here"
    networks = collections.Counter(each.network for each in passed.relay._connections)
    assert networks == {"192.0.2.7": 32, "198.51.100.9": 32}


async def test_no_connection_of_a_participant_is_closed_for_a_caller(passed, monkeypatch):
    opened = [await passed.open("192.0.2.7") for _ in range(passed.relay.places)]
    for peer in list(passed.relay._unknown)[1:]:
        passed.relay.admitted(peer)
    monkeypatch.setattr(relays, "_IDLE_SECONDS", 1000.0)
    monkeypatch.setattr(relays, "_SILENT_SECONDS", 1000.0)
    (unknown, _), _ = opened[0]
    (_, writer), (reader, _) = await passed.open("198.51.100.9")
    assert await asyncio.wait_for(unknown.read(), 20) == b""
    further, _ = await passed.dial("198.51.100.9")
    assert await asyncio.wait_for(further.read(), 20) == b""
    for (_, sender), (receiver, _) in [*opened[1:], ((None, writer), (reader, None))]:
        sender.write(b"here")
        assert await receiver.readexactly(4) == b"here"


async def test_without_a_server_behind_it_callers_are_closed(tmp_path):
    relay = Relay(str(tmp_path / "nothing"), places=64, reserved=100)
    ours, accepted = socket.socketpair()
    with ours:
        relay.take(accepted, "127.0.0.1")
        assert ours.recv(1) == b""
    assert len(relay) == 0
