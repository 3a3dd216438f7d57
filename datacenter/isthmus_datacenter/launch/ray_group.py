"""A group of nodes as Ray is asked for it: the resources of each, and what it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayGroup:
    """What the driver asks of Ray, and what its nodes run."""

    name: str
    nodes: int
    bundle: dict[str, float]
    """Resources of one node by Ray's names; memory in bytes."""
    strategy: str
    """Strategy of the placement group."""
    address: str | None
    """Address of the cluster, HOST:PORT; None for that of RAY_ADDRESS, or of this machine."""
    needs_token: bool
    """Whether a cluster that asks nobody for a token is refused."""
    wait_seconds: float
    """How long Ray may take to find room."""
    grace_seconds: float
    """Time for the nodes to end in good order."""
    has_service: bool
    """Whether the group ends with the first node, to which the others come back."""
    state: Path
    """Directory that all nodes share, with the script and a log of each node."""
    script: Path
    """What each node runs."""
    digest: str
    """SHA-256 of the script."""
