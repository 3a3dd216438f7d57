"""The agent process: owns the fork server and the elastic engine, and through them all ranks.

It is a session of its own, so that ending its process group ends everything below it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing.forkserver
import os
import sys

from isthmus.lifetime import die_with_parent

FORKSERVER_OWNER = "ISTHMUS_AGENT_PID"
"""Environment variable by which the fork server knows that it is one, and whose."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What an agent is started with."""

    host: str
    port: int
    """The service's control store."""
    generation: int
    participant: str
    """Name of the datacenter on the link."""
    state: str
    """Directory of the checkpoints."""
    ranks: int
    """On this node."""
    nodes: int = 1
    restarts: int
    """Restarts of the ranks before the agent gives up; the service then starts another one."""
    logs: str
    """Directory for the output of the ranks."""

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentSettings:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def main() -> None:
    """Run until the ranks have failed too often, or the service ends."""
    die_with_parent()
    settings = AgentSettings.from_json(sys.argv[1])
    # The fork server imports torch while we do.
    os.environ[FORKSERVER_OWNER] = str(os.getpid())
    multiprocessing.set_forkserver_preload(["isthmus_datacenter.forkserver"])
    multiprocessing.forkserver.ensure_running()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    from isthmus_datacenter.elastic import run

    run(settings)
