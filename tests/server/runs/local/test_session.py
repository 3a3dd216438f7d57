import asyncio
import os
import tempfile

import pytest
from rich.console import Console
from tests.free_ports import free_ports
from tests.server.listeners import RecordingListener

from isthmus.errors import UserError
from isthmus.identity.tls import is_socket
from isthmus.transport.uplink import Uplink
from isthmus.wire import link_pb2
from isthmus_server.runs.local.session import LocalRun, running_participants
from isthmus_server.transport.link import Link


def listening(make_job, tmp_path, address, link):
    """A local run that starts no process: its job has no devices and no ranks."""
    return running_participants(
        make_job(), link, address, tmp_path, None, lambda name, role, reason: None
    )


@pytest.mark.parametrize("way", ["the socket", "an address"])
async def test_participants_connect_where_a_local_run_listens(make_job, tmp_path, way):
    link, listener = Link(10.0), RecordingListener()
    link.listeners.attach(listener)
    port = free_ports(1)
    async with listening(make_job, tmp_path, ("127.0.0.1", port), link) as processes:
        assert is_socket(processes.address)  # for its own processes, whose code it decides
        address = processes.address if way == "the socket" else f"127.0.0.1:{port}"
        uplink = Uplink(address, "a", link_pb2.CLIENT, None)
        connecting = asyncio.create_task(uplink.run())
        await listener.event.wait()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)


async def test_without_an_address_no_other_user_can_connect(make_job, tmp_path):
    async with listening(make_job, tmp_path, None, Link(10.0)) as processes:
        directory = os.path.dirname(processes.address.removeprefix("unix:"))  # noqa: PTH120
        assert os.stat(directory).st_mode & 0o077 == 0  # noqa: PTH116
        assert sorted(os.listdir(directory)) == ["link", "lock"]  # noqa: PTH208
    assert not os.access(directory, os.F_OK)


async def test_a_temporary_path_too_long_for_a_socket_is_reported(make_job, tmp_path, monkeypatch):
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(UserError, match=r"is too long a path for a socket; set TMPDIR to"):
        async with listening(make_job, tmp_path, None, Link(10.0)):
            pass


@pytest.mark.parametrize("address", [None, ("127.0.0.1", 0)])
async def test_files_are_opened_for_processes_of_the_private_socket_only(
    make_job, tmp_path, address, monkeypatch
):
    """Any user of the machine reaches an address, and could name files of this one."""

    class Stopped(Exception):
        pass

    def stopped(link, events):
        raise Stopped(link.shares_memory)

    run = LocalRun.new(make_job(), tmp_path, tmp_path / "run")
    monkeypatch.setattr(run, "_made_loop", stopped)
    with pytest.raises(Stopped) as found:
        await run.run(address, Console(quiet=True), None)
    assert found.value.args == (address is None,)
