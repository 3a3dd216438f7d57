"""What an agent is told when it is started."""

from __future__ import annotations

import dataclasses
import json


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
        """For the nodes of a cluster."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentSettings:
        """What `to_json` wrote."""
        return cls(**json.loads(text))
