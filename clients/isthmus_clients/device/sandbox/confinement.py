"""The restrictions of a task's process, as far as the kernel has them.

They are put in force before any code of a task is loaded, in a process that still has one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from isthmus.errors import UserError
from isthmus_clients.device.sandbox import landlock, seccomp
from isthmus_clients.device.sandbox.system_calls import drop_capabilities, prctl

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_CHILD_SUBREAPER = 36

_SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/self",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)
"""What programs need besides Python itself."""

_OPEN_FILES = 1024
"""Most open files of each process. Each may be a socket or a pipe, whose buffers are memory of the
kernel."""
_DEVICES = Path("/dev")
_NVIDIA = ("/proc/driver/nvidia", "/proc/devices", "/sys/module", "/sys/bus/pci", "/sys/devices")
"""What the CUDA driver reads."""


@dataclasses.dataclass(frozen=True)
class Confinement:
    """What a task's process keeps."""

    readable: tuple[Path, ...]
    """The task's folder, the device's data and what else the owner permits."""
    scratch: Path
    """The only directory that can be written to."""
    hidden: Path
    """The device's state, which must not be readable, even inside a readable directory."""
    required: bool = False
    """Refuse to go on without the restrictions on network and files."""
    memory_mb: int | None = None
    """The owner's limit, see `isthmus_clients.device.resource_limits`."""
    processes: int = 256
    """Most processes, each of their threads counted."""
    scratch_mb: int = 1000
    """Most disk space of the scratch directory."""
    nvidia: bool = False
    """The owner has the task train on an Nvidia device, whose driver it may use."""


def confine(confinement: Confinement, *, separate: bool) -> str:
    """Put the restrictions in force; returns one line that says which.

    Args:
        confinement: what the process keeps.
        separate: whether the process is in namespaces of its own.

    Raises:
        UserError: the owner requires a restriction that this kernel lacks.
    """
    _limit_resources(confinement)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    files, missing_files = _restrict_files(confinement)
    drop_capabilities()
    network, missing_network = _restrict_calls(separate, confinement.nvidia)
    missing = [each for each in (missing_network, missing_files) if each]
    if missing and confinement.required:
        raise UserError(
            f"its owner requires a sandbox for tasks (required, in policy.toml), and "
            f"{' and '.join(missing)}"
        )
    processes = "processes of its own (namespace)" if separate else "processes not separated"
    return f"{network}; {files}; {processes}"


def _limit_resources(confinement: Confinement) -> None:
    """Set the limits of each process; the agent watches what all of them use together."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = [
        (resource.RLIMIT_FSIZE, confinement.scratch_mb << 20),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ]
    if confinement.memory_mb is not None:
        limits.append((resource.RLIMIT_DATA, confinement.memory_mb << 20))
    if _has_users_of_its_own():
        limits.append((resource.RLIMIT_NPROC, confinement.processes))
    for what, most in limits:
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # all that it starts stays below it, where it is counted
    with contextlib.suppress(OSError):  # when memory is short, the kernel ends the task first
        Path("/proc/self/oom_score_adj").write_text("1000")


def _has_users_of_its_own() -> bool:
    """Whether this process is in a user namespace with one user.

    The kernel counts processes by user and namespace (Linux 5.14): only there are they the task's.
    """
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return False
    return [line.split()[-1] for line in lines] in ([], ["1"])


def _restrict_files(confinement: Confinement) -> tuple[str, str | None]:
    """Returns what is in force, and what is missing."""
    system = [*map(Path, _SYSTEM), *_interpreter()]
    read = [part for path in system for part in _without(path, confinement.hidden)]
    # The null device is written to, and nothing can be changed in it.
    write = (confinement.scratch, Path("/dev/null"))
    devices: tuple[Path, ...] = ()
    if confinement.nvidia:
        read += map(Path, _NVIDIA)
        devices = tuple(sorted(_DEVICES.glob("nvidia*")))
    access = landlock.FileAccess((*read, *confinement.readable), write, devices)
    try:
        landlock.restrict(access)
    except OSError as error:
        return f"files NOT restricted (Landlock: {error.strerror})", "this kernel lacks Landlock"
    version = landlock.abi_version()
    unless = " but can be truncated" if version < landlock.TRUNCATE_ABI else ""
    return f"files read-only{unless} (Landlock {version})", None


def _restrict_calls(separate: bool, nvidia: bool) -> tuple[str, str | None]:
    """Returns what is in force, and what is missing."""
    try:
        seccomp.restrict(shared_memory=nvidia)
    except OSError as error:
        lacking = f"seccomp: {error.strerror}"
        report = f"network NOT restricted ({lacking})"
        if separate:
            report = f"no network but Unix sockets (namespace; {lacking})"
        return report, "this kernel lacks filters of system calls (seccomp)"
    return f"no network (seccomp{', namespace' if separate else ''})", None


def _interpreter() -> list[Path]:
    """Where this Python, its packages and its libraries are."""
    places = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path]
    places += [*sysconfig.get_paths().values(), str(Path(sys.executable).resolve())]
    places += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    found = {Path(place).resolve() for place in places if place and Path(place).is_absolute()}
    return [path for path in sorted(found) if _is_here(path) and path != Path("/")]


def _is_here(path: Path) -> bool:
    """Whether a path exists; no, if this user cannot know."""
    with contextlib.suppress(OSError):
        return path.exists()
    return False


def _without(path: Path, hidden: Path) -> Iterable[Path]:
    """A readable path, or its parts if something in it must stay hidden."""
    if path == hidden or path.is_relative_to(hidden):
        return
    if not hidden.is_relative_to(path):
        yield path
        return
    for part in path.iterdir():
        yield from _without(part, hidden)
