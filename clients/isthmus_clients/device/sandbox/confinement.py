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
    _limit_resources(confinement.memory_mb)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    files, missing_files = _restrict_files(confinement)
    drop_capabilities()
    network, missing_network = _restrict_calls(separate)
    missing = [each for each in (missing_network, missing_files) if each]
    if missing and confinement.required:
        raise UserError(
            f"its owner requires a sandbox for tasks (required, in policy.toml), and "
            f"{' and '.join(missing)}"
        )
    processes = "processes of its own (namespace)" if separate else "processes not separated"
    return f"{network}; {files}; {processes}"


def _limit_resources(memory_mb: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    with contextlib.suppress(OSError):  # when memory is short, the kernel ends the task first
        Path("/proc/self/oom_score_adj").write_text("1000")


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


def _restrict_calls(separate: bool) -> tuple[str, str | None]:
    """Returns what is in force, and what is missing."""
    try:
        seccomp.restrict()
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
    return [path for path in sorted(found) if path.exists() and path != Path("/")]


def _without(path: Path, hidden: Path) -> Iterable[Path]:
    """A readable path, or its parts if something in it must stay hidden."""
    if path == hidden or path.is_relative_to(hidden):
        return
    if not hidden.is_relative_to(path):
        yield path
        return
    for part in path.iterdir():
        yield from _without(part, hidden)
