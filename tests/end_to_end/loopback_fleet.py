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
import sqlite3
import time
from collections.abc import Callable, Mapping
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
    ) -> None:
        """`policies` are further lines of a device's policy by its name."""
        self.folder = folder
        self._devices = devices
        self._policies = policies or {}
        self._device_tasks = device_tasks
        self._state = folder / "state"
        self._environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        self._running: dict[str, ForkServerProcess] = {}

    def __enter__(self) -> LoopbackFleet:
        initialise(self._state, ["127.0.0.1", "localhost"])
        (self._state / "tasks").symlink_to(self.folder / "tasks")
        try:
            self._start("server", "server", "start", "state", "--address", "127.0.0.1:0")
            ports = self.until(
                lambda: re.search(
                    r"link at 127.0.0.1:\d+, joining at 127.0.0.1:(\d+)", self.log("server")
                )
            )
            address = f"localhost:{ports[1]}"
            for index in range(self._devices):
                self._join(address, f"phone-{index}", "client", self.folder / f"phone-{index}")
            self._join(address, DATACENTER, "datacenter", self.folder / DATACENTER / "membership")
            self._join(address, "alice", "operator", self.folder / "alice")
            for index in range(self._devices):
                name = f"phone-{index}"
                policy = "[privacy]\nclients_min = 2\n"
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
        for process in self._running.values():
            process.join(30)
            process.kill()
            process.join()

    def start_device(self, index: int) -> None:
        """Start a device, also one that was killed."""
        name = f"phone-{index}"
        shard = f"{index}/{self._devices}"
        where = ("--state", name, "--tasks", self._device_tasks)
        work = ("client", "start", *where, "--shard", shard)
        self._start(name, *work)

    def kill(self, name: str) -> None:
        """End a process at once, as a crash does."""
        process = self._running.pop(name)
        process.kill()
        process.join()

    def start_datacenter(self) -> None:
        """Start the datacenter, with one rank."""
        launch = ("datacenter", "launch", "--scheduler", "local", "--ranks", "1")
        self._start(DATACENTER, *launch, "--state", DATACENTER, "--tasks", "tasks")

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

    def _start(self, name: str, *arguments: str) -> None:
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
