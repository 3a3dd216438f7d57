"""Processes of tasks on devices, forked from one that has imported PyTorch.

A device starts a program for each run that it opens, and importing takes 3 s of CPU time in each.
After `install`, it forks a server before it opens anything, and has these processes forked from
that. They are its children like the programs, which `isthmus_clients.device.sandbox.worker` runs in
both: they leave the network, lose their rights and end in the same way. The programs themselves are
run by the tests of the sandbox and by those of the units for systemd.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from isthmus.system.process import die_with_parent
from isthmus_chaos import worker as faults
from isthmus_clients import commands
from isthmus_clients.device.sandbox import process_host, task_process, worker
from isthmus_clients.device.sandbox.system_calls import prctl
from tests import forked

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_MAX_BYTES = 1 << 20


def install() -> None:
    """Have the host of a device in this process, or in one that is forked from it, fork."""

    class ForkingHost(process_host.ProcessHost):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            prctl(_PR_SET_CHILD_SUBREAPER, 1)  # it adopts what its fork server leaves behind
            _replace_subprocess(_TaskForkServer(_forked_server()))

    commands.ProcessHost = ForkingHost  # type: ignore[attr-defined]


@contextlib.contextmanager
def forked_from_tests() -> Iterator[None]:
    """Have the hosts of devices in a test's process fork, from what all tests fork from."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = forked.context().Process(target=_serve, args=(theirs,))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        process.start()
        theirs.close()
        _replace_subprocess(_TaskForkServer(ours))
        yield
    finally:
        vars(task_process)["subprocess"] = subprocess
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
        ours.close()
        process.join()
        process.close()


def _replace_subprocess(server: _TaskForkServer) -> None:
    """Replace what `TaskProcess` uses of the module."""
    vars(task_process)["subprocess"] = SimpleNamespace(
        Popen=server.start,
        DEVNULL=subprocess.DEVNULL,
        PIPE=subprocess.PIPE,
        STDOUT=subprocess.STDOUT,
    )


class _ForkedTask:
    """What `TaskProcess` uses of `subprocess.Popen`."""

    def __init__(self, pid: int, output: int) -> None:
        self.pid = pid
        self.stdout = open(output, "rb")  # noqa: SIM115  closed by its reader
        self.returncode: int | None = None

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _TaskForkServer:
    """A process from which those of a device's tasks are forked, for the device."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.recv(1)  # it has closed this device's files, of which some are locks
        self._lock = threading.Lock()

    def start(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        cwd: Path,
        **same: object,
    ) -> _ForkedTask:
        """Start the program of a task, as `subprocess.Popen` does with these arguments."""
        assert tuple(command[:4]) == (sys.executable, "-P", *task_process.PROGRAM)
        assert same == {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        (end,) = pass_fds
        request = json.dumps([command[5:], dict(env), str(cwd)]).encode()
        ours, theirs = os.pipe()
        with self._lock:
            socket.send_fds(self._connection, [request], [end, theirs])
            os.close(theirs)
            return _ForkedTask(int(self._connection.recv(_MAX_BYTES)), ours)


def _forked_server() -> socket.socket:
    """Fork a server from a device; returns the connection to it."""
    (_,) = Path("/proc/self/task").iterdir()  # a fork would lack other threads
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    device = os.getpid()
    if os.fork() == 0:
        try:
            die_with_parent(device)
            _serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    return ours


def _serve(connection: socket.socket) -> None:
    """Fork a process for each request, until the device has ended."""
    os.setsid()
    _close_all_but(connection.fileno())
    gc.freeze()
    connection.send(b".")
    while True:
        request, handles, _, _ = socket.recv_fds(connection, _MAX_BYTES, 2)
        if not request:
            return
        ours, theirs = socket.socketpair()
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                try:
                    status = _become(theirs, handles, *json.loads(request))
                except BaseException:  # noqa: BLE001  the outermost frame
                    sys.excepthook(*sys.exc_info())
                    status = 1
                sys.stdout.flush()
                os._exit(status)
            os._exit(0)
        for handle in handles:
            os.close(handle)
        theirs.close()
        with ours:
            pid = ours.recv(_MAX_BYTES)
            os.waitpid(between, 0)
            ours.send(b".")  # it is the device's child now
        connection.send(pid)


def _become(
    connection: socket.socket,
    handles: Sequence[int],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
) -> int:
    """Do what the program does, in a process that has of its device what a program would have."""
    os.setsid()
    connection.send(str(os.getpid()).encode())
    connection.recv(1)
    connection.detach()
    end, output = handles
    os.dup2(output, 1)
    os.dup2(output, 2)
    _close_all_but(end, 1, 2)
    prctl(_PR_SET_DUMPABLE, 1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.getLogger().handlers.clear()
    logging.getLogger("isthmus").setLevel(logging.NOTSET)
    faults._control = None  # faults of a device are none of its task
    return worker.main([str(end), *arguments])


def _close_all_but(*kept: int) -> None:
    """Close this process's files; nothing is read, nor written where nothing is kept."""
    for handle in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if handle not in kept:
            with contextlib.suppress(OSError):  # that of the folder
                os.close(handle)
    while (nothing := os.open(os.devnull, os.O_RDWR)) <= 2:  # the streams
        os.set_inheritable(nothing, True)
    os.close(nothing)
