"""The process that all embedded participants are forked from.

Loading PyTorch takes each of them seconds of CPU time otherwise. It is done once, here, by the
command itself before it opens anything; what is forked then is a process that has everything
loaded and nothing running: no gRPC, no database, no event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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

from isthmus.errors import UserError
from isthmus.system.process import die_with_parent

_MAX_BYTES = 1 << 20
_LOST = "the process that others are forked from was killed"


@dataclasses.dataclass(frozen=True)
class Program:
    """One `isthmus ARGUMENTS` that was started."""

    pid: int
    ended: asyncio.Future[int]
    """Its exit code, once it has ended; minus the number of the signal that killed it."""


class ParticipantForkServer:
    """Starts programs by forking a process that was set aside for it."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        """Use `fork`."""
        self._pid = pid
        self._end = end
        self._numbers = itertools.count()
        self._starting: dict[int, asyncio.Future[Program]] = {}
        self._running: dict[int, Program] = {}
        self._listening = False
        self._gone = False

    @classmethod
    def fork(cls, *, ranks: bool) -> ParticipantForkServer:
        """Load what participants load (`ranks`: a datacenter too), and set a copy of us aside.

        Call it before anything is opened or started. The copy ends with the `with` block, and dies
        with this process; the event loop that it is used on must have ended before.
        """
        # torch reads it when it is loaded; its store warns about every wait that ends unanswered.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # The first optimizer loads the compiler; better once than in every process.
        loaded = ["torch._dynamo", "isthmus.task.scoring", "isthmus.transport.uplink"]
        for name in [*loaded, *(["isthmus_datacenter.service.elastic_agent"] if ranks else [])]:
            importlib.import_module(name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _apart(_serve, server, ours, theirs)
        theirs.close()
        ours.setblocking(False)
        return cls(pid, ours)

    async def start(self, arguments: Sequence[str], log: Path) -> Program:
        """Run `isthmus ARGUMENTS` with all its output in a file.

        Raises:
            UserError: the template was killed.
        """
        loop = asyncio.get_running_loop()
        if not self._listening:
            loop.add_reader(self._end, self._hear)
            self._listening = True
        if self._gone:
            raise UserError(_LOST)
        number = next(self._numbers)
        started: asyncio.Future[Program] = loop.create_future()
        self._starting[number] = started
        request = {"number": number, "arguments": list(arguments), "log": str(log)}
        try:
            await loop.sock_sendall(self._end, json.dumps(request).encode())
        except ConnectionError:
            self._starting.pop(number, None)
            raise UserError(_LOST) from None
        return await started

    def __enter__(self) -> ParticipantForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the template, and whatever it started and is still there."""
        self._end.close()
        os.waitpid(self._pid, 0)

    def _hear(self) -> None:
        try:
            data = self._end.recv(_MAX_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._lost()
            return
        told = json.loads(data)
        if "number" in told:
            loop = asyncio.get_running_loop()
            program = Program(told["pid"], loop.create_future())
            self._running[program.pid] = program
            started = self._starting.pop(told["number"])
            if not started.done():  # nobody may be waiting any more
                started.set_result(program)
        else:
            self._running.pop(told["pid"]).ended.set_result(told["code"])

    def _lost(self) -> None:
        """It is dead, and with it everything that it started."""
        self._gone = True
        asyncio.get_running_loop().remove_reader(self._end)
        for started in self._starting.values():
            if not started.done():
                started.set_exception(UserError(_LOST))
        for program in self._running.values():
            program.ended.set_result(-signal.SIGKILL)
        self._starting.clear()
        self._running.clear()


def _apart(work: Callable[..., None], *arguments: object) -> None:
    """Do something in a fresh fork, and never return into what the parent was doing."""
    code = 1
    try:
        work(*arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 - there is nobody above
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _serve(server: int, ours: socket.socket, theirs: socket.socket) -> None:
    """In the template: fork on demand, and tell how each one ends, until nobody asks any more."""
    die_with_parent(server)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.setsid()  # a Ctrl-C is for the server, which then stops us
    ours.close()
    running: dict[int, int] = {}
    template = os.getpid()
    while True:
        watched: list[socket.socket | int] = [theirs, *running]
        ready, _, _ = select.select(watched, [], [])
        for handle in [handle for handle in running if handle in ready]:
            pid = running.pop(handle)
            os.close(handle)
            _, status = os.waitpid(pid, 0)
            ended = {"pid": pid, "code": os.waitstatus_to_exitcode(status)}
            theirs.send(json.dumps(ended).encode())
        if theirs in ready:
            asked = theirs.recv(_MAX_BYTES)
            if not asked:
                return
            request = json.loads(asked)
            pid = os.fork()
            if pid == 0:
                theirs.close()
                for handle in running:
                    os.close(handle)
                _apart(_become, template, request["arguments"], request["log"])
            running[os.pidfd_open(pid)] = pid
            theirs.send(json.dumps({"number": request["number"], "pid": pid}).encode())


def _become(template: int, arguments: Sequence[str], log: str) -> None:
    """Be `isthmus ARGUMENTS`, with all output in the log."""
    die_with_parent(template)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    from isthmus import cli

    sys.argv = ["isthmus", *arguments]
    cli.main()
