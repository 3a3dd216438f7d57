"""A device as a systemd unit of its owner: printed, not installed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from isthmus_clients.device.owner_limits import Policy


def unit(command: Sequence[str], folder: str, policy: Policy) -> str:
    """The text of a user unit that runs a command in a folder, held to the policy's caps.

    >>> print(unit(["isthmus", "client", "start"], "/home/me", Policy(memory_mb=512)))
    [Unit]
    ...
    MemoryMax=512M
    ...
    """
    caps = []
    if policy.cpu_percent is not None:
        caps.append(f"CPUQuota={policy.cpu_percent}%")
    if policy.memory_mb is not None:
        caps.append(f"MemoryMax={policy.memory_mb}M")
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
            # A refusal for good (exit code 1) is for a person to look at, not to be repeated.
            "RestartPreventExitStatus=1",
            "Nice=10",
            *caps,
            "NoNewPrivileges=yes",
            "",
            "[Install]",
            "WantedBy=default.target",
        ]
    )
