"""The other roles on this machine: devices and a datacenter, each a process of its own.

Every process runs the command a user would type, with its output in the run's `logs/`. They are
forked from one template that has PyTorch loaded, because loading it takes each of them seconds of
CPU time otherwise. One that dies is started again; when the server dies, however it dies, they
die too.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from isthmus.job import Job
from isthmus.wire import link_pb2

MOST_STARTS = 5
"""A process that ends this many times is not started again."""

Gone = Callable[[str, link_pb2.Role, str], None]

_GRACE_SECONDS = 5.0


class Embedded:
    """Starts, restarts and stops the processes of an embedded run."""

    def __init__(self, job: Job, port: int, directory: Path, on_gone: Gone) -> None:
        """`on_gone(name, role, reason)` is told when a process is given up."""
        self.job = job
        self.address = f"127.0.0.1:{port}"
        self.directory = directory.absolute()
        self.on_gone = on_gone
        self._keepers: list[asyncio.Task[None]] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["isthmus_server.template"])

    def commands(self) -> dict[str, list[str]]:
        """The arguments of `isthmus` for each participant."""
        found: dict[str, list[str]] = {}
        tail = ["--server", self.address, "--die-with-parent"]
        if self.job.datacenter.ranks:
            name = "datacenter-0"
            found[name] = ["datacenter", "launch", "--scheduler", "local", "--name", name]
            found[name] += ["--ranks", str(self.job.datacenter.ranks)]
            found[name] += ["--state", str(self.directory / "datacenter"), *tail]
        count = self.job.federated.clients
        for index in range(count):
            name = f"client-{index}"
            found[name] = ["client", "start", "--name", name, "--shard", f"{index}/{count}", *tail]
        return found

    def start(self) -> None:
        """Start them all."""
        if not self.commands():
            return
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
        # From this thread, because the template dies with the thread that started it.
        forkserver.ensure_running()
        for name, arguments in self.commands().items():
            self._keepers.append(asyncio.create_task(self._keep(name, arguments)))

    async def stop(self) -> None:
        """Stop them all, and wait until they are gone."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, name: str, arguments: Sequence[str]) -> None:
        log = self.directory / "logs" / f"{name}.log"
        for _ in range(MOST_STARTS):
            process = self._context.Process(
                target=_become, args=(list(arguments), str(log)), name=name
            )
            # The first start waits until the template has loaded: not on the event loop.
            await asyncio.to_thread(process.start)
            (self.directory / "logs" / f"{name}.pid").write_text(f"{process.pid}\n")
            try:
                await _ended(process)
            except asyncio.CancelledError:
                await _end(process)
                raise
            if process.exitcode == 1:  # it said why, and would say so again
                break
        role = link_pb2.DATACENTER if arguments[0] == "datacenter" else link_pb2.CLIENT
        self.on_gone(name, role, f"its process ended: {_last_words(log)}")


def _become(arguments: list[str], log: str) -> None:
    """In the new process: be `isthmus ARGUMENTS`, with all output in the log."""
    os.setsid()  # a Ctrl-C is for the server, which then stops us
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from isthmus import cli

    sys.argv = ["isthmus", *arguments]
    cli.main()


async def _ended(process: ForkServerProcess) -> None:
    """Wait until a process is gone, without a thread."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


async def _end(process: ForkServerProcess) -> None:
    assert process.pid is not None
    process.terminate()
    try:
        async with asyncio.timeout(_GRACE_SECONDS):
            await _ended(process)
    except TimeoutError:
        os.kill(process.pid, signal.SIGKILL)
        await _ended(process)


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"
