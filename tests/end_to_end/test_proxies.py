"""Devices and a datacenter in a network that only an HTTP proxy of the distribution leads out of.

The hosts are network namespaces (see `network`): they have addresses of their own network, and no
route to the server's.
"""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end import network, real_proxies
from tests.end_to_end.real_proxies import PASSWORD, PORT, USER, RealProxy
from tests.end_to_end.test_several_hosts import (
    HostCommands,
    create_token,
    install_task,
    run_concurrently,
)

from isthmus_server.fleet.authority import initialise

REASON = network.missing()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

PHONES = ["phone-0", "phone-1", "phone-2"]
HOSTS = {
    "server": "10.77.0.1/24",
    "proxy": "10.77.0.2/24",
    **{name: f"10.78.0.{10 + index}/24" for index, name in enumerate(PHONES)},
    "cluster": "10.78.0.20/24",
}
INSIDE = "10.78.0.2"
"""The proxy's address in the devices' network."""
LINK, JOINING = "10.77.0.1:9400", "10.77.0.1:9401"


@pytest.fixture(params=["tinyproxy", "squid"])
def kind(request: pytest.FixtureRequest) -> str:
    reason = real_proxies.missing(request.param)
    if reason:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def commands(folder: Path) -> Iterator[HostCommands]:
    with network.Network(HOSTS) as hosts:
        hosts.run("proxy", ["ip", "address", "add", f"{INSIDE}/24", "dev", "eth0"])
        commands = HostCommands(hosts, folder)
        try:
            yield commands
        finally:
            commands.stop()


def dial(commands: HostCommands, host: str, address: str, port: int) -> int:
    """The error number of a connection from a host; 0 if there is one."""
    code = f"import socket; print(socket.socket().connect_ex(({address!r}, {port})))"
    return int(commands.hosts.run(host, [sys.executable, "-IS", "-c", code]))


def test_a_fleet_behind_a_proxy_joins_and_trains(commands: HostCommands, kind: str) -> None:
    members = {**dict.fromkeys(PHONES, "client"), "cluster": "datacenter", "alice": "operator"}
    initialise(commands.folder / "state", ["10.77.0.1"])
    tokens = [create_token(commands.folder / "state", *member) for member in members.items()]
    author = install_task(commands.folder, ["state/tasks", "cluster-tasks"])
    login = commands.folder / "login"
    login.write_text(f"{USER}:{PASSWORD}\n")
    login.chmod(0o600)
    commands.start("server", "server", "start", "state")
    commands.wait_for_log("server", "link at")
    with RealProxy(kind, commands.hosts, "proxy", [9400, 9401]) as proxy:
        end = time.monotonic() + 60
        while dial(commands, "phone-0", INSIDE, PORT):
            assert time.monotonic() < end
        assert dial(commands, "phone-0", "10.77.0.1", 9400) == errno.ENETUNREACH
        way = ("--proxy", f"http://{INSIDE}:{PORT}", "--proxy-login", str(login))
        hosts = {"alice": "phone-0"}  # the operator uses this host
        run_concurrently(
            (
                commands.run,
                hosts.get(name, name),
                *(role, "join", JOINING, token),
                "--state",
                name,
                *way,
            )
            for (name, role), token in zip(members.items(), tokens, strict=True)
        )
        for name in PHONES:
            (commands.folder / name / "policy.toml").write_text(
                f"authors = ['{author.hex()}']\n[privacy]\nclients_min = 2\n"  # a small fleet
            )
            commands.start(name, "client", "start", "--state", name)
        launch = ("datacenter", "launch", "--scheduler", "local", "--ranks", "1")
        commands.start("cluster", *launch, "--state", "cluster", "--tasks", "cluster-tasks")
        changes = [
            *("task.source=table/task.py:Table", "federated.clients=0", "datacenter.ranks=0"),
            *("federated.cohort=3", "federated.quorum=3", "federated.secure_aggregation=true"),
            *("rounds=2", "time.lease_seconds=10"),
            'strategy.schedule=[{regime="datacenter",rounds=1},{regime="federated",rounds=1}]',
        ]
        sets = [part for change in changes for part in ("--set", change)]
        assert commands.run("phone-0", "submit", "job.toml", "--state", "alice", *sets).endswith(
            "table-1"
        )
        log = commands.run("phone-0", "logs", "table-1", "--follow", "--state", "alice")
        assert log.endswith("table-1 finished: all rounds are done"), log
        found = json.loads(commands.run("phone-0", "doctor", "device", "phone-0", "--json"))
        requests = proxy.requests()
    report = json.loads(commands.run("server", "report", "state/runs/table-1", "--json"))
    accepted = [{receipt["participant"] for receipt in row["receipts"]} for row in report["rounds"]]
    assert accepted == [{"cluster"}, set(PHONES)]
    road = f"connections to {LINK} go through the proxy http://{INSIDE}:{PORT}"
    for name in (*PHONES, "cluster"):
        text = (commands.folder / f"{name}.log").read_text()
        assert text.count(f"{road} (--proxy when it joined)") == 1
        assert PASSWORD not in text
    by_point = {each["what"]: each for each in found}
    assert by_point["road"]["found"] == f"{road} (--proxy when it joined)"
    assert (by_point["server"]["level"], by_point["clock"]["level"]) == ("OK", "OK")
    for address in (LINK, JOINING):
        assert f"CONNECT {address}" in requests
