"""A server, three devices, a datacenter and an attacker, each on a separate host.

The hosts are network namespaces on a bridge with delay, loss and little bandwidth (see `network`),
for which no process is configured.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests import forked
from tests.end_to_end import network

from isthmus.identity import joining, tls
from isthmus.task import packages
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.registry import Registry

REASON = network.missing()

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

HOSTS = {
    "server": "10.77.0.1/24",
    "phone-0": "10.77.0.10/24",
    "phone-1": "10.77.0.11/24",
    "phone-2": "10.77.0.12/24",
    "cluster": "10.77.0.20/24",
    "attacker": "10.77.0.66/24",
}
PHONES = ["phone-0", "phone-1", "phone-2"]
LINK, JOINING = "10.77.0.1:9400", "10.77.0.1:9401"

ATTACKER = '''
"""Try to connect and to join without a valid token."""
import asyncio, json, sys
from pathlib import Path
import grpc, grpc.aio
from isthmus.identity import joining, tls
from isthmus.errors import AdmissionRefused
from isthmus.transport.uplink import METHOD
from isthmus.wire import link_pb2
from isthmus_server.fleet.authority import CertificateAuthority, initialise

link, joined, public, used = sys.argv[1:]

async def say_hello(channel):
    async with channel:
        call = channel.stream_stream(METHOD)()
        try:
            hello = link_pb2.Hello(name="phone-0", role=1, version_max=2, instance="x")
            await call.write(link_pb2.Envelope(hello=hello).SerializeToString())
            while await call.read() is not grpc.aio.EOF:
                return "the server answered"
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        return (await call.code()).name

async def join(token):
    try:
        await joining.join(joined, token, Path("taken"), "client")
    except AdmissionRefused as error:
        return str(error)
    return "it was admitted"

async def main():
    roots = Path(public).read_bytes()
    initialise(Path("other"), ["10.77.0.66"])
    key = tls.new_key()
    certificate, _ = CertificateAuthority(Path("other")).issue(
        tls.signing_request(key), kind="client", name="phone-0", identity=bytes(32)
    )
    secure = grpc.aio.secure_channel
    token = joining.Token.parse(used)
    guess = joining.Token(bytes(16), token.fingerprint)
    elsewhere = joining.Token(token.secret, bytes(32))
    results = {
        "in plain": say_hello(grpc.aio.insecure_channel(link)),
        "no certificate": say_hello(secure(link, grpc.ssl_channel_credentials(roots))),
        "another authority": say_hello(
            secure(link, grpc.ssl_channel_credentials(roots, tls.key_pem(key), certificate))
        ),
        "a used token": join(token),
        "a guessed token": join(guess),
        "a token for another server": join(elsewhere),
    }
    print(json.dumps({what: await work for what, work in results.items()}))

asyncio.run(main())
'''


class HostCommands:
    """Runs `isthmus` commands on the hosts and stops them at the end of the test."""

    def __init__(self, hosts: network.Network, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.running: dict[str, ForkServerProcess] = {}
        self.more_namespaces: dict[str, int] = {}
        """Entered after those of the host."""
        self.environment = {**os.environ, "COLUMNS": "200"}

    def run(self, host: str, *arguments: str) -> str:
        code, printed = self.tried(host, *arguments)
        assert code == 0, printed
        return printed

    def tried(self, host: str, *arguments: str) -> tuple[int | None, str]:
        """The exit code of a command, and what it printed."""
        namespaces = {**self.hosts.namespaces(host), **self.more_namespaces}
        process, pipe = forked.start(arguments, self.folder, self.environment, namespaces)
        with os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") as output:
            printed = output.read().strip()
        process.join()
        return process.exitcode, printed

    def start(self, host: str, *arguments: str) -> None:
        namespaces = {**self.hosts.namespaces(host), **self.more_namespaces}
        with (self.folder / f"{host}.log").open("w") as log:
            self.running[host] = forked.start_into(
                log.fileno(), arguments, self.folder, self.environment, namespaces
            )

    def wait_for_log(self, host: str, words: str) -> None:
        end = time.monotonic() + 200
        log = self.folder / f"{host}.log"
        while words not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            assert self.running[host].is_alive(), log.read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.join(30)


@pytest.fixture
def commands(folder: Path) -> Iterator[HostCommands]:
    with network.Network(HOSTS) as hosts:
        commands = HostCommands(hosts, folder)
        try:
            yield commands
        finally:
            commands.stop()


def install_task(folder: Path, directories: Sequence[str]) -> bytes:
    """Package the task and install it; returns the public key of its author."""
    author = Ed25519PrivateKey.generate()
    (folder / "table").mkdir()
    (folder / "task.py").rename(folder / "table/task.py")
    package = packages.read(packages.pack(folder / "table", "table", author))
    for directory in directories:
        packages.install(package, folder / directory, [package.author])
    return package.author


def create_token(state: Path, name: str, kind: str) -> str:
    """Create a token as `isthmus server token create` does."""
    token = joining.Token(
        os.urandom(joining.SECRET_BYTES), tls.fingerprint(CertificateAuthority(state).certificate)
    )
    with contextlib.closing(Registry(state)) as registry:
        registry.add_token(token.digest, name=name, kind=kind, expires=time.time() + 600)
    return str(token)


def run_concurrently(calls: Iterable[Sequence[Any]]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(*call) for call in calls]]


def test_the_network_is_slow_and_loses_some() -> None:
    """The network has the properties that the other test relies on."""
    size = 400_000
    listen = (
        "import socket; s = socket.create_server(('', 7)); print(flush=True); c, _ = s.accept()"
    )
    dial = (
        f"import socket; s = socket.create_connection(('10.77.0.1', 7)); s.sendall(bytes({size}))"
    )
    timed = f"import time; t = time.monotonic(); {dial}; s.shutdown(1); s.recv(1)"
    with network.Network({"a": "10.77.0.1/24", "b": "10.77.0.2/24"}) as hosts:
        code = f"{listen}\nwhile c.recv(1 << 16): pass"
        with hosts.start("a", [sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            seconds = hosts.run(
                "b", [sys.executable, "-c", f"{timed}; print(time.monotonic() - t)"]
            )
        counts = hosts.close()
    assert float(seconds) > 8 * size / network.RATE + 2 * 4 * network.DELAY
    assert counts["lost"] > 0


def test_a_job_runs_across_a_slow_network_and_an_attacker_is_refused(
    commands: HostCommands,
) -> None:
    hosts = {"alice": "phone-0"}  # the operator uses this host
    members = {**dict.fromkeys(PHONES, "client"), "cluster": "datacenter", "alice": "operator"}
    initialise(commands.folder / "state", ["10.77.0.1"])
    tokens = [create_token(commands.folder / "state", *member) for member in members.items()]
    author = install_task(commands.folder, ["state/tasks", "cluster-tasks"])
    commands.start("server", "server", "start", "state")
    commands.wait_for_log("server", "link at")
    run_concurrently(
        (commands.run, hosts.get(name, name), kind, "join", JOINING, token, "--state", name)
        for (name, kind), token in zip(members.items(), tokens, strict=True)
    )
    for name in PHONES:
        (commands.folder / name / "policy.toml").write_text(
            f"authors = ['{author.hex()}']\n[privacy]\nclients_min = 2\n"  # a small fleet
        )
        commands.start(name, "client", "start", "--state", name)
    launch = ("datacenter", "launch", "--scheduler", "local", "--ranks", "1")
    commands.start("cluster", *launch, "--state", "cluster", "--tasks", "cluster-tasks")
    changes = [
        *("task.source=table/task.py:Table", "federated.clients=0"),
        *("datacenter.ranks=0", "federated.cohort=3", "rounds=4"),
        *("time.lease_seconds=10", "federated.quorum=3"),
        'strategy.schedule=[{regime="hybrid",rounds=2},{regime="federated",rounds=2}]',
    ]
    sets = [part for change in changes for part in ("--set", change)]
    assert commands.run("phone-0", "submit", "job.toml", "--state", "alice", *sets) == "table-1"
    public = commands.folder / "phone-0/authority.pem"
    attack = [sys.executable, "-c", ATTACKER, LINK, JOINING, public, tokens[0]]
    attempts = json.loads(commands.hosts.run("attacker", attack, cwd=commands.folder))
    log = commands.run("phone-0", "logs", "table-1", "--follow", "--state", "alice")
    assert log.endswith("table-1 finished: all rounds are done"), log
    assert attempts == {
        "in plain": "UNAVAILABLE",
        "no certificate": "UNAVAILABLE",
        "another authority": "UNAVAILABLE",
        "a used token": (
            f"the server at {JOINING} refused to join this machine: this token has been used; "
            "ask the operator for another"
        ),
        "a guessed token": (
            f"the server at {JOINING} refused to join this machine: this server does not know "
            "this token, or it was used long ago"
        ),
        "a token for another server": (
            f"the server at {JOINING} is not the one this token is for; nothing was sent to it"
        ),
    }
    report = json.loads(commands.run("server", "report", "state/runs/table-1", "--json"))
    assert [row["regime"] for row in report["rounds"]] == ["hybrid"] * 2 + ["federated"] * 2
    for row in report["rounds"]:
        participants = {*PHONES} | ({"cluster"} if row["regime"] == "hybrid" else set())
        assert {receipt["participant"] for receipt in row["receipts"]} == participants
        assert {receipt["status"] for receipt in row["receipts"]} == {"accepted"}
    for name in PHONES:  # installed by the server
        assert packages.installed(commands.folder / name / "tasks", "table") is not None
    with contextlib.closing(Registry(commands.folder / "state")) as registry:
        assert {entry.name for entry in registry.participants()} == members.keys()
    counts = commands.hosts.close()
    assert counts["lost"] > 0
