"""The simulated devices, the proxy and the lower bound of the fleet benchmark."""

import asyncio
import shutil
import ssl
import urllib.request

import pytest
from device_fleet import socket_floor
from device_fleet.devices import DeviceGroup, RoundProgress, value
from device_fleet.interruptions import CuttableProxy
from device_fleet.static_web import static_web


def test_the_progress_of_two_processes_is_merged():
    one = RoundProgress(
        started_at=2.0, received=3, replied=2, replied_at=5.0, accepted=1, accepted_at=6.0
    )
    two = RoundProgress(started_at=1.0, received=1, replied=1, replied_at=4.0)
    assert one.merged(two) == RoundProgress(1.0, 4, 3, 5.0, 1, 6.0)
    assert one.merged(RoundProgress()) == one


def test_an_update_is_encoded_with_the_header_of_the_run_and_cached():
    group = DeviceGroup()
    group.open(b"12345678")
    payload, name = group.update(value(2), 8 + 8)
    assert payload == b"12345678" + b"\0\0\x40\x40" * 2  # 3.0, twice
    assert name.size == 16
    assert group.update(value(2), 16)[0] is payload
    group.open(b"87654321")
    assert group.update(value(2), 16)[1].sha256 != name.sha256


def test_as_many_updates_differ_as_are_wanted():
    assert [value(index, 3) for index in range(5)] == [1.0, 2.0, 3.0, 1.0, 2.0]


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_web_server_has_the_files_of_its_folder(tmp_path, monkeypatch, is_installed):
    if not is_installed:
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    elif not shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"):
        pytest.skip("there is no nginx; install nginx-light")
    with static_web(tmp_path) as web:
        assert web.named == ("nginx" if is_installed else "Python")
        (web.folder / "file").write_bytes(b"data")
        context = ssl.create_default_context(cafile=str(web.certificate))
        with urllib.request.urlopen(f"{web.address}file", context=context) as answer:
            assert answer.read() == b"data"
        assert web.cpu_seconds() >= 0


def test_the_socket_floor_waits_for_all_replies():
    seconds, cpu = socket_floor.broadcast(connections=5, size=600_000, processes=2, repeats=2)
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert cpu >= 0


async def test_the_proxy_counts_bytes_and_its_cut_reaches_both_ends():
    async def echo(reader, writer):
        while data := await reader.read(100):
            writer.write(data.upper())
        ended.set()
        writer.close()

    ended = asyncio.Event()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = CuttableProxy(server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", await proxy.listen())
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"HELLO"
    assert (proxy.up, proxy.down, proxy.cuts) == (5, 5, 0)
    proxy.cut()
    async with asyncio.timeout(100):
        assert await reader.read() == b""
        await ended.wait()
    assert proxy.cuts == 1
    writer.close()
    proxy.close()
    server.close()
