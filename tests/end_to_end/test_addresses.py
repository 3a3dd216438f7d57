"""A fleet over IPv6, whose server has a name of several addresses, most of which are dead.

The hosts are network namespaces (see `network`), in which the name is known by a file of its own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end import network
from tests.end_to_end.network import Cable
from tests.end_to_end.secret_fleet import PHONES, SecretFleet, commands_on
from tests.end_to_end.test_several_hosts import HostCommands

REASON = network.missing()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

_CLONE_NEWNS = 0x00020000
NAME = "fleet.example.org"
SERVER = "fd77::1"
SIXTH = {"server": SERVER, **{name: f"fd77::1{index}" for index, name in enumerate(PHONES)}}
HOSTS = {
    "server": "10.77.0.1/24",
    **{name: f"10.77.0.1{index}/24" for index, name in enumerate(PHONES)},
    "silent": "10.77.0.98/24",
}
DEAD = ["10.77.0.98", "10.77.0.99", "fd77::99"]
"""Addresses of a host that answers nothing, and of none at all, one of them of IPv6."""
KNOWN = "".join(f"{address} {NAME}\n" for address in [*DEAD, SERVER])


@pytest.fixture
def commands(folder: Path) -> Iterator[HostCommands]:
    near = Cable(delay=0.001, loss=0.0, rate=50e6)
    cables = {**dict.fromkeys(HOSTS, near), "silent": Cable(loss=1.0)}
    with network.Network(HOSTS, cables) as hosts:
        for host, address in SIXTH.items():
            # Without the second in which others are asked whether they have it.
            added = ["ip", "address", "add", f"{address}/64", "dev", "eth0", "nodad"]
            hosts.run(host, added)
        for host in PHONES:  # so that nothing tells them that it is dead
            neighbour = ["10.77.0.98", "lladdr", "02:00:00:00:00:98", "dev", "eth0"]
            hosts.run(host, ["ip", "neighbour", "replace", *neighbour])
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{KNOWN}")
        mount = f"mount --bind {folder}/hosts /etc/hosts && echo ready && exec sleep 600"
        holder = hosts.start(
            "server", ["unshare", "--mount", "sh", "-c", mount], stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        try:
            with commands_on(hosts, folder) as commands:
                commands.more_namespaces = {f"/proc/{holder.pid}/ns/mnt": _CLONE_NEWNS}
                yield commands
        finally:
            holder.kill()
            holder.communicate()


def test_a_fleet_joins_and_trains_in_secret(commands: HostCommands, folder: Path) -> None:
    fleet = SecretFleet(commands, folder, NAME)
    listen = ("--address", f"[{SERVER}]:9400")
    commands.start("server", "server", "start", "state", *listen)
    commands.wait_for_log("server", "link at")
    fleet.join(f"{NAME}:9401")
    fleet.train()
    found = json.loads(commands.run("phone-1", "doctor", "device", "phone-1", "--json"))
    by_point = {each["what"]: each for each in found}
    assert (by_point["server"]["level"], by_point["clock"]["level"]) == ("OK", "OK")
    assert by_point["server"]["found"] == f"{NAME}:9400 accepts connections"
    fleet.check_all_took_part()
