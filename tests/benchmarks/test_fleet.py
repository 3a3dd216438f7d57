"""The parts of the fleet's benchmark; its figures are its own."""

import asyncio

from device_fleet import socket_floor
from device_fleet.devices import Crowd, Round, value
from device_fleet.interruptions import Wire


def test_the_notes_of_two_processes_are_one_round():
    one = Round(begun=2.0, received=3, replied=2, replied_at=5.0, settled=1, settled_at=6.0)
    two = Round(begun=1.0, received=1, replied=1, replied_at=4.0)
    assert one.with_(two) == Round(1.0, 4, 3, 5.0, 1, 6.0)
    assert one.with_(Round()) == one


def test_an_update_is_encoded_under_the_header_of_the_run_and_named_by_what_it_is():
    crowd = Crowd()
    crowd.open(b"12345678")
    payload, name = crowd.update(value(2), 8 + 8)
    assert payload == b"12345678" + b"\0\0\x40\x40" * 2  # 3.0, twice
    assert name.size == 16
    assert crowd.update(value(2), 16)[0] is payload
    crowd.open(b"87654321")
    assert crowd.update(value(2), 16)[1].sha256 != name.sha256


def test_the_floor_ends_with_a_reply_of_everybody():
    seconds, cpu = socket_floor.broadcast(connections=5, size=600_000, processes=2, repeats=2)
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert cpu >= 0


async def test_a_wire_counts_what_passes_and_both_ends_see_its_cut():
    async def echo(reader, writer):
        while data := await reader.read(100):
            writer.write(data.upper())
        ended.set()
        writer.close()

    ended = asyncio.Event()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    wire = Wire(server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", await wire.listen())
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"HELLO"
    assert (wire.up, wire.down, wire.cuts) == (5, 5, 0)
    wire.cut()
    async with asyncio.timeout(100):
        assert await reader.read() == b""
        await ended.wait()
    assert wire.cuts == 1
    writer.close()
    wire.close()
    server.close()
