"""Access to files through Landlock, for a process and all of its descendants.

Landlock is in Linux since 5.13 and works without privileges (landlock(7); Salaün, "Landlock:
unprivileged access control", https://landlock.io). A process states which accesses it gives up, and
the directories where it keeps some of them. It can never get them back.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from isthmus_clients.device.sandbox.system_calls import system_call

# The numbers are the same on all architectures.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_MAKE_CHAR = 1 << 6
_MAKE_BLOCK = 1 << 11
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_LAST_RIGHT = {1: 12, 2: 13, 3: 14, 4: 14, 5: 15}
"""By ABI version: the number of the last right on files that it knows."""
_TCP = 0b11
"""Bind and connect, since ABI 4."""
_SCOPES = 0b11
"""Abstract Unix sockets and signals of processes outside, since ABI 6."""

TRUNCATE_ABI = 3
"""The first version that also restricts truncation."""


@dataclasses.dataclass(frozen=True)
class FileAccess:
    """Files and directories that stay accessible; those that do not exist are ignored."""

    read: tuple[Path, ...]
    """Paths to read and to execute, with everything beneath."""
    write: tuple[Path, ...]
    """Paths to read, to execute and to change, with everything beneath."""
    devices: tuple[Path, ...] = ()
    """Paths to read, to write and to control, with everything beneath; device files."""


def abi_version() -> int:
    """Version of Landlock of this kernel; 0 without Landlock."""
    try:
        return system_call(_CREATE_RULESET, ctypes.c_void_p(None), 0, _CREATE_RULESET_VERSION)
    except OSError:  # not in this kernel, or switched off at boot, or refused by a container
        return 0


def restrict(access: FileAccess) -> None:
    """Give up every access to files but the given one, for this thread and its descendants.

    The process must have set PR_SET_NO_NEW_PRIVS.

    Raises:
        OSError: this kernel has no Landlock.
    """
    abi = abi_version()
    rights = (1 << _LAST_RIGHT.get(abi, max(_LAST_RIGHT.values())) + 1) - 1
    attributes = struct.pack("=QQQ", rights, _TCP, _SCOPES)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = system_call(_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0)
    try:
        _allow(ruleset, access.read, (_EXECUTE | _READ_FILE | _READ_DIR) & rights)
        _allow(ruleset, access.write, rights & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV))
        _allow(
            ruleset, access.devices, (_READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL_DEV) & rights
        )
        system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, paths: Iterable[Path], rights: int) -> None:
    for path in paths:
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            rights_here = rights if path.is_dir() else rights & _OF_A_FILE
            rule = struct.pack("=Qi", rights_here, handle)
            system_call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
        finally:
            os.close(handle)
