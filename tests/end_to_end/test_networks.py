"""A fleet in networks as they are: one of its devices is far away, the others are near.

In each network the devices join, and train in a datacenter round and in a round with a secure sum,
all at port 443. `make networks` tries all of them, which takes about an hour, and prints a
line for each; the other tests try two. A case with 20 MB at 1 Mbit/s takes up to nine minutes, of
which the model's way there and that of the result back take 160 s each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end import network, real_proxies
from tests.end_to_end.network import Cable, Network
from tests.end_to_end.real_proxies import PASSWORD, PORT, USER, RealProxy
from tests.end_to_end.test_proxies import dial
from tests.end_to_end.test_several_hosts import (
    HostCommands,
    create_token,
    install_task,
    run_concurrently,
)
from tests.server.real_nginx import (
    arguments,
    certified,
    ending_configuration,
    passing_configuration,
    program,
    stream_module,
)

from isthmus_server.fleet.authority import initialise

REASON = network.missing()
ALL = os.environ.get("ISTHMUS_TEST_NETWORKS") == "all"

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

NEAR = ["phone-0", "phone-1", "phone-2"]
FAR = "clinic"
SERVER = "10.77.0.1"
WHAT = ("datacenter round", "secure round")
INSIDE = "10.78.0.2"
"""The proxy's address in the network of those that it leads out of."""

LARGE = '''

class Large(Table):
    """A model of 20 MB."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 416_000), nn.Linear(416_000, 3))
'''


@dataclasses.dataclass(frozen=True)
class Setting:
    """A network, and what is expected of it."""

    road: str = "directly"
    """`directly`, `squid`, `tinyproxy`, `ends TLS` or `passes TLS on`."""
    cable: Cable = dataclasses.field(default_factory=Cable)
    """That of the far device."""
    task: str = "Table"
    joins: bool = True
    """Whether the far device can join."""


NETWORKS = {
    "squid, CONNECT to port 443 with a password": Setting("squid"),
    "tinyproxy, CONNECT to port 443 with a password": Setting("tinyproxy"),
    "an nginx that ends TLS": Setting("ends TLS"),
    "an nginx that passes TLS on": Setting("passes TLS on"),
    "1 Mbit/s and a model of 20 MB": Setting(cable=Cable(rate=1e6), task="Large"),
    "1 Mbit/s and a model of 20 MB, behind squid": Setting(
        "squid", cable=Cable(rate=1e6), task="Large"
    ),
    "1 Mbit/s and a model of 20 MB, through an nginx that ends TLS": Setting(
        "ends TLS", cable=Cable(rate=1e6), task="Large"
    ),
    "flaps of 6 s every 20 s": Setting(cable=Cable(flap=6.0, period=20.0)),
    "300 ms there and back, and 2 % loss": Setting(cable=Cable(delay=0.15, loss=0.02)),
    "a router that forgets connections after 3 s": Setting(cable=Cable(forgets=3.0)),
    # All messages of joining may be below 1000 bytes.
    "a black hole for frames of more than 500 bytes": Setting(
        cable=Cable(largest=500), joins=False
    ),
}
USUAL = ["a router that forgets connections after 3 s", "an nginx that passes TLS on"]
"""Those that are tried without `make networks`: the rest of the suite has proxies and nginx too."""


@pytest.fixture(params=NETWORKS if ALL else USUAL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def setting(name: str) -> Setting:
    setting = NETWORKS[name]
    if setting.road in ("squid", "tinyproxy"):
        reason = real_proxies.missing(setting.road)
        if reason:
            pytest.skip(reason)
    elif setting.road != "directly":
        program()
        if setting.road == "passes TLS on":
            stream_module()
    return setting


@pytest.fixture
def commands(setting: Setting, folder: Path) -> Iterator[HostCommands]:
    behind = setting.road in ("squid", "tinyproxy")
    inside = "10.78.0" if behind else "10.77.0"
    hosts = {
        "server": f"{SERVER}/24",
        "proxy": "10.77.0.2/24",
        **{each: f"{inside}.{10 + index}/24" for index, each in enumerate([*NEAR, FAR])},
        "cluster": f"{inside}.20/24",
    }
    near = Cable(delay=0.001, loss=0.0, rate=50e6)
    cables = {**dict.fromkeys(hosts, near), FAR: setting.cable}
    with Network(hosts, cables) as network_:
        if behind:
            network_.run("proxy", ["ip", "address", "add", f"{INSIDE}/24", "dev", "eth0"])
        commands = HostCommands(network_, folder)
        try:
            yield commands
        finally:
            commands.stop()


@contextlib.contextmanager
def listening(commands: HostCommands, setting: Setting) -> Iterator[tuple[str, list[str]]]:
    """A server that is reached at port 443 by a road; its address, and options to join it."""
    folder = commands.folder
    here = f"{SERVER}:443"
    more = []
    words = "joining at"
    options: list[str] = []
    address = here
    with contextlib.ExitStack() as opened:
        if setting.road in ("ends TLS", "passes TLS on"):
            here = "127.0.0.1:9400"
            if setting.road == "ends TLS":
                authority, pair = certified(folder, [SERVER])
                text = ending_configuration(folder, pair, f"{SERVER}:443", 9480)
                options = ["--balancer-ca", str(authority)]
                address = f"wss://{SERVER}/isthmus"
                more = ["--balancer", "127.0.0.1:9480", "--balancer-trusts", "127.0.0.1"]
                words = "for balancers at 127.0.0.1:9480"
            else:
                text = passing_configuration(f"{SERVER}:443", 9400)
            # In the namespace there is no other user.
            command = commands.hosts.on(
                "server", [program(), *arguments(text, folder, user="root")]
            )
            process = subprocess.Popen(command)
            opened.callback(process.communicate, timeout=30)
            opened.callback(process.terminate)
        elif setting.road != "directly":
            opened.enter_context(RealProxy(setting.road, commands.hosts, "proxy", [443]))
            login = folder / "login"
            login.write_text(f"{USER}:{PASSWORD}\n")
            login.chmod(0o600)
            options = ["--proxy", f"http://{INSIDE}:{PORT}", "--proxy-login", str(login)]
        start = ("server", "start", "state", "--address", here, "--one-port", *more)
        commands.start("server", *start)
        commands.wait_for_log("server", words)
        first = (INSIDE, PORT) if "--proxy" in options else (SERVER, 443)
        end = time.monotonic() + 60
        while dial(commands, NEAR[0], *first):
            assert time.monotonic() < end
        yield address, options


def test_a_fleet_joins_and_trains(commands: HostCommands, name: str, setting: Setting) -> None:
    folder = commands.folder
    with (folder / "task.py").open("a") as task:
        task.write(LARGE)
    initialise(folder / "state", [SERVER])
    members = {**dict.fromkeys(NEAR, "client"), "cluster": "datacenter", "alice": "operator"}
    tokens = {each: create_token(folder / "state", each, kind) for each, kind in members.items()}
    far_token = create_token(folder / "state", FAR, "client")
    author = install_task(folder, ["state/tasks", "cluster-tasks"])
    seen = []
    with listening(commands, setting) as (address, options):
        run_concurrently(
            (
                commands.run,
                NEAR[0] if each == "alice" else each,
                *(kind, "join", address, tokens[each], "--state", each, *options),
            )
            for each, kind in members.items()
        )
        join = ("client", "join", address, far_token, "--state", FAR, *options)
        began = time.monotonic()
        code, printed = commands.tried(FAR, *join)
        # In the seconds without a network, as a person does.
        while code and time.monotonic() < began + 2 * setting.cable.flap:
            assert "cannot be reached" in printed
            code, printed = commands.tried(FAR, *join)
        took = f"{time.monotonic() - began:.1f} s"
        assert (code == 0) is setting.joins, printed
        if setting.joins:
            seen.append(f"joined in {took}")
        else:
            assert "Traceback" not in printed
            seen.append(f"did not join in {took} ({' '.join(printed.split())})")
            commands.run(NEAR[0], *join)  # as one that has worked in another network before
        phones = [*NEAR, FAR] if setting.joins else NEAR
        for each in [*NEAR, FAR]:
            (folder / each / "policy.toml").write_text(
                f"authors = ['{author.hex()}']\n[privacy]\nclients_min = 2\n"  # a small fleet
            )
            commands.start(each, "client", "start", "--state", each)
        launch = ("datacenter", "launch", "--scheduler", "local", "--ranks", "1")
        commands.start("cluster", *launch, "--state", "cluster", "--tasks", "cluster-tasks")
        changes = [
            f"task.source=table/task.py:{setting.task}",
            *("federated.clients=0", "datacenter.ranks=0", "datacenter.steps=2"),
            *(f"federated.cohort={len(phones)}", f"federated.quorum={len(phones)}"),
            *("rounds=2", "time.lease_seconds=10", "federated.secure_aggregation=true"),
            'strategy.schedule=[{regime="datacenter",rounds=1},{regime="federated",rounds=1}]',
        ]
        sets = [part for change in changes for part in ("--set", change)]
        submitted = commands.run(NEAR[0], "submit", "job.toml", "--state", "alice", *sets)
        assert submitted.endswith("table-1")
        log = commands.run(NEAR[0], "logs", "table-1", "--follow", "--state", "alice")
        assert log.endswith("table-1 finished: all rounds are done"), log
        _, printed = commands.tried(FAR, "doctor", "device", FAR, "--json")
        by_point = {each["what"]: each for each in json.loads(printed)}
        assert by_point["road"]["found"].startswith(f"connections to {address} go ")
        server = by_point["server"]
        if setting.joins:
            assert (server["level"], by_point["clock"]["level"]) == ("OK", "OK"), printed
        else:  # a handshake without certificates may be small enough
            assert "clock" not in by_point, printed
            wrong = by_point.get("answer", server)
            assert wrong["level"] == "FAIL", printed
            assert wrong["remedy"]
        points = ("road", "server", "answer", "clock")
        told = [by_point[what] for what in points if what in by_point]
        seen.append("doctor: " + ", ".join(f"{each['level']} {each['found']}" for each in told))
    report = json.loads(commands.run("server", "report", "state/runs/table-1", "--json"))
    accepted = [{each["participant"] for each in row["receipts"]} for row in report["rounds"]]
    assert accepted == [{"cluster"}, set(phones)]
    for place, (what, row) in enumerate(zip(WHAT, report["rounds"], strict=True), 1):
        seen.insert(place, f"{what} in {row['seconds']:.0f} s, attempt {row['attempt']}")
    counts = commands.hosts.close()
    seen.append(f"{counts['lost']} of {counts['lost'] + counts['carried']} frames were lost")
    print(f"\n{name}: {'; '.join(seen)}", flush=True)
