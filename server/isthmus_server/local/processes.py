"""The other roles on this machine: devices and a datacenter, each a process of its own.

Every process runs the command a user would type, with its output in the run's `logs/`. One that
dies is started again; when the server dies, however it dies, they die too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.wire import link_pb2
from isthmus_server.local.fork_server import ParticipantForkServer, Program

MAX_STARTS = 5
"""A process that ends this many times is not started again."""

Gone = Callable[[str, link_pb2.Role, str], None]

_GRACE_SECONDS = 5.0


def participants_of(job: Job, server: str, directory: Path) -> dict[str, list[str]]:
    """The arguments of `isthmus` for each participant that a job has on this machine."""
    found: dict[str, list[str]] = {}
    tail = ["--server", server, "--die-with-parent"]
    if job.datacenter.ranks:
        name = "datacenter-0"
        found[name] = ["datacenter", "launch", "--scheduler", "local", "--name", name]
        found[name] += ["--ranks", str(job.datacenter.ranks)]
        found[name] += ["--state", str(directory / "datacenter"), *tail]
    count = job.federated.clients
    for index in range(count):
        name = f"client-{index}"
        found[name] = ["client", "start", "--name", name, "--shard", f"{index}/{count}", *tail]
    return found


class Embedded:
    """Starts, restarts and stops the processes of an embedded run."""

    def __init__(
        self,
        job: Job,
        address: str,
        directory: Path,
        template: ParticipantForkServer,
        on_gone: Gone,
    ) -> None:
        """`on_gone(name, role, reason)` is told when a process is given up."""
        self.job = job
        self.address = address
        self.directory = directory.absolute()
        self.template = template
        self.on_gone = on_gone
        self._keepers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start them all."""
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        found = participants_of(self.job, self.address, self.directory)
        for name, arguments in found.items():
            self._keepers.append(asyncio.create_task(self._keep(name, arguments)))

    async def stop(self) -> None:
        """Stop them all, and wait until they are gone."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, name: str, arguments: Sequence[str]) -> None:
        log = self.directory / "logs" / f"{name}.log"
        for _ in range(MAX_STARTS):
            try:
                program = await self.template.start(arguments, log)
            except UserError as error:
                self.on_gone(name, _role(arguments), str(error))
                return
            try:
                code = await asyncio.shield(program.ended)
            except asyncio.CancelledError:
                await _end(program)
                raise
            if code == 1:  # it said why, and would say so again
                break
        self.on_gone(name, _role(arguments), f"its process ended: {_last_words(log)}")


def _role(arguments: Sequence[str]) -> link_pb2.Role:
    return link_pb2.DATACENTER if arguments[0] == "datacenter" else link_pb2.CLIENT


async def _end(program: Program) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(program.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(_GRACE_SECONDS):
            await asyncio.shield(program.ended)
    except TimeoutError:
        os.kill(program.pid, signal.SIGKILL)
        await program.ended


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"
