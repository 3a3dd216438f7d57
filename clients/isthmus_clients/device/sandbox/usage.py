"""What the processes of a task use together: memory, threads and disk space (Linux).

The kernel limits each process. Together they could have as much as they are many, and there is
memory that no limit of a process counts. So the agent adds up, several times a second.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from isthmus_clients.device.sandbox.confinement import Confinement

_PROC = Path("/proc")
_OF_PROGRAMS = 64 << 20
"""Bytes that RLIMIT_DATA does not count either: constants of libraries, and the process that only
waits for the task's."""
_SOCKET_BUFFER = 212_992
"""Most bytes that wait in one socket, of the kernel's default; tasks cannot change it (seccomp)."""
_PIPE_BUFFER = 65_536
"""Most bytes that wait in one pipe, of the kernel's default; tasks cannot change it (seccomp)."""
_RANGE = 224
"""Bytes of the kernel for each range of addresses, also where nothing is stored."""
_PART = 1 << 16
"""Bytes of a file in proc(5) that are read at a time."""
_MOST_LOCKS = 10_000
"""Locks of a task on parts of files: the kernel needs memory for each, and long to list many."""
_BLOCK = 512
"""Unit of the size of a file on disk (stat(2))."""
_PAGE_TABLES = "VmPTE:"
"""Line of proc(5) with the size of page tables, which grow with each range of addresses that is
read, also where nothing is stored."""
_MOST_FILES = 50_000
"""Files of a scratch directory that are counted; more would take too long."""


def processes_of(leader: int) -> list[int]:
    """Ids of a process and of all that it has started, and that these have started.

    None has another parent meanwhile: they are in a namespace, or below a subreaper (prctl(2)).
    """
    found = [leader]
    for pid in found:  # which grows meanwhile
        for thread in _threads_of(pid):
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                found += map(int, (thread / "children").read_text().split())
    return found


def excess(leader: int, allowed: Confinement, shared: int, *, thorough: bool = True) -> str | None:
    """Say what a task's processes have more of than their owner allows; None if of nothing.

    Args:
        leader: the process that was started for the task.
        allowed: the owner's limits.
        shared: bytes of memory that the agent shares with the task, and that are not counted.
        thorough: also count what takes long to count.
    """
    pids = processes_of(leader)
    if sum(len(_threads_of(pid)) for pid in pids) > allowed.processes:
        return (
            f"it had more than {allowed.processes} processes and threads, and its owner allows "
            "no more (processes under [sandbox] in policy.toml)"
        )
    if thorough and _locks_of(pids) > _MOST_LOCKS:
        return f"it had more than {_MOST_LOCKS} locks on parts of files, and no task may have more"
    if allowed.memory_mb is None:
        return None
    most = (allowed.memory_mb << 20) + shared + _OF_PROGRAMS
    kernel = _buffers_of(pids)
    if thorough:
        kernel += _ranges_of(pids, most)
    resident = sum(map(_resident, pids)) + kernel
    if resident > most and (used := sum(map(_in_parts, pids)) + kernel) > most:
        return (
            f"its processes had {used >> 20} MB of memory together, and its owner allows "
            f"memory_mb={allowed.memory_mb}"
        )
    return None


def disk_excess(leader: int, allowed: Confinement) -> str | None:
    """Say that a task's files are larger than its owner allows; None if they are not."""
    most = allowed.scratch_mb << 20
    used = 0
    for number, size in enumerate(_sizes(allowed.scratch, processes_of(leader))):
        used += size
        if used > most or number > _MOST_FILES:
            return (
                f"its files had more than {allowed.scratch_mb} MB, or were more than "
                f"{_MOST_FILES}, and its owner allows no more (scratch_mb under [sandbox] in "
                "policy.toml)"
            )
    return None


def _threads_of(pid: int) -> list[Path]:
    """The threads of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return list((_PROC / str(pid) / "task").iterdir())
    return []


def _resident(pid: int) -> int:
    """Bytes of a process in memory, or swapped, that are not of a program or of a file on disk.

    Pages that several processes share count for each of them.
    """
    names = ("RssAnon:", "RssShmem:", "VmSwap:", _PAGE_TABLES)
    return _sum_of(pid, "status", names) or 0


def _in_parts(pid: int) -> int:
    """Bytes as in `_resident`, with shared pages divided among those that share them; slower."""
    used = _sum_of(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
    if used is None:
        return _resident(pid)
    return used + (_sum_of(pid, "status", (_PAGE_TABLES,)) or 0)


def _sum_of(pid: int, file: str, names: tuple[str, ...]) -> int | None:
    """The sum of some lines of a file in proc(5), in bytes; None if it has none of them."""
    with contextlib.suppress(OSError, ValueError):
        lines = (_PROC / str(pid) / file).read_text(errors="replace").splitlines()
        found = [int(line.split()[1]) << 10 for line in lines if line.startswith(names)]
        return sum(found) if found else None
    return None


def _sizes(scratch: Path, pids: Iterable[int]) -> Iterator[int]:
    """Bytes on disk of each file of a scratch directory, and of deleted ones that are open."""
    seen: set[tuple[int, int]] = set()
    for found in (*_below(scratch), *_open_in(pids)):
        # A file on another disk is none of this task's: it can write nowhere else.
        if (found.st_dev, found.st_ino) not in seen:
            seen.add((found.st_dev, found.st_ino))
            yield found.st_blocks * _BLOCK


def _below(scratch: Path) -> Iterator[os.stat_result]:
    """What is in a directory, at any depth; no symbolic link is followed."""
    pending = [str(scratch)]
    while pending:
        # It may have been deleted meanwhile, or made unreadable: the kernel lets tasks do neither
        # with the modes of files (seccomp).
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def _open_in(pids: Iterable[int]) -> Iterator[os.stat_result]:
    """Regular files without a name that processes have open."""
    for handle in _handles_of(pids):
        with contextlib.suppress(OSError):
            found = handle.stat()
            if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                yield found


def _buffers_of(pids: Iterable[int]) -> int:
    """Bytes that the sockets and pipes of processes may hold; no file of proc(5) says how many do.

    Each counts once, and as if it were full.
    """
    found = set()
    for handle in _handles_of(pids):
        with contextlib.suppress(OSError):
            found.add(str(handle.readlink()))
    sockets = sum(target.startswith("socket:") for target in found)
    pipes = sum(target.startswith("pipe:") for target in found)
    return sockets * _SOCKET_BUFFER + pipes * _PIPE_BUFFER


def _ranges_of(pids: Iterable[int], most: int) -> int:
    """Bytes of the kernel for the ranges of addresses of processes; not counted beyond `most`."""
    ranges = 0
    for pid in pids:
        with contextlib.suppress(OSError), (_PROC / str(pid) / "maps").open("rb") as file:
            while ranges * _RANGE <= most and (part := file.read(_PART)):
                ranges += part.count(b"\n")
    return ranges * _RANGE


def _locks_of(pids: Iterable[int]) -> int:
    """Locks of processes on parts of files, among the first ones of all programs."""
    own = {str(pid).encode() for pid in pids}
    locks = 0
    with contextlib.suppress(OSError), (_PROC / "locks").open("rb") as file:
        for line in itertools.islice(file, 2 * _MOST_LOCKS):
            # As in `1: POSIX ADVISORY WRITE 15 00:1e:20 0 0`; one that waits has an arrow.
            locks += not own.isdisjoint(line.split()[4:6])
    return locks


def _handles_of(pids: Iterable[int]) -> Iterator[Path]:
    """The entries of proc(5) for the open files of processes."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield from (_PROC / str(pid) / "fd").iterdir()
