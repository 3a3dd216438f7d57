"""The list of a server's participants: who they are, and what they do now."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isthmus.job.tables import LEAST_RATE
from isthmus.printable import counted, in_a_line
from isthmus_server.fleet.snapshot import FleetSnapshot, Seen
from isthmus_server.transport.check_ins import in_words

_WIDTH = 200
"""Columns where there is no terminal."""


class Registered(Protocol):
    """What the registry knows about a participant."""

    @property
    def name(self) -> str:
        """Name of the participant."""
        ...

    @property
    def kind(self) -> str:
        """client, datacenter, aggregator, operator or server."""
        ...

    @property
    def joined(self) -> float:
        """Unix seconds."""
        ...

    @property
    def revoked(self) -> float | None:
        """Unix seconds; None for a participant."""
        ...

    @property
    def not_after(self) -> float | None:
        """End of its latest certificate in Unix seconds."""
        ...

    @property
    def rollout(self) -> str:
        """Name of the token for many devices with which it joined; empty for its own token."""
        ...


@dataclasses.dataclass(frozen=True)
class FleetRow:
    """One participant, as it is listed."""

    name: str
    kind: str
    group: str
    state: str
    """online, offline, never seen, expired or revoked, or when it checks in again; a dash where
    nobody can know."""
    busy: Sequence[dict[str, Any]]
    last_seen: float | None
    version: str
    declined: dict[str, Any]
    joined: float
    certificate_until: float | None
    bytes_per_second: float | None
    """Rate of its transfers since it connected; None if too few were made to tell."""
    aggregator: str = ""
    """Name of the aggregator through which it is connected; empty at the server itself."""
    devices: int | None = None
    """Devices that are connected through it; None if it is no aggregator that is connected."""

    @property
    def slowness(self) -> str:
        """Why rounds may end without it, if its link is too slow; else empty."""
        rate = self.bytes_per_second
        if self.state != "online" or rate is None or rate >= LEAST_RATE:
            return ""
        return (
            f"{self.name} moves {rate / 1000:.3g} kB/s: rounds of jobs with a larger "
            f"time.least_rate ({LEAST_RATE / 1000:g} kB/s by default) may end without it"
        )


def fleet_rows(entries: Sequence[Registered], found: FleetSnapshot | None) -> list[FleetRow]:
    """The participants of a registry with what a snapshot says about them."""
    current = found is not None and found.is_current()
    rows = []
    for entry in entries:
        seen = Seen() if found is None else found.participants.get(entry.name, Seen())
        devices = found.aggregators.get(entry.name) if found is not None and current else None
        online = (current and seen.online) or devices is not None
        rows.append(
            FleetRow(
                name=entry.name,
                kind=entry.kind,
                group=entry.rollout,
                state=_state(entry, seen, online),
                busy=[dict(work) for work in seen.busy] if online else [],
                last_seen=seen.last_seen or None,
                version=seen.version,
                declined=dict(seen.declined),
                joined=entry.joined,
                certificate_until=None if entry.revoked is not None else entry.not_after,
                bytes_per_second=seen.rate or None,
                aggregator=seen.aggregator if online else "",
                devices=devices,
            )
        )
    return rows


def _state(entry: Registered, seen: Seen, online: bool) -> str:
    if entry.revoked is not None:
        return "revoked"
    if online:
        return "online"
    if seen.checks_in_at > time.time():
        return in_words(seen.checks_in_at)
    if entry.not_after is None or entry.not_after <= time.time():
        return "expired"
    if entry.kind == "aggregator":
        return "offline"
    if entry.kind not in ("client", "datacenter"):
        return "-"  # operators and servers hold no connection
    return "offline" if seen.last_seen else "never seen"


def print_fleet(
    entries: Sequence[Registered], found: FleetSnapshot | None, *, as_json: bool = False
) -> None:
    """Print who takes part in a server now."""
    rows = fleet_rows(entries, found)
    running = found is not None and found.is_current()
    waiting = dict(found.waiting) if found is not None and running else {}
    if as_json:
        document = {
            "server": "running" if running else "not running",
            "participants": [dataclasses.asdict(row) for row in rows],
            "waiting": waiting,
        }
        print(json.dumps(document, indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if not rows:
        console.print("no participant has joined yet")
        return
    titles = (
        "name",
        "kind",
        "state",
        "through",
        "busy with",
        "last seen (UTC)",
        "version",
        "group",
    )
    table = Table(*titles, "certificate until (UTC)", box=None)
    for row in rows:
        busy = ", ".join(map(_work, row.busy)) or "-"
        if row.devices is not None:
            busy = counted(row.devices, "device")
        through = row.aggregator or "-"
        seen = "now" if row.state == "online" else _date(row.last_seen)
        until = "revoked" if row.state == "revoked" else _date(row.certificate_until)
        now = (row.name, row.kind, row.state, through, busy, seen)
        texts = (*now, row.version or "-", row.group or "-", until)
        table.add_row(*(escape(in_a_line(text)) for text in texts))
    console.print(table)
    for row in rows:
        if row.declined:
            _say(console, f"{row.name} declined {row.declined['job']}: {row.declined['reason']}")
        if row.slowness:
            _say(console, row.slowness)
    for job, reason in waiting.items():
        _say(console, f"{job} is {reason}")
    if not running:
        _say(console, "the server is not running")


def _say(console: Console, line: str) -> None:
    console.print(in_a_line(line), markup=False, highlight=False, soft_wrap=True)


def _work(work: dict[str, Any]) -> str:
    if note := work.get("note"):
        return f"{work['job'] or 'a run'}: {note}"
    of = f" round {work['round']}" if work["round"] else f" ({work['work'].replace('_', ' ')})"
    return f"{work['job'] or 'a run'}{of}"


def _date(timestamp: float | None) -> str:
    return "-" if timestamp is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(timestamp))
