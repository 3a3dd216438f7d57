"""Print a systemd user unit for a device."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from isthmus_clients.device.owner_limits import OwnerLimits


def unit(command: Sequence[str], folder: str, limits: OwnerLimits) -> str:
    """The text of a user unit that runs a command in a folder with the owner's limits.

    >>> print(unit(["isthmus", "client", "start"], "/home/me", OwnerLimits(memory_mb=512)))
    [Unit]
    ...
    MemoryMax=512M
    ...
    """
    resource_lines = []
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
            "Nice=10",
            *resource_lines,
            "NoNewPrivileges=yes",
            "",
            "[Install]",
            "WantedBy=default.target",
        ]
    )
