"""Linux namespaces of a task's process, for which no privileges are needed (user_namespaces(7))."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from isthmus_clients.device.sandbox.system_calls import unshare

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000


def enter_namespaces() -> bool:
    """Move to a network without interfaces, and the next child to processes of its own.

    The child is process 1 of its namespace: all others in it end with it. Returns False where the
    kernel or its settings do not permit namespaces; nothing has changed then. The process must
    have one thread.
    """
    uid = os.geteuid()
    gid = os.getegid()
    separate = _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC
    try:
        unshare(_CLONE_NEWUSER | separate)
    except OSError:
        try:
            unshare(separate)  # root in a container without user namespaces
        except OSError:
            return False
        return True
    maps = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))
    for name, text in maps:
        with contextlib.suppress(OSError):  # its own user is then shown as nobody
            Path("/proc/self", name).write_text(text)
    return True
