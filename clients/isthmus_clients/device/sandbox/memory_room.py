"""How much memory this machine has left, and how much the processes of a task use (Linux)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that further processes can use without swapping; 0 if that is not known.

    The least of what the machine has available and what is left of the limits of the control groups
    (version 2) that this process is in.

    Args:
        proc: where proc(5) is.
        cgroups: where the control groups are.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        (available,) = (int(line.split()[1]) << 10 for line in lines if "MemAvailable:" in line)
    except (OSError, ValueError):
        return 0
    with contextlib.suppress(OSError, StopIteration):
        memberships = (proc / "self/cgroup").read_text().splitlines()
        inside = next(line[3:] for line in memberships if line.startswith("0::"))
        group = cgroups / inside.lstrip("/")
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no limit says max
                limit = int((each / "memory.max").read_text())
                available = min(available, limit - int((each / "memory.current").read_text()))
    return max(0, available)


def memory_of_group(leader: int, proc: Path = _PROC) -> int:
    """Resident bytes of all processes of a process group; pages that they share count for each."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for path in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            # The name of a program can contain anything, and ends with the last bracket.
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:
                total += int(fields[21]) * page
    return total
