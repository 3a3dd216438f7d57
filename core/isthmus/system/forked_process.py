"""A fork of this process that runs one function, and how every process's end is told.

The end of a process is one number in all of Isthmus, the exit code: 0 or more is the exit status,
and a negative one is the signal that killed it.

>>> process = fork(lambda: exit(3))
>>> process.wait()
3
>>> described(process.end()), described(-9)
('exit status 3', 'signal 9 (SIGKILL)')
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from isthmus.system.process import die_with_parent, signal_name


class ForkedProcess:
    """A child of this process, which `fork` has started."""

    def __init__(self, pid: int) -> None:
        """Use `fork`."""
        self.pid = pid
        self._code: int | None = None
        self._handle = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Descriptor that is readable once the process has ended; until `end`."""
        return self._handle

    def wait(self, seconds: float | None = None) -> int | None:
        """Exit code of the process; None if it has not ended within `seconds`."""
        if self._code is None and is_readable(self, seconds):
            # Only now is its id free for another process: no signal of this one goes astray.
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def end(self, seconds: float | None = 0.0) -> int:
        """Wait for its end, kill it after `seconds`, and forget it; returns its exit code."""
        if self.wait(seconds) is None:
            os.kill(self.pid, signal.SIGKILL)
        code = self.wait()
        assert code is not None
        self.forget()
        return code

    def forget(self) -> None:
        """Close the descriptor, as a fork of the parent does, whose child this is not."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def fork(work: Callable[[], object]) -> ForkedProcess:
    """Run a function in a fork, which ends with it, and is killed when this thread ends.

    The fork has no standard input. It exits with 0, with the status of a `SystemExit`, or with 1
    after any other exception, whose traceback it prints. Nothing of this process is cleaned up in
    it. Other threads of this process are missing in it, so there should be none, or none that hold
    a lock which the function needs.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(work, parent)
    return ForkedProcess(pid)


def _run(work: Callable[[], object], parent: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)  # of the parent's event loop
        _close_input()
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the outermost frame
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _close_input() -> None:
    """Put nothing in the place of the standard input, which is the parent's."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing:
        os.dup2(nothing, 0)
        os.close(nothing)


def is_readable(what: ForkedProcess | int, seconds: float | None) -> bool:
    """Whether a descriptor is readable, or the connection is closed, within `seconds`."""
    poll = select.poll()  # select() takes no descriptors above 1023
    poll.register(what, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


def described(code: int) -> str:
    """How a process has ended, in words."""
    return signal_name(-code) if code < 0 else f"exit status {code}"
