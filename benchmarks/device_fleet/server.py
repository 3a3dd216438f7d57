"""Run an `isthmus server start` process with many registered devices, and submit jobs to it.

Devices join with the same code as over the network (token, signing request, certificate, registry,
membership directory) but without the network connection, so that thousands join within seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.processes import (
    ISTHMUS,
    Program,
    free_port,
    isthmus,
    memory,
    started,
    wait_for_port,
)
from safetensors.numpy import load_file

from isthmus.identity import joining, tls
from isthmus.identity.membership import Membership, prepare
from isthmus_server.fleet.authority import CertificateAuthority
from isthmus_server.fleet.registry import Registry

HARNESS = Path(__file__).parents[1] / "harness"


class BenchmarkServer:
    """A server's state directory, its registered devices, and its process while it runs."""

    def __init__(self, folder: Path) -> None:
        """Initialise a server in `folder` and register an operator."""
        self.folder = folder
        self.state = folder / "server"
        self.port = _two_free_ports()
        self.address = f"127.0.0.1:{self.port}"
        self.run = folder
        """Directory of the last submitted job."""
        isthmus("server", "init", str(self.state), "--host", "127.0.0.1")
        (self.state / "tasks").mkdir()
        shutil.copy(HARNESS / "null_task.py", self.state / "tasks")
        self.join(["operator"], "operator")

    def join(self, names: list[str], kind: str = "client") -> list[Path]:
        """Register participants and return their membership directories."""
        authority, registry = CertificateAuthority(self.state), Registry(self.state)
        enroller = authority.enroller.public
        fingerprint = tls.fingerprint(authority.certificate)
        try:
            return [
                self._join(name, kind, authority, registry, fingerprint, enroller) for name in names
            ]
        finally:
            registry.close()

    def _join(
        self,
        name: str,
        kind: str,
        authority: CertificateAuthority,
        registry: Registry,
        fingerprint: bytes,
        enroller: bytes,
    ) -> Path:
        directory = self.folder / "members" / name
        key, identity = prepare(directory)
        public = identity.public_key().public_bytes_raw()
        token = joining.Token(os.urandom(joining.SECRET_BYTES), fingerprint)
        registry.add_token(token.digest, name=name, kind=kind, expires=time.time() + 600)

        def issue(for_name: str) -> tuple[bytes, tls.Subject]:
            request = tls.signing_request(key)
            return authority.issue(request, kind=kind, name=for_name, identity=public)

        _, certificate = registry.redeem(token.digest, kind, public, issue)
        Membership.save(
            directory,
            server=self.address,
            authority=authority.certificate,
            enroller=enroller,
            key=key,
            certificate=tls.read_certificate(certificate),
        )
        return directory

    @contextlib.contextmanager
    def serving(self, *options: str) -> Iterator[Program]:
        """Run the server process, with further options, until the block ends."""
        command = [ISTHMUS, "server", "start", str(self.state), "--address", self.address]
        command += options
        log = self.folder / "server.log"
        with started(command, log) as server:
            wait_for_port(self.port, server, 60.0)
            yield server

    @contextlib.contextmanager
    def aggregators(self, count: int) -> Iterator[dict[str, Program]]:
        """Run aggregators of the server, which runs, until the block ends.

        Yields:
            Their processes by the address at which devices reach each.
        """
        moving = self.folder / "moving"
        moving.mkdir(exist_ok=True)
        names = ["127.0.0.1", *(f"127.0.0.1_{number}" for number in range(2, count + 1))]
        programs: dict[str, Program] = {}
        with contextlib.ExitStack() as stack:
            for member in self.join(names[:count], "aggregator"):
                port = free_port()
                address = f"127.0.0.1:{port}"
                command = [ISTHMUS, "server", "aggregator", "start", str(member)]
                command += ["--address", address, "--folder", str(moving)]
                program = stack.enter_context(started(command, self.folder / f"{member.name}.log"))
                wait_for_port(port, program, 60.0)
                programs[address] = program
            yield programs

    def submit(self, cohort: int, parameters: int, rounds: int, **overrides: object) -> Path:
        """Submit a null job with the operator command; returns the run's directory."""
        settings: dict[str, object] = {
            "rounds": rounds,
            "task.settings.parameters": parameters,
            "federated.cohort": cohort,
            "federated.quorum": cohort,
            **overrides,
        }
        arguments = [
            part for key, value in settings.items() for part in ("--set", f"{key}={value}")
        ]
        operator = str(self.folder / "members" / "operator")
        job = str(HARNESS / "null_job.toml")
        self.run = (
            self.state / "runs" / isthmus("submit", job, *arguments, "--state", operator).strip()
        )
        return self.run

    def job_finished(self) -> bool:
        """Whether the last submitted job has finished.

        Its run's log is asked and not the server, which is measured.

        Raises:
            RuntimeError: it failed or was cancelled.
        """
        status = run_status(self.run)
        if status in ("failed", "cancelled"):
            raise RuntimeError(f"the job {self.run.name} {status}: {report(self.run)['reason']}")
        return status == "finished"

    def finish(self, run: Path, count: int, rounds: int, seconds: float = 300.0) -> None:
        """Wait for the end of the last job, and check that every round has all devices' updates.

        Raises:
            RuntimeError: the job has not finished within `seconds`, or a round lacks an update.
        """
        deadline = time.monotonic() + seconds
        while not self.job_finished():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the job has not finished within {seconds:g} s")
            time.sleep(0.2)  # the job queue can only be polled
        accepted = []
        for entry in report(run)["rounds"]:
            names = {
                receipt["participant"]
                for receipt in entry["receipts"]
                if receipt["status"] == "accepted"
            }
            accepted.append((entry["round"], len(names)))
        if accepted != [(number, count) for number in range(1, rounds + 1)]:
            raise RuntimeError(f"(round, updates) are {accepted}, expected {count} updates each")


def run_status(run: Path) -> str:
    """The status of a run in its log; empty while there is none."""
    log = run / "run.sqlite"
    if not log.exists():
        return ""
    with contextlib.closing(sqlite3.connect(f"file:{log}?mode=ro", uri=True)) as connection:
        try:
            row = connection.execute("SELECT status FROM run").fetchone()
        except sqlite3.OperationalError:  # it is being created
            return ""
    return str(row[0]) if row else ""


def report(run: Path) -> Mapping[str, Any]:
    """The output of `isthmus report --json` for a run."""
    parsed: dict[str, Any] = json.loads(isthmus("report", str(run), "--json"))
    return parsed


def bytes_to_devices(run: Path) -> int:
    """Bytes of models that the server has sent to devices over the link."""
    return sum(
        receipt["bytes_out"] for entry in report(run)["rounds"] for receipt in entry["receipts"]
    )


def check_model(run: Path, expected: float, tolerance: float) -> None:
    """Check that all parameters of a run's final model are as expected.

    Raises:
        RuntimeError: one is not, so that an update was counted twice, or not at all.
    """
    (vector,) = load_file(report(run)["final"]["model_path"]).values()
    least, most = float(vector.min()), float(vector.max())
    if max(abs(least - expected), abs(most - expected)) > tolerance:
        raise RuntimeError(
            f"the model has {least} to {most}, expected {expected}: "
            "an update was counted twice, or not at all"
        )


def kill(server: Program) -> None:
    """Kill the server with SIGKILL, so that it cannot notify any device."""
    os.kill(server.popen.pid, signal.SIGKILL)
    server.popen.wait()


def stable_memory(pid: int, seconds: float = 1.0, timeout: float = 20.0) -> int:
    """Resident bytes once they have not grown for `seconds`, or after `timeout`."""
    highest, since = 0, time.monotonic()
    deadline = since + timeout
    while time.monotonic() < min(since + seconds, deadline):
        current = memory(pid, "VmRSS")
        if current > highest:
            highest, since = current, time.monotonic()
        time.sleep(0.05)  # memory can only be polled
    return memory(pid, "VmRSS")


def _two_free_ports() -> int:
    """A free port whose successor is free too."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + 1))
            return port
