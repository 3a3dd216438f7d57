"""The fork server of a local run, for its event loop: participants are forked from this command.

Importing PyTorch would otherwise cost each of them seconds of CPU time. The command imports it once
and forks the fork server before it opens anything, so a forked participant has all modules loaded
and nothing running: no gRPC, no database, no event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from isthmus import cli
from isthmus.errors import UserError
from isthmus.system.fork_server import ForkedProgram, ForkServer

_KILLED = "the process that participants are forked from was killed"


@dataclasses.dataclass(frozen=True)
class Program:
    """A process that runs `isthmus ARGUMENTS`."""

    process: ForkedProgram
    pid: int
    ended: asyncio.Future[int]
    """Set to the exit code when the process ends; negative: the signal that killed it."""

    def send_signal(self, number: int) -> None:
        """Send it a signal; SIGKILL is for all processes of its session."""
        self.process.send_signal(number)


class ParticipantForkServer:
    """Starts programs by forking a process that is kept for this purpose."""

    def __init__(self, server: ForkServer) -> None:
        """Use `fork`, which creates the process."""
        self._server = server

    @classmethod
    def fork(cls, *, ranks: bool, program: Callable[[], None] = cli.main) -> ParticipantForkServer:
        """Import what participants need (`ranks`: also a datacenter), and fork the process.

        `program` is what each process runs, with the arguments in `sys.argv`.

        Call it before anything is opened or started. The process ends with the `with` block, and
        dies with this process. The event loop that uses it must have ended before.
        """
        # torch reads it when it is imported; its store warns about every wait that times out.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # The first optimizer imports the compiler: once here instead of in every process.
        loaded = ["torch._dynamo", "isthmus.task.scoring", "isthmus.transport.uplink"]
        for name in [*loaded, *(["isthmus_datacenter.service.elastic_agent"] if ranks else [])]:
            importlib.import_module(name)
        return cls(ForkServer.fork(functools.partial(_run, program)))

    async def start(self, arguments: Sequence[str], log: Path) -> Program:
        """Run `isthmus ARGUMENTS` with all its output in a file.

        Raises:
            UserError: the fork server was killed.
        """
        loop = asyncio.get_running_loop()
        try:
            process = self._server.start({"arguments": list(arguments)}, log)
        except OSError:
            raise UserError(_KILLED) from None
        started: asyncio.Future[Program] = loop.create_future()
        ended: asyncio.Future[int] = loop.create_future()

        def receive() -> None:
            process.receive()
            if not started.done():  # the start may have been cancelled
                if process.pid is None:
                    started.set_exception(UserError(_KILLED))
                else:
                    started.set_result(Program(process, process.pid, ended))
            if process.code is not None:
                loop.remove_reader(process.fileno())
                process.close()
                ended.set_result(process.code)

        loop.add_reader(process.fileno(), receive)
        try:
            return await started
        except asyncio.CancelledError:
            process.send_signal(signal.SIGKILL)  # nobody knows of it
            raise

    def __enter__(self) -> ParticipantForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the fork server, and the programs that still run."""
        self._server.close()


def _run(program: Callable[[], None], request: Mapping[str, Sequence[str]]) -> None:
    """Run `isthmus ARGUMENTS` in this process."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    sys.argv = ["isthmus", *request["arguments"]]
    program()
