"""What a server knows about its participants at one time."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

_STALE_SECONDS = 30.0
"""A server that runs has written the snapshot more recently."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """One participant."""

    kind: str = ""
    """client or datacenter."""
    online: bool = False
    last_seen: float = 0.0
    """Unix seconds; of those that are online, of the snapshot."""
    version: str = ""
    """Version of Isthmus, as the participant states it."""
    busy: Sequence[Mapping[str, Any]] = ()
    """What it is asked for: the `job`, the `round` (0 if none) and the kind of `work`;
    of a download also a `note`, how far it is."""
    declined: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The `job` that it declined last, the `reason`, and when (`at`, Unix seconds)."""

    checks_in_at: float = 0.0
    """When it comes back, as it was asked to, in Unix seconds; 0 if it was not asked to go."""

    rate: float = 0.0
    """Bytes per second of its transfers; 0 if it is not known."""

    aggregator: str = ""
    """Name of the aggregator through which it is connected; empty at the server itself."""

    def changed(self, **changes: Any) -> Seen:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetFigures:
    """How many devices a server has, and where they are now."""

    enrolled: int
    """Devices that have joined and may connect."""
    direct: int
    """Devices that are connected to the server itself."""
    aggregated: int
    """Devices that are connected through aggregators."""
    away: int
    """Devices that were told when to check in, and are away until then."""
    next_check_in: float | None = None
    """When the first of these checks in, in Unix seconds; None if none is away."""
    aggregators: Mapping[str, int]
    """Devices at each aggregator that is linked, by its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """The participants of a server, and what its jobs wait for."""

    at: float
    """Unix seconds."""
    running: bool
    """False if the server has ended."""
    participants: Mapping[str, Seen]
    """By name."""
    waiting: Mapping[str, str]
    """By job: what it waits for, in words."""
    aggregators: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Aggregators that are connected, by name, with the number of devices there."""

    def to_json(self) -> bytes:
        """The snapshot as JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Read what `to_json` returned.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        table = json.loads(data)
        participants = {name: Seen(**seen) for name, seen in table["participants"].items()}
        return cls(**{**table, "participants": participants})

    def is_current(self) -> bool:
        """Whether the server that wrote it runs, as far as a file can say."""
        return self.running and time.time() - self.at < _STALE_SECONDS

    def says_the_same(self, other: FleetSnapshot | None) -> bool:
        """Whether another one differs only in its times."""
        if other is None or self.waiting != other.waiting:
            return False
        if self.aggregators != other.aggregators:
            return False
        timeless = [
            {
                name: seen.changed(last_seen=0.0, rate=0.0)
                for name, seen in each.participants.items()
            }
            for each in (self, other)
        ]
        return timeless[0] == timeless[1]
