"""What leaves a device about a failure in a run with secure aggregation: nothing about its data.

The text of an exception, or that there was one, can depend on the data: a server that chooses the
models could read an example bit by bit. So a failure of the task ends in an update without weight
(`attempted`), and any other failure in one constant sentence (`constant_failures`). The device's
own log has the details. See docs/decisions/0032-withhold-failures-in-secure-runs.md.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from isthmus.errors import IsthmusError, TaskError, TaskInterrupted, causes
from isthmus.task import user_traceback

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)

WITHHELD = "the device could not do this; its own log says why"
"""What the server reads of a failure that may depend on the device's data."""

INTERRUPTED = "task-interrupted"
"""Code of a failure in a task's process that may be the server's, see `may_be_of_server`."""

_LACKING = frozenset(
    {
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.ECONNRESET,
        errno.EPIPE,
    }
)
"""Numbers of errors of a system that has no memory, processes, open files or disk space left.

The last two are those of a pipe to another process of the task that has ended."""
_KILLED = (-9, 137)
"""What a program returns that was killed, as for lack of memory, and a shell that ran it."""
_SAID_OF_LACK = (
    "allocate memory",
    "out of memory",
    "not enough memory",
    "_ALLOC_FAILED",
    "std::bad_alloc",
    "MemoryError",
    "killed by signal",
    "exited unexpectedly",
    "terminated abruptly",
    "unexpectedly terminated",
    "can't start new thread",
    *sorted(map(os.strerror, _LACKING)),
)
"""What PyTorch and Python say then, in a `RuntimeError` or an error without a number.

Also what they say of other processes of a task, whose errors come as text."""
_BROKEN = ("CUDA error:", "HIP error:")
"""How errors of an accelerator begin after which everything else on it fails in this process."""


class DetailsWithheld(IsthmusError):
    """A failure whose details are only in the device's own log."""

    def __init__(self, log_file: Path | None = None, error: Exception | None = None) -> None:
        """The error and the log are named only to a server that started this device itself.

        The same person has both then, see `isthmus run`.
        """
        super().__init__(WITHHELD if log_file is None else f"{_told(error)}; see {log_file}")


def attempted(what: str, work: Callable[[], _Result]) -> _Result | None:
    """The result of work on the device's data, or None if it failed, which only the log tells.

    Raises:
        DetailsWithheld: the server may have caused the failure, see `may_be_of_server`. Zeros
            instead would let it choose whose updates are in a sum.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - it is logged, and must not reach the server
        if _is_given_up(error):
            log.info("%s was stopped: the server has given the round up", what)
            raise DetailsWithheld from None
        if may_be_of_server(error):
            _log_failure(f"{what} failed", error)
            raise DetailsWithheld from None
        _log_failure(f"{what} failed; this device takes part without effect", error)
        return None


def may_be_of_server(error: BaseException) -> bool:
    """Whether a server can cause a failure by what it asks, whatever the device's data are.

    It can cancel the work, and have the memory, the processes or the disk space used up: with large
    batches of its job, with many large requests at once, or by what it asked before.

    >>> may_be_of_server(MemoryError()), may_be_of_server(TaskError("the row 7 is empty"))
    (True, False)
    """
    if isinstance(error, OSError):  # those of the task's code are the cause of a TaskError
        return True
    # What was hidden decides what has failed, and not in which words somebody says so.
    return any(
        isinstance(each, (TaskInterrupted, MemoryError)) or _is_of_lack(each)
        for each in causes(error, hidden=True)
    )


def has_broken_accelerator(error: BaseException) -> bool:
    """Whether nothing can be computed on an accelerator any more in the process of this error.

    >>> has_broken_accelerator(RuntimeError("CUDA error: device-side assert triggered"))
    True
    """
    return any(
        isinstance(each, RuntimeError) and str(each).startswith(_BROKEN)
        for each in causes(error, hidden=True)
    )


def _is_of_lack(error: BaseException) -> bool:
    """Whether an error says that the system has no memory, or none of something else, left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _LACKING
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode in _KILLED
    if isinstance(error, EOFError):
        return _is_of_pipe(error)
    # Those of a library, or of another process of the task, may have no number.
    is_of_system = isinstance(error, (OSError, RuntimeError))
    return is_of_system and any(said in str(error) for said in _SAID_OF_LACK)


def _is_of_pipe(error: EOFError) -> bool:
    """Whether a pipe to another process has ended, and not a file."""
    modules = [
        str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return bool(modules) and modules[-1].startswith("multiprocessing.")


@contextmanager
def constant_failures(
    withheld: bool, log_file: Path | None = None, *, on_data: bool = False
) -> Iterator[None]:
    """Replace errors that may depend on the device's data by one constant sentence.

    Deliberate errors keep their sentences where no data is read: the owner's limits, refusals of
    the protocol, an unknown run, a task that is not installed.

    Args:
        withheld: whether the run has secure aggregation; otherwise errors pass unchanged.
        log_file: of a device that the server has started, where the error is told too.
        on_data: the block reads the device's data or runs the task, so that every error counts.

    Raises:
        DetailsWithheld: the block raised such an error.
    """
    try:
        yield
    except DetailsWithheld:
        raise
    except Exception as error:
        if not withheld or (isinstance(error, IsthmusError) and not on_data):
            raise
        _log_failure("this device could not execute a request", error)
        raise DetailsWithheld(log_file, error) from None


@contextmanager
def without_text_of_task(withheld: bool) -> Iterator[None]:
    """Replace what the task's own code has raised by one constant sentence.

    It may quote an example, as a number that cannot be read does. Sentences of Isthmus about the
    task are kept: they say what to change, and quote none.

    Args:
        withheld: whether the server is not to read it; otherwise errors pass unchanged.

    Raises:
        DetailsWithheld: the block raised such an error, which the log of this device has.
    """
    try:
        yield
    except TaskError as error:
        if not withheld or error.__cause__ is None:
            raise
        _log_failure("the task failed on this device's data", error)
        raise DetailsWithheld from None


def _told(error: Exception | None) -> str:
    """An error in a sentence, which is not withheld."""
    if error is None:
        return WITHHELD
    return str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"


def _is_given_up(error: Exception) -> bool:
    return isinstance(error, TaskInterrupted) and error.is_given_up


def _log_failure(what: str, error: Exception) -> None:
    """Log a failure for the owner, with the lines of the task that led to it."""
    if not isinstance(error, IsthmusError):
        log.error("%s", what, exc_info=error)
        return
    if _is_given_up(error):
        log.info("%s: %s", what, error)
        return
    because = ", because of its task" if isinstance(error, TaskError) else ""
    log.error("%s%s: %s", what, because, error)
    if lines := user_traceback(error).rstrip():  # of a task without a process of its own
        log.error("%s", lines)
