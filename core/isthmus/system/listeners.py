"""Which users listen at a TCP port of this machine, by what Linux says of its sockets.

A port of the loopback interface has no permissions: the first process that asks for it has it, of
any user. Who dials it without certificates has to know whose it is.
"""

from __future__ import annotations

import os
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
"""The state of a socket that listens (`TCP_LISTEN` of the kernel)."""
_ADDRESS = 1
_STATE = 3
_USER = 7
"""Columns of the tables, see `proc(5)`."""
_ROOT = 0


def other_users_at(port: int) -> list[int]:
    """The ids of other users than this one and root whose sockets listen at a port, sorted.

    Empty as well where the system does not say it.
    """
    found = set()
    for table in _TABLES:
        try:
            _, *rows = table.read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            continue
        for row in rows:
            columns = row.split()
            _, _, number = columns[_ADDRESS].rpartition(":")
            if columns[_STATE] == _LISTENS and int(number, 16) == port:
                found.add(int(columns[_USER]))
    return sorted(found - {os.getuid(), _ROOT})
