"""A whole deployment on this machine: a server with mutual TLS, devices and a datacenter.

Everything is as in production: a state directory with an authority, tokens, memberships, one
process for each participant. Between each participant and the server is a proxy; with aggregators,
between each device and one of them, and between each of them and the server. Then there are a
standby of the server and a mirror as well: a web server from which devices get their models.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import sqlite3
import time
from pathlib import Path

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import joining, tls
from isthmus.job import Job
from isthmus.job.schema import with_changes
from isthmus.system.private_files import write_private_file
from isthmus.wire import operator_pb2
from isthmus_chaos.mirror_web import MirrorWeb
from isthmus_chaos.plan import (
    MIRROR,
    SERVER,
    STANDBY,
    TRUSTED,
    aggregator_names,
    datacenter_names,
    device_names,
)
from isthmus_chaos.processes import SupervisedProcess
from isthmus_chaos.proxy import DisturbedLink
from isthmus_server.cli.operators import OperatorClient
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.registry import Registry
from isthmus_server.runs.local.fork_server import ParticipantForkServer
from isthmus_server.service.server import LEASE_SECONDS

_OPERATOR = "operator"
_TOKEN_SECONDS = 600.0
_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_CANCEL_TRIES = 30
_PERSONAL_MB = 100
"""What jobs may keep on a device, such as the part of an update that compression left out."""
_PORTS = range(20_000, 32_000)
"""Ports below those that Linux gives to connections by default."""


class ChaosDeployment:
    """The processes, links and directories of one deployment."""

    def __init__(
        self,
        job: Job,
        base: Path,
        directory: Path,
        fork_server: ParticipantForkServer,
        datacenters: int,
        aggregators: int = 0,
    ) -> None:
        """Prepare a job for the deployment.

        Args:
            job: the numbers of devices and of ranks per datacenter are taken from it.
            base: the folder that the job's paths start from.
            directory: where the deployment's state is created.
            fork_server: starts the processes.
            datacenters: their number, if the job has ranks.
            aggregators: their number; each device connects to one of them.

        Raises:
            UserError: the task is not a file, or a participant is missing.
        """
        self.devices = job.federated.clients
        self.ranks = job.datacenter.ranks
        self.datacenters = datacenters if self.ranks else 0
        self.aggregators = aggregators
        if not self.devices and not self.ranks:
            raise UserError("the job starts no participants: set federated.clients, or --clients")
        self.directory = directory.absolute()
        self.server_state = self.directory / SERVER
        self.tasks = self.server_state / "tasks"
        self.processes: dict[str, SupervisedProcess] = {}
        self.links: dict[str, DisturbedLink] = {}
        self.port = 0
        """Where the server is dialed."""
        self._ports: dict[str, tuple[int, ...]] = {}
        """Where the server listens, and its standby when it has taken over, by process."""
        self.stopped = ""
        """The server process whose kernel takes connections that it does not answer."""
        self._joining = 0
        """Port where participants join."""
        self._balancer: DisturbedLink | None = None
        self._web: MirrorWeb | None = None
        self._fork_server = fork_server
        self._source = (base / job.task.source.rpartition(":")[0]).resolve()
        if not self._source.is_file():
            raise UserError(f"task.source={job.task.source!r} is no file below {base}")
        name = job.task.source.rpartition(":")[2]
        changes: dict[str, object] = {
            "task.source": f"{job.name}/{self._source.name}:{name}",
            "federated.clients": 0,
            "datacenter.ranks": 0,
            "time.lease_seconds": LEASE_SECONDS,
        }
        self._data = job.task.data_in(base)
        if self._data is not None:
            self._data = self._data.resolve()
            if not self._data.exists():
                raise UserError(f"task.data={job.task.data!r} is not there: {self._data}")
            if self._data.is_relative_to(self._source.parent):
                place = f"{job.name}/{self._data.relative_to(self._source.parent)}"
            else:
                place = f"{job.name}-data"
            changes["task.data"] = place
        self.job = with_changes(job, changes)

    @property
    def runs(self) -> Path:
        """The server's run directories."""
        return self.server_state / "runs"

    def participant_state(self, name: str) -> Path:
        """The state directory of a process."""
        return self.directory / name

    # -- begin and end -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Create a server, start it, and let every participant join and start."""
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        initialise(self.server_state, ["127.0.0.1"])
        self.copy_task()
        if self.aggregators:
            await self._start_two_servers()
        else:
            self.port = _free_pair()
            self._joining = self.port + 1
            self._start_server(SERVER, (self.port, self._joining))
        await self._until_listening()
        await self._join(_OPERATOR, "operator", self.directory / _OPERATOR)
        ports = [await self._add_aggregator(*each) for each in enumerate(self._aggregator_names())]
        for index, name in enumerate(device_names(self.devices)):
            state = self.participant_state(name)
            await self._join(name, "client", state)
            (state / "policy.toml").write_text(self._owner_policy())
            proxied = await self._proxied(name, ports[index % len(ports)] if ports else self.port)
            shard = f"{index}/{self.devices}"
            start = ["client", "start", "--state", str(state), "--server", proxied]
            own = ["--shard", shard, "--tasks", str(self.tasks), *self.data_options]
            self._add(name, [*start, *own])
        for name in datacenter_names(self.datacenters):
            state = self.participant_state(name)
            await self._join(name, "datacenter", state / "membership")
            proxied = await self._proxied(name, self.port)
            launch = ["datacenter", "launch", "--state", str(state), "--server", proxied]
            ranks = ["--ranks", str(self.ranks), "--grace", "5", "--tasks", str(self.tasks)]
            self._add(name, [*launch, *ranks, *self.data_options])

    async def _start_two_servers(self) -> None:
        """Start a server and its standby with a mirror, all of them behind proxies."""
        authority = CertificateAuthority(self.server_state)
        key_and_certificate = self.directory / "mirror.pem"
        write_private_file(key_and_certificate, b"".join(authority.server_pair()))
        (self.directory / TRUSTED).write_bytes(tls.pem(authority.certificate))
        folder = self.directory / MIRROR
        folder.mkdir()
        self._web = MirrorWeb(folder, key_and_certificate)
        await self._proxied(MIRROR, self._web.port)
        options = ["--standby", "--one-port", "--mirror", f"file:{folder}"]
        options += ["--mirror-url", self._mirror_address()]
        port = _free_pair()
        self._start_server(SERVER, (port,), *options)
        # The first one to start serves, and the other one waits for its end.
        await self._until_listening()
        self._start_server(STANDBY, (port + 1,), *options)
        # One address, as that of a balancer in front of both.
        self._balancer = DisturbedLink(self._serving_port)
        await self._balancer.listen()
        self.port = self._joining = self._balancer.port

    def _start_server(self, name: str, ports: tuple[int, ...], *options: str) -> None:
        self._ports[name] = ports
        address = f"127.0.0.1:{ports[0]}"
        start = ["server", "start", str(self.server_state), "--address", address]
        self._add(name, [*start, *options], folder=self.server_state)

    def serving(self) -> str | None:
        """The server process that listens now; None between one and the next."""
        for name, ports in self._ports.items():
            if name != self.stopped and all(map(_listens, ports)):
                return name
        return None

    @property
    def models_from_mirror(self) -> int:
        """Models that the mirror has sent."""
        return 0 if self._web is None else self._web.sent

    def _serving_port(self) -> int | None:
        name = self.serving()
        return None if name is None else self._ports[name][0]

    def _mirror_address(self) -> str:
        return f"https://127.0.0.1:{self.links[MIRROR].port}/"

    def copy_task(self) -> None:
        """Copy the task's folder to where all processes load it, and its data, if they are apart.

        A server reads data only below its tasks, so those of a job that names another folder are
        copied there.
        """
        folder = self.tasks / self.job.name
        shutil.copytree(self._source.parent, folder, ignore=self._left_out)
        if self._data is None:
            return
        copied = self.tasks / str(self.job.task.data)
        if copied.exists():
            return
        if self._data.is_dir():
            shutil.copytree(self._data, copied, ignore=self._left_out)
        else:
            shutil.copy2(self._data, copied)

    @property
    def data_options(self) -> list[str]:
        """Options that name the job's data; participants take no path from a job of a server."""
        if self.job.task.data is None:
            return []
        return ["--data", str(self.tasks / self.job.task.data)]

    async def stop(self) -> list[str]:
        """End every process; returns a sentence for each that did not end by itself."""
        problems = [
            await process.stop()
            for process in sorted(self.processes.values(), key=lambda one: one.name in self._ports)
        ]
        for link in self.links.values():
            await link.close()
        if self._balancer is not None:
            await self._balancer.close()
        if self._web is not None:
            await asyncio.to_thread(self._web.close)
        return [problem for problem in problems if problem]

    def _left_out(self, folder: str, names: list[str]) -> list[str]:
        """What is not copied with a task: results of runs, and this deployment."""
        left_out = ("__pycache__", "runs")
        return [n for n in names if n in left_out or Path(folder, n) == self.directory]

    def _add(self, name: str, arguments: list[str], folder: Path | None = None) -> None:
        process = SupervisedProcess(
            name,
            arguments,
            folder or self.participant_state(name),
            self.directory / f"{name}.control",
            self.directory / "logs" / f"{name}.log",
            self._fork_server,
        )
        self.processes[name] = process
        process.start()

    async def _proxied(self, name: str, port: int) -> str:
        """Begin a participant's link to a port; returns the address that it dials."""
        self.links[name] = DisturbedLink(port)
        await self.links[name].listen()
        return f"127.0.0.1:{self.links[name].port}"

    def _aggregator_names(self) -> list[str]:
        return aggregator_names(self.aggregators)

    async def _add_aggregator(self, index: int, name: str) -> int:
        """Have an aggregator join and start; returns the port where devices reach it."""
        state = self.participant_state(name)
        # The name in the fleet is its host, with a number for a second one there.
        fleet_name = f"127.0.0.1_{index + 1}" if index else "127.0.0.1"
        await self._join(fleet_name, "aggregator", state)
        proxied = await self._proxied(name, self.port)
        port = _free_pair()
        start = ["server", "aggregator", "start", str(state), "--server", proxied]
        self._add(name, [*start, "--address", f"127.0.0.1:{port}"])
        return port

    async def until_connected(self) -> None:
        """Wait until the server listens and every participant has a connection to it."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            links = [link for name, link in self.links.items() if name != MIRROR]
            if self.serving() and all(link.connected for link in links):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _until_listening(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while not self.serving():
            if time.monotonic() > end or self.processes[SERVER].exits:
                log = self.processes[SERVER].log.read_text(errors="replace")
                raise UserError(f"the server did not start: {log[-300:]}")
            await asyncio.sleep(_POLL_SECONDS)

    def _owner_policy(self) -> str:
        """Limits of the devices' owners that permit the job in a small fleet."""
        federated = self.job.federated
        # With aggregators there are rounds of every kind.
        is_secure = federated.secure_aggregation and not self.aggregators
        is_buffered = federated.mode == "buffered" or bool(self.aggregators)
        allowed = {
            "clients_min": "2",
            "secure_aggregation": str(is_secure).lower(),
            "buffered": str(is_buffered).lower(),
        }
        own = [f"personal_mb = {_PERSONAL_MB}"]
        if self._web is not None:
            own.append(f'server_sources = ["{self._mirror_address()}*"]')
        lines = [f"{key} = {text}" for key, text in allowed.items()]
        return "\n".join([*own, "[privacy]", *lines, ""])

    async def _join(self, name: str, kind: str, state: Path) -> None:
        """Create a token as `isthmus server token create` does, and join with it."""
        authority = CertificateAuthority(self.server_state).certificate
        token = joining.Token(os.urandom(joining.SECRET_BYTES), tls.fingerprint(authority))
        with contextlib.closing(Registry(self.server_state)) as registry:
            expires = time.time() + _TOKEN_SECONDS
            registry.add_token(token.digest, name=name, kind=kind, expires=expires)
        await joining.join(f"127.0.0.1:{self._joining}", token, state, kind)

    # -- jobs --------------------------------------------------------------------------------------

    async def submit(self, job: Job | None = None) -> str:
        """Queue the job, or a variant of it; returns its id."""
        return await asyncio.to_thread(
            lambda: OperatorClient(self.directory / _OPERATOR).submit(job or self.job)
        )

    async def cancel(self, id_: str) -> None:
        """Cancel a job, with repetitions while the server is being started.

        Raises:
            AdmissionRefused: it has ended.
        """

        def call() -> None:
            client = OperatorClient(self.directory / _OPERATOR)
            client.call("Cancel", operator_pb2.CancelRequest(id=id_), operator_pb2.CancelReply)

        for left in reversed(range(_CANCEL_TRIES)):
            try:
                await asyncio.to_thread(call)
            except AdmissionRefused as error:
                if not left or "cannot be reached" not in str(error):
                    raise
                await asyncio.sleep(1.0)
            else:
                return

    def jobs(self) -> dict[str, tuple[str, str]]:
        """State and reason of each submitted job, from the server's queue."""
        file = self.server_state / "jobs.sqlite"
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as queue:
            rows = queue.execute("SELECT name, number, state, reason FROM jobs ORDER BY number")
            return {f"{name}-{number}": (state, reason) for name, number, state, reason in rows}


def _free_pair() -> int:
    """A port that is free together with the next one.

    It is below those that the system gives to connections: a standby listens only when it takes
    over, and a process that was killed begins again at its port.
    """
    while True:
        port = random.choice(_PORTS)  # noqa: S311 - not secret
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in (port, port + 1):
                stack.enter_context(socket.create_server(("127.0.0.1", each)))
            return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
