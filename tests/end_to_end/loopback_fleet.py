"""A server, devices, a datacenter and an operator on loopback: each a real process that has joined.

with LoopbackFleet(folder, devices=3) as fleet:
    fleet.start_datacenter()
    job = fleet.submit("job.toml", "rounds=3")
    fleet.until(lambda: fleet.committed(job) == 3)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests import forked

from isthmus.identity import joining, tls
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.registry import Registry

T = TypeVar("T")

DATACENTER = "cluster"


class LoopbackFleet:
    """Processes of one fleet, which end with the block; `folder/tasks` has the task of all."""

    def __init__(
        self,
        folder: Path,
        devices: int,
        policies: Mapping[str, str] | None = None,
        device_tasks: str = "tasks",
        data: str | None = None,
        serving: Sequence[str] = ("--address", "127.0.0.1:0"),
        address: str = "",
        prelude: str = "",
        privacy: str = "clients_min = 2",
        aggregators: Sequence[str] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            folder: of the fleet.
            devices: how many.
            policies: further lines of a device's policy by its name.
            device_tasks: the folder with the tasks of the devices.
            data: the folder with the data of all devices, by `--data`; None for the job's.
            serving: options of the server.
            address: where participants join; by default where the server listens.
            prelude: Python code that the server's process runs first.
            privacy: what the policy of each device says of privacy.
            aggregators: names of aggregators, which the devices are divided among.
        """
        self.folder = folder
        self._devices = devices
        self._policies = policies or {}
        self._device_tasks = device_tasks
        self._data = () if data is None else ("--data", data)
        self._serving = serving
        self._address = address
        self._prelude = prelude
        self._privacy = privacy
        self._aggregators = tuple(aggregators)
        self._join_at = ""
        self._links: list[str] = []
        """Addresses of the aggregators, and of the server, where devices connect."""
        self._state = folder / "state"
        self._environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        self._running: dict[str, ForkServerProcess] = {}

    def __enter__(self) -> LoopbackFleet:
        initialise(self._state, ["127.0.0.1", "localhost"])
        (self._state / "tasks").symlink_to(self.folder / "tasks")
        try:
            self.start_server("server", *self._serving)
            ports = self.until(
                lambda: re.search(r"link .*joining at 127.0.0.1:(\d+)", self.log("server"))
            )
            address = self._join_at = self._address or f"localhost:{ports[1]}"
            for name in self._aggregators:
                self._join(address, name, "aggregator", self.folder / name)
                self.start_aggregator(name)
            for index in range(self._devices):
                self._join(address, f"phone-{index}", "client", self.folder / f"phone-{index}")
            self._join(address, DATACENTER, "datacenter", self.folder / DATACENTER / "membership")
            self._join(address, "alice", "operator", self.folder / "alice")
            for index in range(self._devices):
                name = f"phone-{index}"
                policy = f"[privacy]\n{self._privacy}\n"
                policy = self._policies.get(name, "") + policy
                (self.folder / name / "policy.toml").write_text(policy)
                self.start_device(index)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for process in self._running.values():
            process.terminate()
            assert process.pid is not None
            # A test may have stopped it. One that has nothing to do has ended in a tenth of a
            # second, for which this process may have to wait on a busy machine.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        for process in self._running.values():
            process.join(30)
            process.kill()
            process.join()

    def start_server(self, name: str, *options: str) -> None:
        """Start a server of the fleet's directory."""
        arguments = ("server", "start", "state", *options)
        if not self._prelude:
            self.start(name, *arguments)
            return
        code = f"{self._prelude}\nimport sys\nfrom isthmus import cli\nsys.argv[0] = 'isthmus'\n"
        words = ["python", "-c", code + "cli.main()", *arguments]
        with (self.folder / f"{name}.log").open("a") as log, Path(os.devnull).open() as nothing:
            streams = (nothing.fileno(), log.fileno(), log.fileno())
            self._running[name] = forked.start_with(streams, words, self.folder, self._environment)

    def send(self, name: str, number: int) -> None:
        """Send a signal to a process."""
        os.kill(self.pid(name), number)

    def pid(self, name: str) -> int:
        """The id of a process."""
        pid = self._running[name].pid
        assert pid is not None
        return pid

    def ended(self, name: str) -> int | None:
        """Wait until a process has ended by itself; returns its exit status."""
        process = self._running.pop(name)
        process.join()
        return process.exitcode

    def start_device(self, index: int) -> None:
        """Start a device, also one that was killed."""
        name = f"phone-{index}"
        shard = f"{index}/{self._devices}"
        where = ("--state", name, "--tasks", self._device_tasks, *self._data)
        if self._links:
            # Each its own aggregator first, and the server last.
            own = index % len(self._links)
            own_first = (*self._links[own:], *self._links[:own], self._server_link())
            where += tuple(word for each in own_first for word in ("--server", each))
        work = ("client", "start", *where, "--shard", shard)
        self.start(name, *work)

    def start_aggregator(self, name: str, *options: str) -> None:
        """Start an aggregator that has joined; returns when devices can connect."""
        options = options or ("--address", "127.0.0.1:0")
        self.start(name, "server", "aggregator", "start", name, *options)
        found = self.until(lambda: re.search(r"devices at (\S+),", self.log(name)))
        self._links.append(found[1])

    def _server_link(self) -> str:
        found = re.search(r"link at (\S+),", self.log("server"))
        assert found is not None
        return found[1]

    def kill(self, name: str) -> None:
        """End a process at once, as a crash does."""
        process = self._running.pop(name)
        process.kill()
        process.join()

    def start_datacenter(self, ranks: int = 1) -> None:
        """Start the datacenter."""
        launch = ("datacenter", "launch", "--scheduler", "local", "--ranks", str(ranks))
        where = ("--state", DATACENTER, "--tasks", "tasks", *self._data)
        self.start(DATACENTER, *launch, *where)

    def submit(self, job: str, *changes: str) -> str:
        """Submit a job with changes to its keys; returns its name on the server."""
        sets = [part for change in changes for part in ("--set", change)]
        return self.run("submit", job, "--state", "alice", *sets)

    def run(self, *arguments: str) -> str:
        """Run a command to its end and return its output."""
        process, pipe = forked.start(arguments, self.folder, self._environment)
        with os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") as output:
            printed = output.read().strip()
        process.join()
        assert process.exitcode == 0, printed
        return printed

    def log(self, name: str) -> str:
        """What a process has printed so far."""
        return (self.folder / f"{name}.log").read_text()

    def directory(self, job: str) -> Path:
        """The run directory of a job."""
        return self._state / "runs" / job

    def attempts(self, job: str) -> list[tuple[int, str]]:
        """Round and state of each attempt of a job, in order."""
        return self._rows(job, "SELECT round, state FROM attempts ORDER BY round, attempt")

    def committed(self, job: str) -> int:
        """Rounds that a job has committed; -1 before its first attempt at one."""
        rows = self._rows(job, "SELECT state FROM attempts")
        return sum(state == "committed" for (state,) in rows) if rows else -1

    def datacenter_is_ready(self, job: str) -> bool:
        """Whether the datacenter has opened the job's run."""
        events = [json.loads(event) for (event,) in self._rows(job, "SELECT event FROM events")]
        return any(
            event["kind"] == "ready" and event["participant"] == DATACENTER for event in events
        )

    def until(self, condition: Callable[[], T | None]) -> T:
        """Wait for what the processes leave on disk, and return it."""
        end = time.monotonic() + 200
        while not (found := condition()):
            logs = {name: self.log(name)[-2000:] for name in self._running}
            assert time.monotonic() < end, logs
            assert all(process.is_alive() for process in self._running.values()), logs
            time.sleep(0.05)  # files can only be polled
        return found

    def _rows(self, job: str, query: str) -> list[Any]:
        if not (self.directory(job) / "job.json").exists():
            return []
        path = self.directory(job) / "run.sqlite"
        with contextlib.closing(sqlite3.connect(path, timeout=100)) as log:
            return log.execute(query).fetchall()

    def start(self, name: str, *arguments: str) -> None:
        """Start a command that goes on; what it prints is `log(name)`."""
        with (self.folder / f"{name}.log").open("a") as log:
            self._running[name] = forked.start_into(
                log.fileno(), arguments, self.folder, self._environment
            )

    def _join(self, address: str, name: str, kind: str, directory: Path) -> None:
        fingerprint = tls.fingerprint(CertificateAuthority(self._state).certificate)
        token = joining.Token(os.urandom(joining.SECRET_BYTES), fingerprint)
        with contextlib.closing(Registry(self._state)) as registry:
            registry.add_token(token.digest, name=name, kind=kind, expires=time.time() + 600)
        asyncio.run(joining.join(address, token, directory, kind))
