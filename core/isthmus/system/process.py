"""Processes of Linux and glibc: death with the parent, signals, protected and freed memory."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies (Linux).

    Call it first in the child. A parent that dies during the call is detected too, and with its
    process id in `parent` also one that died earlier. In a container the parent may be process 1.
    """
    parent = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def signal_name(number: int) -> str:
    """A signal in words, such as `signal 11 (SIGSEGV)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return f"signal {number}"


def protect_memory() -> None:
    """Have the kernel refuse other processes of this user access to this process's memory.

    There are no core dumps of it either. Only root can attach a debugger. Inherited by forked
    processes, not by other programs.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def return_freed_memory(block_bytes: int = 4 << 20) -> None:
    """Have glibc return freed blocks of at least `block_bytes` to the kernel at once.

    By default glibc raises its threshold with the first large block, so that a server that handles
    one model after another keeps the memory of several.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, block_bytes)
        libc.mallopt(_M_TRIM_THRESHOLD, block_bytes)
        libc.mallopt(_M_ARENA_MAX, 2)


def trim_freed_memory() -> None:
    """Return to the kernel what is free now, between blocks that are in use."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def keep_freed_memory() -> None:
    """Have glibc keep large freed blocks for the next ones.

    A process that computes the same tensors in each step gets no new pages for them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
