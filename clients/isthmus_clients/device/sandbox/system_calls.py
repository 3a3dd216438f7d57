"""System calls that Python does not offer, through the C library."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_CAPABILITY_VERSION_3 = 0x20080522
_libc.syscall.restype = ctypes.c_long


def prctl(option: int, value: int) -> None:
    """Set a property of this process or thread (prctl(2)).

    Raises:
        OSError: the kernel refuses it.
    """
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def unshare(flags: int) -> None:
    """Move this process to new namespaces (unshare(2)).

    Raises:
        OSError: the kernel refuses it, or lacks one of them.
    """
    _checked(_libc.unshare(flags))


def drop_capabilities() -> None:
    """Give up all capabilities of this process (capset(2)).

    Raises:
        OSError: the kernel refuses it.
    """
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))))


def system_call(number: int, *arguments: Any) -> int:
    """Make a system call; integers are passed as C longs, ctypes objects as they are.

    Raises:
        OSError: the call failed.
    """
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *converted))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
