"""The arguments of an agent process, as its fork server or its node receives them."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """The arguments of an agent process."""

    host: str
    port: int
    """Port of the service's control store."""
    generation: int
    participant: str
    """Name of the datacenter on the link."""
    state: str
    """Directory of the checkpoints."""
    ranks: int
    """Ranks on this node."""
    nodes: int = 1
    restarts: int
    """Restarts of the ranks before the agent ends; the service then starts another one."""
    logs: str
    """Directory for the output of the ranks."""
    key: str = dataclasses.field(default="", repr=False)
    """Key of the control store, in hexadecimal digits; empty for nodes, which have its file."""

    def to_json(self) -> str:
        """Encode the settings for the nodes of a cluster."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentSettings:
        """Decode what `to_json` returned."""
        return cls(**json.loads(text))
