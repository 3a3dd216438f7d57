"""Print a systemd user unit for a device."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from isthmus_clients.device.owner_limits import OwnerLimits

GRACE_SECONDS = 30.0
"""Time for a running request to end after SIGTERM; then the server is told within a few seconds."""

_STOP_SECONDS = GRACE_SECONDS + 15.0

_HARDENING = (
    "NoNewPrivileges=yes",
    "ProtectSystem=strict",
    "PrivateTmp=yes",
    "PrivateDevices=yes",
    "ProtectKernelTunables=yes",
    "ProtectControlGroups=yes",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "SystemCallArchitectures=native",
)
"""Restrictions of the whole service, besides those of a task's process within it.

That process makes namespaces of its own and restricts itself with Landlock and seccomp, so there is
no RestrictNamespaces and no SystemCallFilter. There is no MemoryDenyWriteExecute either, as PyTorch
generates code at run time.
"""

_THREADS_OF_THE_AGENT = 256
"""Most threads of the agent, whose libraries start one for each core."""


def unit(
    command: Sequence[str], folder: str, limits: OwnerLimits, writable: Sequence[str] = ()
) -> str:
    """The text of a user unit that runs a command in a folder with the owner's limits.

    Only the directories `writable` can be written to, which must exist when the unit starts.

    >>> print(unit(["isthmus", "client", "start"], "/home/me", OwnerLimits(memory_mb=512)))
    [Unit]
    ...
    MemoryMax=512M
    ...
    """
    resource_lines = [f"TasksMax={limits.sandbox.processes + _THREADS_OF_THE_AGENT}"]
    if limits.cpu_percent is not None:
        resource_lines.append(f"CPUQuota={limits.cpu_percent}%")
    if limits.memory_mb is not None:
        resource_lines.append(f"MemoryMax={limits.memory_mb}M")
    # A unit file reads % itself, and $ in a command.
    line = shlex.join(command).replace("%", "%%").replace("$", "$$")
    folder = folder.replace("%", "%%")
    return "\n".join(
        [
            "[Unit]",
            "Description=Isthmus edge device",
            "Wants=network-online.target",
            "After=network-online.target",
            "",
            "[Service]",
            f"WorkingDirectory={folder}",
            f"ExecStart={line}",
            "Restart=on-failure",
            "RestartSec=30",
            # A permanent refusal (exit code 1) needs a person and must not be repeated.
            "RestartPreventExitStatus=1",
            # SIGTERM is for the agent, which ends the task's process after its request.
            "KillMode=mixed",
            f"TimeoutStopSec={_STOP_SECONDS:g}",
            "Nice=10",
            *resource_lines,
            *_HARDENING,
            *(f"ReadWritePaths={_quoted(path)}" for path in writable),
            "",
            "[Install]",
            "WantedBy=default.target",
        ]
    )


def _quoted(path: str) -> str:
    """A path in a list of paths, where spaces separate and % begins a specifier."""
    return json.dumps(path, ensure_ascii=False).replace("%", "%%")
