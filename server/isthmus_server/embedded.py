"""The other roles on this machine: devices and a datacenter, started as a person would start them.

Each is a process of its own, run by the same command a user types, with its output in the run's
`logs/`. One that dies is started again; when the server dies, however it dies, they die too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.job import Job

MOST_STARTS = 5
"""A process that ends this many times is not started again."""

_GRACE_SECONDS = 5.0


class Embedded:
    """Starts, restarts and stops the processes of an embedded run."""

    def __init__(
        self, job: Job, port: int, directory: Path, on_gone: Callable[[str, str], None]
    ) -> None:
        """`on_gone(name, reason)` is told when a process is given up."""
        self.job = job
        self.address = f"127.0.0.1:{port}"
        self.directory = directory
        self.on_gone = on_gone
        self.pids: dict[str, int] = {}
        """Of the processes that run now, by participant."""
        self._keepers: list[asyncio.Task[None]] = []

    def commands(self) -> dict[str, list[str]]:
        """What to run for each participant."""
        found: dict[str, list[str]] = {}
        base = [sys.executable, "-m", "isthmus.cli"]
        tail = ["--server", self.address, "--die-with-parent"]
        if self.job.datacenter.ranks:
            name = "datacenter-0"
            state = self.directory / "datacenter"
            found[name] = [*base, "datacenter", "launch", "--scheduler", "local", "--name", name]
            found[name] += ["--ranks", str(self.job.datacenter.ranks), "--state", str(state), *tail]
        count = self.job.federated.clients
        for index in range(count):
            name = f"client-{index}"
            found[name] = [*base, "client", "start", "--name", name]
            found[name] += ["--shard", f"{index}/{count}", *tail]
        return found

    def start(self) -> None:
        """Start them all."""
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        for name, command in self.commands().items():
            self._keepers.append(asyncio.create_task(self._keep(name, command)))

    async def stop(self) -> None:
        """Stop them all, and wait until they are gone."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, name: str, command: Sequence[str]) -> None:
        for _ in range(MOST_STARTS):
            code = await self._run(name, command)
            if code == 1:  # it said why, and would say so again
                break
        self.on_gone(name, f"its process ended: {self._last_words(name)}")

    async def _run(self, name: str, command: Sequence[str]) -> int:
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        with self._log(name).open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the server, which then stops them
            )
        self.pids[name] = process.pid
        try:
            return await process.wait()
        except asyncio.CancelledError:
            await _end(process)
            raise
        finally:
            self.pids.pop(name, None)

    def _log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def _last_words(self, name: str) -> str:
        lines = self._log(name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_GRACE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
