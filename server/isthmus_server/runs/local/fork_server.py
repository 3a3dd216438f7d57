"""A process from which all participants of a local run are forked.

Importing PyTorch would otherwise cost each of them seconds of CPU time. The command imports it once
and forks the fork server before it opens anything, so a forked participant has all modules loaded
and nothing running: no gRPC, no database, no event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus import cli
from isthmus.errors import UserError
from isthmus.system.process import die_with_parent

_MAX_BYTES = 1 << 20
_KILLED = "the process that participants are forked from was killed"


@dataclasses.dataclass(frozen=True)
class Program:
    """A process that runs `isthmus ARGUMENTS`."""

    pid: int
    ended: asyncio.Future[int]
    """Set to the exit code when the process ends; negative: the signal that killed it."""


class ParticipantForkServer:
    """Starts programs by forking a process that is kept for this purpose."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        """Use `fork`, which creates the process."""
        self._pid = pid
        self._connection = connection
        self._numbers = itertools.count()
        self._starting: dict[int, asyncio.Future[Program]] = {}
        self._running: dict[int, Program] = {}
        self._listening = False
        self._sending = asyncio.Lock()
        self._killed = False

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
        server_end, fork_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_and_exit(_serve, server, server_end, fork_end, program)
        fork_end.close()
        server_end.setblocking(False)
        return cls(pid, server_end)

    async def start(self, arguments: Sequence[str], log: Path) -> Program:
        """Run `isthmus ARGUMENTS` with all its output in a file.

        Raises:
            UserError: the fork server was killed.
        """
        loop = asyncio.get_running_loop()
        if not self._listening:
            loop.add_reader(self._connection, self._receive)
            self._sending = asyncio.Lock()  # of this event loop
            self._listening = True
        if self._killed:
            raise UserError(_KILLED)
        number = next(self._numbers)
        started: asyncio.Future[Program] = loop.create_future()
        self._starting[number] = started
        request = {"number": number, "arguments": list(arguments), "log": str(log)}
        try:
            # While one call waits for room in the socket, another one would take its place.
            async with self._sending:
                await loop.sock_sendall(self._connection, json.dumps(request).encode())
        except ConnectionError:
            self._starting.pop(number, None)
            raise UserError(_KILLED) from None
        return await started

    def __enter__(self) -> ParticipantForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the fork server, and the programs that still run."""
        self._connection.close()
        os.waitpid(self._pid, 0)

    def _receive(self) -> None:
        try:
            data = self._connection.recv(_MAX_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._fail_all()
            return
        message = json.loads(data)
        if "number" in message:
            loop = asyncio.get_running_loop()
            program = Program(message["pid"], loop.create_future())
            self._running[program.pid] = program
            started = self._starting.pop(message["number"])
            if not started.done():  # the start may have been cancelled
                started.set_result(program)
        else:
            self._running.pop(message["pid"]).ended.set_result(message["code"])

    def _fail_all(self) -> None:
        """Fail all programs: the fork server was killed, and its children with it."""
        self._killed = True
        asyncio.get_running_loop().remove_reader(self._connection)
        for started in self._starting.values():
            if not started.done():
                started.set_exception(UserError(_KILLED))
        for program in self._running.values():
            program.ended.set_result(-signal.SIGKILL)
        self._starting.clear()
        self._running.clear()


def _run_and_exit(function: Callable[..., None], *arguments: object) -> None:
    """Call a function in a new fork, and exit instead of returning to the parent's code."""
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 - the outermost frame
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _serve(
    server: int, server_end: socket.socket, fork_end: socket.socket, program: Callable[[], None]
) -> None:
    """Run the fork server: fork on request and report exit codes, until the server closes."""
    die_with_parent(server)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.setsid()  # Ctrl-C is for the server, which then ends this process
    server_end.close()
    # A collection would write to the memory of every module, which all forks share until then.
    gc.freeze()
    running: dict[int, int] = {}
    fork_server = os.getpid()
    while True:
        watched: list[socket.socket | int] = [fork_end, *running]
        ready, _, _ = select.select(watched, [], [])
        for handle in [handle for handle in running if handle in ready]:
            pid = running.pop(handle)
            os.close(handle)
            _, status = os.waitpid(pid, 0)
            ended = {"pid": pid, "code": os.waitstatus_to_exitcode(status)}
            fork_end.send(json.dumps(ended).encode())
        if fork_end in ready:
            data = fork_end.recv(_MAX_BYTES)
            if not data:
                return
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                fork_end.close()
                for handle in running:
                    os.close(handle)
                _run_and_exit(
                    _run_program, fork_server, request["arguments"], request["log"], program
                )
            running[os.pidfd_open(pid)] = pid
            fork_end.send(json.dumps({"number": request["number"], "pid": pid}).encode())


def _run_program(
    fork_server: int, arguments: Sequence[str], log: str, program: Callable[[], None]
) -> None:
    """Run `isthmus ARGUMENTS` in this process, with all output in the log."""
    die_with_parent(fork_server)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = ["isthmus", *arguments]
    program()
