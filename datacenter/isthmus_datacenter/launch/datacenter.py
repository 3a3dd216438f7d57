"""What the nodes of a datacenter run: each an agent, and the first also the service."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import ClassVar

from isthmus.identity.proxies import ProxyChoice
from isthmus_datacenter.launch import Launch, NodeShell


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatacenterLaunch(Launch):
    """The service and ranks to start; `state` is the state directory."""

    server: str
    """host:port"""
    data: Path | None = None
    tasks: Path | None = None
    blobs: tuple[str, ...] = ()
    """Sources of blobs, see `isthmus.transport.blob_sources`."""
    proxy: ProxyChoice = dataclasses.field(default_factory=ProxyChoice)
    """What the owner says about proxies, with the path of a file that all nodes have."""
    title: ClassVar[str] = "isthmus-"
    named_by: ClassVar[str] = "--name"
    kept_by: ClassVar[str] = "--state"
    grace_by: ClassVar[str | None] = "--grace"

    def each(self, shell: NodeShell) -> str:
        """See `Launch`: the agent, which connects to the service."""
        words = [*shell.isthmus, "datacenter", "agent", "--state", str(self.state)]
        return f"{shlex.join(words)} --control {shell.control}"

    def first(self, shell: NodeShell) -> str:
        """See `Launch`: the service."""
        words = [
            *shell.isthmus,
            *("datacenter", "serve", "--server", self.server, "--name", self.name),
            *("--ranks", str(self.ranks), "--nodes", str(self.nodes)),
            *("--state", str(self.state), "--grace", f"{self.grace_seconds:g}"),
            *(() if self.data is None else ("--data", str(self.data))),
            *(() if self.tasks is None else ("--tasks", str(self.tasks))),
            *(word for named in self.blobs for word in ("--blobs", named)),
            *self.proxy.words(),
        ]
        return f"{shlex.join(words)} --control {shell.control}"
