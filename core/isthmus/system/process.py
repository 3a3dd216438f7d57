"""What Linux does for a process as a whole: when it ends, and what it does with freed memory."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (Linux).

    Call it first thing in the child. A parent that dies while this runs is noticed too, and with
    its process number in `parent` one that died before. In a container the parent may well be
    process 1.
    """
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def return_freed_memory() -> None:
    """Have glibc give large blocks back when they are freed, instead of keeping them for later.

    Left to itself it raises its threshold with the first large block it sees, and a server that
    handles models one after another ends up holding several of them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 << 20)
        libc.mallopt(_M_ARENA_MAX, 2)
