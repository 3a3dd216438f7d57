"""The participants of a server, or those that the log of a run names."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus_server.fleet.registry_file import NAME
from isthmus_server.read.console.sources import ConsoleSource
from isthmus_server.storage.events import (
    CohortAwaited,
    LayoutChanged,
    ParticipantDeclined,
    ParticipantLate,
    ParticipantLeft,
    ParticipantUnready,
    RunAdopted,
    RunBranched,
    RunServed,
    RunStopped,
    ServerTakenOver,
)
from isthmus_server.transport.check_ins import in_words


@dataclasses.dataclass(frozen=True)
class DeviceRow:
    """One participant."""

    name: str
    kind: str
    state: str
    version: str = ""
    last_seen: float = 0.0
    """Unix seconds; 0 if never."""
    busy: Sequence[Mapping[str, Any]] = ()
    reason: str = ""
    """Why it declined or left."""
    aggregator: str = ""
    """Name of the aggregator through which it is connected; empty at the server itself."""
    devices: int | None = None
    """Devices that are connected through it; None if it is no aggregator that is connected."""


def device_rows(source: ConsoleSource) -> list[DeviceRow]:
    """All participants by name.

    Raises:
        UserError, sqlite3.Error: a log cannot be read.
    """
    if source.is_server:
        return _of_server(source)
    return _of_run(source) if source.is_run else []


def _of_server(source: ConsoleSource) -> list[DeviceRow]:
    rows = {
        name: DeviceRow(
            name,
            kind,
            "revoked" if revoked else "offline" if kind == "aggregator" else "never seen",
        )
        for name, kind, revoked in _registered(source)
        if kind in ("client", "datacenter", "aggregator")
    }
    fleet = source.fleet()
    current = fleet is not None and fleet.is_current()
    if fleet is not None and current:
        for name, devices in fleet.aggregators.items():
            rows[name] = DeviceRow(name, "aggregator", "online", devices=devices)
    for name, seen in (fleet.participants if fleet is not None else {}).items():
        online = current and seen.online
        state = "busy" if online and seen.busy else "online" if online else "offline"
        if not online and seen.checks_in_at > time.time():
            state = in_words(seen.checks_in_at)
        if name in rows and rows[name].state == "revoked":
            state = "revoked"
        declined = seen.declined
        rows[name] = DeviceRow(
            name,
            seen.kind or (rows[name].kind if name in rows else ""),
            state,
            seen.version,
            seen.last_seen,
            seen.busy if online else (),
            f"{declined['job']}: {declined['reason']}" if declined else "",
            seen.aggregator if online else "",
        )
    return sorted(rows.values(), key=lambda row: row.name)


def _registered(source: ConsoleSource) -> list[Any]:
    file = source.path / NAME
    if not file.exists():
        return []
    uri = f"{file.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as database:
        return database.execute("SELECT name, kind, revoked FROM participants").fetchall()


def _of_run(source: ConsoleSource) -> list[DeviceRow]:
    rows: dict[str, DeviceRow] = {}
    run = source.run(source.run_names()[0])
    for event in run.store.events():
        # Events of the run, and of no device; or of a device whose state another event says.
        others = RunStopped | RunAdopted | RunBranched | RunServed | LayoutChanged | CohortAwaited
        elsewhere = ServerTakenOver | ParticipantLate | ParticipantUnready
        if isinstance(event, others | elsewhere):
            continue
        reason = event.reason if isinstance(event, ParticipantDeclined | ParticipantLeft) else ""
        rows[event.participant] = DeviceRow(
            event.participant, "", event.kind, last_seen=event.at, reason=reason
        )
    return sorted(rows.values(), key=lambda row: row.name)
