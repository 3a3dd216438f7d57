"""Devices that reach a server only through an nginx that ends TLS, one of them through squid.

The hosts are network namespaces (see `network`). The server itself listens on loopback only.
"""

from __future__ import annotations

import errno
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end import network, real_proxies
from tests.end_to_end.real_proxies import PASSWORD, PORT, USER, RealProxy
from tests.end_to_end.secret_fleet import MEMBERS, SecretFleet, commands_on
from tests.end_to_end.test_proxies import dial
from tests.end_to_end.test_several_hosts import HostCommands
from tests.server.real_nginx import arguments, certified, ending_configuration, program

REASON = network.missing() or real_proxies.missing("squid")

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

HOSTS = {
    "server": "10.77.0.1/24",
    "proxy": "10.77.0.2/24",
    "phone-0": "10.77.0.10/24",
    "phone-1": "10.78.0.10/24",
    "phone-2": "10.77.0.12/24",
}
INSIDE = "10.78.0.2"
"""The proxy's address in the network of `phone-1`, from which no route leads to nginx."""
ADDRESS = "wss://10.77.0.1/isthmus"


@pytest.fixture
def commands(folder: Path) -> Iterator[HostCommands]:
    with network.Network(HOSTS) as hosts:
        hosts.run("proxy", ["ip", "address", "add", f"{INSIDE}/24", "dev", "eth0"])
        with commands_on(hosts, folder) as commands:
            yield commands


@pytest.fixture
def authority(commands: HostCommands, folder: Path) -> Iterator[Path]:
    """The authority of nginx's certificate, while nginx runs."""
    found, pair = certified(folder, ["10.77.0.1"])
    text = ending_configuration(folder, pair, "10.77.0.1:443", 9480)
    # In the namespace there is no other user.
    command = commands.hosts.on("server", [program(), *arguments(f"user root;\n{text}", folder)])
    process = subprocess.Popen(command)
    try:
        yield found
    finally:
        process.terminate()
        process.communicate(timeout=30)


def wait_for(commands: HostCommands, host: str, address: str, port: int) -> None:
    end = time.monotonic() + 60
    while dial(commands, host, address, port):
        assert time.monotonic() < end


def test_devices_join_and_train_in_secret_through_a_balancer(
    commands: HostCommands, authority: Path, folder: Path
) -> None:
    fleet = SecretFleet(commands, folder, "10.77.0.1")
    login = folder / "login"
    login.write_text(f"{USER}:{PASSWORD}\n")
    login.chmod(0o600)
    balanced = ("--balancer", "127.0.0.1:9480", "--balancer-trusts", "127.0.0.1")
    commands.start(
        "server", "server", "start", "state", "--address", "127.0.0.1:9400", "--one-port", *balanced
    )
    commands.wait_for_log("server", "for balancers at 127.0.0.1:9480")
    with RealProxy("squid", commands.hosts, "proxy", [443]) as proxy:
        wait_for(commands, "phone-1", INSIDE, PORT)
        wait_for(commands, "phone-0", "10.77.0.1", 443)
        for port in (9400, 9480):
            assert dial(commands, "phone-0", "10.77.0.1", port) == errno.ECONNREFUSED
        assert dial(commands, "phone-1", "10.77.0.1", 443) == errno.ENETUNREACH
        ways = {name: ["--balancer-ca", str(authority)] for name in MEMBERS}
        ways["phone-1"] += ["--proxy", f"http://{INSIDE}:{PORT}", "--proxy-login", str(login)]
        fleet.join(ADDRESS, ways)
        fleet.train()
        found = json.loads(commands.run("phone-1", "doctor", "device", "phone-1", "--json"))
        checked = json.loads(
            commands.run(
                "server",
                *("doctor", "server", "state", "--address", "127.0.0.1:9400", "--one-port"),
                *("--balancer", "127.0.0.1:9480", "--json"),
            )
        )
        assert "CONNECT 10.77.0.1:443" in proxy.requests()
    fleet.check_all_took_part()
    by_point = {each["what"]: each for each in found}
    assert by_point["road"]["found"] == (
        f"connections to {ADDRESS} go through the proxy http://{INSIDE}:{PORT} (--proxy when it "
        "joined), in a WebSocket through the balancer 10.77.0.1:443"
    )
    assert (by_point["server"]["level"], by_point["clock"]["level"]) == ("OK", "OK")
    roads = {each["what"]: each for each in checked}
    assert roads["balancer"]["found"] == "the server takes WebSockets at 127.0.0.1:9480"
