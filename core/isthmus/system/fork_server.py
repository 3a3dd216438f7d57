"""A process with everything loaded and nothing running, from which others are forked.

Importing PyTorch takes seconds, which is nearly all of the start of a participant, an agent or a
rank; a fork of a process that has imported it takes milliseconds. Nothing of the process that wants
a program is in it: no thread, no open file, no key.

The owner and the fork server have a connection, on which the owner asks for programs; with each
request it passes an end of a second one, which is the program's. On that, the fork server tells the
program's process id and then its exit code, and the owner asks for signals.

>>> with ForkServer.fork(lambda request: exit(request["code"])) as server:
...     program = server.start({"code": 3}, Path(os.devnull))
...     code = program.wait()
...     program.close()
>>> code
3
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from isthmus.system.channel import Channel
from isthmus.system.forked_process import ForkedProcess, fork, is_readable
from isthmus.system.process import die_with_parent

Run = Callable[[Any], object]
"""What each program is: called with the request, in a fork of the fork server."""

_REPORT_BYTES = 1 << 10


class ForkedProgram:
    """A process that a fork server has started, for the process that asked for it."""

    def __init__(self, channel: Channel) -> None:
        """Use `ForkServer.start`."""
        self._channel = channel
        self.pid: int | None = None
        """Process id, once the start was reported; None if the fork server was killed before."""
        self.code: int | None = None
        """The exit code, see `forked_process`, once the end was reported."""

    def fileno(self) -> int:
        """Descriptor that is readable when there is something to `receive`; until `close`."""
        return self._channel.fileno()

    def receive(self) -> None:
        """Wait for the next report: the start, and then the end."""
        try:
            report = json.loads(self._channel.receive(_REPORT_BYTES))
        except (EOFError, OSError):
            report = {"code": -signal.SIGKILL}  # the fork server was killed, and it dies with that
        self.pid = report.get("pid", self.pid)
        self.code = report.get("code")

    def wait(self, seconds: float | None = None) -> int | None:
        """Exit code of the program; None if it has not ended within `seconds`."""
        while self.code is None and is_readable(self.fileno(), seconds):
            self.receive()
        return self.code

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended.

        The fork server does so, which knows that the process id is still this program's.
        """
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps(number).encode())

    def end(self) -> None:
        """Kill all processes of its session, wait until it has ended, and close the connection."""
        if self.code is None:
            self.send_signal(signal.SIGKILL)
            self.wait()
        self.close()

    def close(self) -> None:
        """Close the connection, which kills the program if it still runs."""
        self._channel.close()


class ForkServer:
    """The fork server, for the process that owns it.

    Guarantees:
      * it ends with its owner, however that ends, and its programs end with it;
      * each program leads a session, without standard input and with its output in a file.
    """

    def __init__(self, channel: Channel, join: Callable[[], object]) -> None:
        """Use `fork` or `start_anew`."""
        self._channel = channel
        self._join = join

    @classmethod
    def fork(cls, run: Run, loaded: Sequence[str] = ()) -> ForkServer:
        """Fork this process, which must not have started a thread yet: no event loop, no gRPC.

        Args:
            run: what each program is.
            loaded: modules that the fork server imports before it forks anything.
        """
        channel, theirs = Channel.pair()

        def serve() -> None:
            channel.close()  # this copy would keep the connection open when the owner has ended
            _serve(theirs, run, loaded)

        process = fork(serve)
        theirs.close()
        return cls(channel, functools.partial(process.end, None))

    @classmethod
    def start_anew(cls, run: Run, loaded: Sequence[str]) -> ForkServer:
        """Start the fork server from a process that may have threads; it imports everything anew.

        `run` is a function of a module, by whose name it is found there.
        """
        channel, theirs = Channel.pair()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(loaded))
        process = context.Process(target=_serve_orphan, args=(theirs, run, loaded))
        process.start()
        theirs.close()
        return cls(channel, process.join)

    def start(self, request: Mapping[str, Any], log: Path) -> ForkedProgram:
        """Start a program; its output is added to a file, which only this user can read.

        Returns before the program has started. This call waits only while hundreds of requests are
        not served yet.

        Raises:
            OSError: the fork server was killed.
        """
        own, theirs = Channel.pair()
        try:
            message = json.dumps([request, str(log)]).encode()
            self._channel.send(message, [theirs.fileno()])
        except OSError:
            own.close()
            raise
        finally:
            theirs.close()
        return ForkedProgram(own)

    def close(self) -> None:
        """End the fork server, and the programs that still run."""
        self._channel.close()
        self._join()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Served:
    """A program, in the fork server."""

    def __init__(self, process: ForkedProcess, channel: Channel) -> None:
        self.process = process
        self.channel = channel

    def report(self, **what: int) -> None:
        with contextlib.suppress(OSError):  # the owner has closed it
            self.channel.send(json.dumps(what).encode())

    def obey(self) -> bool:
        """Send the signal that the owner asks for; False if it has closed the connection."""
        try:
            number = json.loads(self.channel.receive(_REPORT_BYTES))
        except (EOFError, OSError):
            self._kill()
            return False
        if number == signal.SIGKILL:
            self._kill()
        else:
            os.kill(self.process.pid, number)
        return True

    def close(self) -> None:
        self.channel.close()
        self.process.forget()

    def _kill(self) -> None:
        # The process too: just forked, it may not lead a process group yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.kill(self.process.pid, signal.SIGKILL)


def _serve_orphan(connection: socket.socket, run: Run, loaded: Sequence[str]) -> None:
    """Serve as a child of another process than the owner, whose end only the connection tells."""
    die_with_parent()
    _serve(connection, run, loaded)


def _serve(connection: socket.socket, run: Run, loaded: Sequence[str]) -> NoReturn:
    """Fork a program for each request, until the owner has closed the connection."""
    os.setsid()  # Ctrl-C is for the owner, which then ends this process
    for name in loaded:
        importlib.import_module(name)
    # A collection would write to the memory of every module, which all forks share until then.
    gc.freeze()
    owner = Channel(connection)
    programs: dict[int, _Served] = {}
    """Programs that run, by the descriptor of their process."""
    asking: dict[int, _Served] = {}
    """Programs whose owner may send a signal, by the descriptor of their connection."""
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    while True:
        ready = [handle for handle, _ in poll.poll()]
        for handle in ready:
            if handle in programs:
                ended = programs.pop(handle)
                poll.unregister(handle)
                if asking.pop(ended.channel.fileno(), None) is not None:
                    poll.unregister(ended.channel)
                ended.report(code=ended.process.end(None))
                ended.close()
            elif handle in asking and not asking[handle].obey():
                poll.unregister(handle)
                del asking[handle]
        # Last: a descriptor that was closed above may now be that of a new program.
        if owner.fileno() in ready:
            try:
                message, (handle,) = owner.receive_with_handles()
            except EOFError:
                os._exit(0)  # without waiting for the programs, which end with this process
            channel = Channel(socket.socket(fileno=handle))
            inherited: list[Channel | _Served] = [owner, channel, *programs.values()]
            request, log = json.loads(message)
            begin = functools.partial(_begin, run, request, log, inherited)
            served = _Served(fork(begin), channel)
            programs[served.process.fileno()] = served
            asking[channel.fileno()] = served
            poll.register(served.process, select.POLLIN)
            poll.register(channel, select.POLLIN)
            served.report(pid=served.process.pid)


def _begin(run: Run, request: Any, log: str, inherited: Sequence[Channel | _Served]) -> None:
    """Become a program."""
    os.setsid()
    for each in inherited:
        each.close()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    run(request)
