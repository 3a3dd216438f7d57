"""A server, three devices and a datacenter on hosts of their own, and a stranger beside them.

The network is real and not good: namespaces on a bridge, with delay, loss and little bandwidth
(see `network`). Nobody is told anything about it.
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
from isthmus_server.control_plane.authority import CertificateAuthority, initialise
from isthmus_server.control_plane.registry import Registry

HOSTS = {
    "server": "10.77.0.1/24",
    "phone-0": "10.77.0.10/24",
    "phone-1": "10.77.0.11/24",
    "phone-2": "10.77.0.12/24",
    "cluster": "10.77.0.20/24",
    "stranger": "10.77.0.66/24",
}
PHONES = ["phone-0", "phone-1", "phone-2"]
LINK, JOINING = "10.77.0.1:9400", "10.77.0.1:9401"

STRANGER = '''
"""Every way in that somebody without a token of their own could think of."""
import asyncio, json, sys
from pathlib import Path
import grpc, grpc.aio
from isthmus.identity import joining, tls
from isthmus.errors import AdmissionRefused
from isthmus.transport.uplink import METHOD
from isthmus.wire import link_pb2
from isthmus_server.control_plane.authority import CertificateAuthority, initialise

link, joined, public, used = sys.argv[1:]

async def say_hello(channel):
    async with channel:
        call = channel.stream_stream(METHOD)()
        try:
            hello = link_pb2.Hello(name="phone-0", role=1, version_max=2, instance="x")
            await call.write(link_pb2.Envelope(hello=hello).SerializeToString())
            while await call.read() is not grpc.aio.EOF:
                return "it was heard"
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        return (await call.code()).name

async def join(token):
    try:
        await joining.join(joined, token, Path("taken"), "client")
    except AdmissionRefused as error:
        return str(error)
    return "it was let in"

async def main():
    roots = Path(public).read_bytes()
    initialise(Path("mine"), ["10.77.0.66"])
    key = tls.new_key()
    mine, _ = CertificateAuthority(Path("mine")).issue(
        tls.signing_request(key), kind="client", name="phone-0", identity=bytes(32)
    )
    secure = grpc.aio.secure_channel
    token = joining.Token.parse(used)
    guess = joining.Token(bytes(16), token.fingerprint)
    elsewhere = joining.Token(token.secret, bytes(32))
    found = {
        "in plain": say_hello(grpc.aio.insecure_channel(link)),
        "no certificate": say_hello(secure(link, grpc.ssl_channel_credentials(roots))),
        "another authority": say_hello(
            secure(link, grpc.ssl_channel_credentials(roots, tls.key_pem(key), mine))
        ),
        "a used token": join(token),
        "a guessed token": join(guess),
        "a token for another server": join(elsewhere),
    }
    print(json.dumps({what: await work for what, work in found.items()}))

asyncio.run(main())
'''


class Fleet:
    """Types on each of the hosts; what runs there ends with the test."""

    def __init__(self, hosts: network.Network, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.running: dict[str, ForkServerProcess] = {}
        self.environment = {**os.environ, "COLUMNS": "200"}

    def type(self, host: str, *arguments: str) -> str:
        where = self.hosts.namespaces(host)
        process, pipe = forked.start(arguments, self.folder, self.environment, where)
        with os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") as output:
            said = output.read().strip()
        process.join()
        assert process.exitcode == 0, said
        return said

    def start(self, host: str, *arguments: str) -> None:
        where = self.hosts.namespaces(host)
        with (self.folder / f"{host}.log").open("w") as log:
            self.running[host] = forked.start_into(
                log.fileno(), arguments, self.folder, self.environment, where
            )

    def until_said(self, host: str, words: str) -> None:
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
def fleet(folder: Path) -> Iterator[Fleet]:
    with network.Network(HOSTS) as hosts:
        fleet = Fleet(hosts, folder)
        try:
            yield fleet
        finally:
            fleet.stop()


def packed(folder: Path, places: Sequence[str]) -> bytes:
    """Pack the task and install it in some places; returns its author's public key."""
    author = Ed25519PrivateKey.generate()
    (folder / "table").mkdir()
    (folder / "task.py").rename(folder / "table/task.py")
    package = packages.read(packages.pack(folder / "table", "table", author))
    for place in places:
        packages.install(package, folder / place, [package.author])
    return package.author


def token(state: Path, name: str, kind: str) -> str:
    """What `isthmus server token create` prints."""
    made = joining.Token(
        os.urandom(joining.SECRET_BYTES), tls.fingerprint(CertificateAuthority(state).certificate)
    )
    with contextlib.closing(Registry(state)) as registry:
        registry.add_token(made.digest, name=name, kind=kind, expires=time.time() + 600)
    return str(made)


def at_once(works: Iterable[Sequence[Any]]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return [work.result() for work in [pool.submit(*work) for work in works]]


def test_the_network_is_slow_and_loses_some() -> None:
    """What the other test says of its network."""
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
            took = hosts.run("b", [sys.executable, "-c", f"{timed}; print(time.monotonic() - t)"])
        counted = hosts.close()
    assert float(took) > 8 * size / network.RATE + 2 * 4 * network.DELAY
    assert counted["lost"] > 0


def test_a_job_crosses_a_real_network_and_a_stranger_on_it_gets_nowhere(fleet: Fleet) -> None:
    where = {"alice": "phone-0"}  # an operator needs no machine of their own
    everybody = {**dict.fromkeys(PHONES, "client"), "cluster": "datacenter", "alice": "operator"}
    initialise(fleet.folder / "state", ["10.77.0.1"])
    tokens = [token(fleet.folder / "state", *who) for who in everybody.items()]
    author = packed(fleet.folder, ["state/tasks", "cluster-tasks"])
    fleet.start("server", "server", "start", "state")
    fleet.until_said("server", "link at")
    at_once(
        (fleet.type, where.get(name, name), kind, "join", JOINING, token, "--state", name)
        for (name, kind), token in zip(everybody.items(), tokens, strict=True)
    )
    for name in PHONES:
        (fleet.folder / name / "policy.toml").write_text(f"authors = ['{author.hex()}']\n")
        fleet.start(name, "client", "start", "--state", name)
    launch = ("datacenter", "launch", "--scheduler", "local", "--ranks", "1")
    fleet.start("cluster", *launch, "--state", "cluster", "--tasks", "cluster-tasks")
    changes = [
        *("task.source=table/task.py:Table", "federated.clients=0"),
        *("datacenter.ranks=0", "federated.cohort=3", "rounds=4"),
        *("time.lease_seconds=10", "federated.quorum=3"),
        'strategy.schedule=[{regime="hybrid",rounds=2},{regime="federated",rounds=2}]',
    ]
    sets = [part for change in changes for part in ("--set", change)]
    assert fleet.type("phone-0", "submit", "job.toml", "--state", "alice", *sets) == "table-1"
    public = fleet.folder / "phone-0/authority.pem"
    attack = [sys.executable, "-c", STRANGER, LINK, JOINING, public, tokens[0]]
    met = json.loads(fleet.hosts.run("stranger", attack, cwd=fleet.folder))
    said = fleet.type("phone-0", "logs", "table-1", "--follow", "--state", "alice")
    assert said.endswith("table-1 finished"), said
    assert met == {
        "in plain": "UNAVAILABLE",
        "no certificate": "UNAVAILABLE",
        "another authority": "UNAVAILABLE",
        "a used token": (
            f"the server at {JOINING} said no: this token has been used; ask the operator for "
            "another"
        ),
        "a guessed token": (
            f"the server at {JOINING} said no: this token is not known here, or was made too long "
            "ago"
        ),
        "a token for another server": (
            f"the server at {JOINING} is not the one this token is for; nothing was sent to it"
        ),
    }
    report = json.loads(fleet.type("server", "report", "state/runs/table-1", "--json"))
    assert [row["regime"] for row in report["rounds"]] == ["hybrid"] * 2 + ["federated"] * 2
    for row in report["rounds"]:
        took_part = {*PHONES} | ({"cluster"} if row["regime"] == "hybrid" else set())
        assert {one["participant"] for one in row["receipts"]} == took_part
        assert {one["status"] for one in row["receipts"]} == {"accepted"}
    for name in PHONES:  # they had no task of their own
        assert packages.installed(fleet.folder / name / "tasks", "table") is not None
    with contextlib.closing(Registry(fleet.folder / "state")) as registry:
        assert {entry.name for entry in registry.participants()} == everybody.keys()
    counted = fleet.hosts.close()
    assert counted["lost"] > 0
