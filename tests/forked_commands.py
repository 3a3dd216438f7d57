"""The programs `isthmus`, `torchrun` and others for shells, whose work forked processes do.

    with ForkedCommands() as commands:
        subprocess.run(["bash", "-c", "isthmus jobs"], env=commands.environment())

The programs on the path start in a hundredth of a second: they hand their arguments, folder,
environment and streams to this process, which has one of `tests.forked` do what they would do.
Signals are passed on, and the exit status comes back. A command that imports PyTorch costs seconds
of CPU time otherwise, and the documentation has a hundred of them. The commands of README.md are
run without this, and so is an installed wheel.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import tempfile
import threading
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType

from tests import forked

PROGRAM = """#!/bin/sh
exec "{python}" -IS "{folder}/client.py" {name} "$@"
"""
CLIENT = """
import json, os, signal, socket, sys

signals = {{signal.SIGINT, signal.SIGTERM, signal.SIGHUP}}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
mask = os.umask(0o077)
request = json.dumps([*sys.argv[1:2], sys.argv[2:], os.getcwd(), dict(os.environ), mask]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
for number in signals:
    signal.signal(number, lambda number, _: server.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
reply = server.recv(4)
if len(reply) < 4:
    sys.exit("the process that does the work was not started")
status = int.from_bytes(reply, "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class ForkedCommands:
    """While the block lasts, `folder` has the programs; their processes end with the block."""

    def __init__(self, *others: str) -> None:
        """Also prepare other programs, by the names that their packages install them under."""
        self._temporary = tempfile.TemporaryDirectory(prefix="isthmus-")
        self.folder = Path(self._temporary.name)
        address = str(self.folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        for name in ("isthmus", "torchrun", *others):
            program = self.folder / name
            text = PROGRAM.format(python=sys.executable, folder=self.folder, name=name)
            program.write_text(text)
            program.chmod(0o755)
        (self.folder / "client.py").write_text(CLIENT.format(address=address))
        self._stopping, self._stop = os.pipe()
        self._commands: dict[socket.socket, ForkServerProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="forked commands")

    def environment(self) -> dict[str, str]:
        """The environment of this process; these programs and then its Python come first."""
        path = [str(self.folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {**os.environ, "PATH": ":".join(path)}

    def __enter__(self) -> ForkedCommands:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._stop)
        self._thread.join()
        for connection in list(self._commands):
            self._kill(connection)
        self._selector.close()
        self._listener.close()
        os.close(self._stopping)
        self._temporary.cleanup()

    def _serve(self) -> None:
        self._selector.register(self._stopping, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._stopping in ready:
                return
            for connection, process in list(self._commands.items()):
                if process.sentinel in ready:
                    self._end(connection)
                elif connection in ready:
                    self._pass_on(connection)
            # Last: a command that was killed has freed its port before it is started again.
            if self._listener in ready:
                self._begin(self._listener.accept()[0])

    def _begin(self, connection: socket.socket) -> None:
        size, streams, _, _ = socket.recv_fds(connection, 4, 3)
        try:
            with connection.makefile("rb") as file:
                request = json.loads(file.read(int.from_bytes(size, "big")))
            program, arguments, folder, environment, mask = request
            words = [program, *arguments]
            process = forked.start_with(streams, words, Path(folder), environment, umask=mask)
        except ValueError:  # its program was killed before it had asked
            connection.close()
            return
        finally:
            for stream in streams:
                os.close(stream)
        self._commands[connection] = process
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(process.sentinel, selectors.EVENT_READ)

    def _pass_on(self, connection: socket.socket) -> None:
        """Pass a signal on, or kill the command whose program was killed."""
        number = connection.recv(1)
        if not number:
            self._kill(connection)
            return
        pid = self._commands[connection].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number[0])

    def _kill(self, connection: socket.socket) -> None:
        self._commands[connection].kill()
        self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        process = self._commands.pop(connection)
        self._selector.unregister(process.sentinel)
        self._selector.unregister(connection)
        process.join()
        assert process.exitcode is not None
        with contextlib.suppress(OSError), connection:  # its program may have been killed
            connection.sendall(process.exitcode.to_bytes(4, "big", signed=True))
        process.close()
