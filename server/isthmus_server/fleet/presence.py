"""Who is connected to a server, with what it is busy, and what its jobs wait for, in a small file.

The running server writes it; `isthmus server participants` reads it without a connection. It says
when each participant was last seen, also after a restart. Nothing depends on it: a file that is
lost or damaged is written anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from isthmus.errors import DamagedError
from isthmus.printable import in_a_line
from isthmus.system.sealed_files import read_sealed_bytes, write_sealed_bytes
from isthmus.wire import link_pb2
from isthmus_server.fleet.snapshot import FleetFigures, FleetSnapshot, Seen
from isthmus_server.storage.events import (
    Event,
    EventStream,
    ParticipantDeclined,
    ParticipantReady,
)
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import ParticipantListener, Peer

FILE = "presence"
"""Name in the state directory."""

_WRITE_SECONDS = 1.0
_ALIVE_SECONDS = 10.0
"""Longest interval between two writes, by which readers know that the server runs."""

_MAX_VERSION = 32

_MOST_SEEN = 30_000
"""Participants that are kept, those that are connected and the last ones that were: of an absent
device of a large fleet there is only its row in the registry."""

log = logging.getLogger(__name__)


class FleetPresence(ParticipantListener):
    """Follows the participants and runs of one server, and writes the file.

    Guarantees:
      * a file that cannot be written delays and ends nothing, and gives one warning;
      * the file has no figures of a participant's work: only that it is asked, and for which round.
    """

    def __init__(
        self, directory: Path, link: Link, waiting: Callable[[], Mapping[str, str]]
    ) -> None:
        """Follow nothing yet.

        Args:
            directory: the server's state directory.
            link: of the server.
            waiting: returns what each job waits for at the moment, in words.
        """
        self._path = directory / FILE
        self._link = link
        self._now_waiting = waiting
        self._seen: dict[str, Seen] = {}
        self._labels: dict[str, str] = {}
        self._failed = False

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Keep the file current during the block; afterwards it says that nobody is connected."""
        earlier = read_snapshot(self._path.parent)
        self._seen = {} if earlier is None else dict(earlier.participants)
        self._link.listeners.attach(self)
        self._link.check_ins.away = self.away
        writing = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            self._link.listeners.detach(self)
            await self._write(self.snapshot(running=False))

    @contextlib.contextmanager
    def following(self, run_id: str, label: str, events: EventStream) -> Iterator[None]:
        """Follow the events of a run during the block; `label` is its job's name for operators."""
        self._labels[run_id] = label

        def note(event: Event) -> None:
            self._note(label, event)

        leave = events.subscribe(note)
        try:
            yield
        finally:
            leave()
            del self._labels[run_id]

    def _note(self, label: str, event: Event) -> None:
        match event:
            case ParticipantDeclined(participant=name, reason=reason):
                known = self._seen.get(name, Seen())
                said = {"job": label, "reason": reason, "at": event.at}
                self._seen[name] = known.changed(declined=said)
            case ParticipantReady(participant=name):  # it takes part in this job after all
                known = self._seen.get(name, Seen())
                if known.declined.get("job") == label:
                    self._seen[name] = known.changed(declined={})

    # -- the link ----------------------------------------------------------------------------------

    def left(self, peer: Peer, reason: str) -> None:
        """Keep when a participant was seen last."""
        self._seen.pop(peer.name, None)  # now the last one
        self._seen[peer.name] = self._of(peer, online=False)
        absent = (name for name in self._seen if name not in self._link.peers)
        for name in list(itertools.islice(absent, max(0, len(self._seen) - _MOST_SEEN))):
            del self._seen[name]

    def _of(self, peer: Peer, *, online: bool) -> Seen:
        busy: list[dict[str, Any]] = []
        if online:
            for request, _ in list(peer.pending.values()):
                kind = request.WhichOneof("work") or "open"
                work = getattr(request, kind)
                job = self._labels.get(work.run_id, "")
                doing = {"job": job, "round": getattr(work, "round", 0), "work": kind}
                if kind == "prepare":
                    doing["note"] = peer.download_of(request.id)
                busy.append(doing)
        return self._seen.get(peer.name, Seen()).changed(
            kind=link_pb2.Role.Name(peer.role).lower(),
            online=online,
            last_seen=time.time(),
            version=in_a_line(peer.software[:_MAX_VERSION]),
            busy=busy,
            rate=peer.transfer_time.rate or 0.0,
            checks_in_at=0.0 if online else peer.checks_in_at or 0.0,
            aggregator=peer.place.aggregator.name if online and peer.place is not None else "",
        )

    # -- the file ----------------------------------------------------------------------------------

    def snapshot(self, *, running: bool = True) -> FleetSnapshot:
        """The participants and the waiting jobs now."""
        absent = {"online": False, "busy": [], "aggregator": ""}
        now = {name: seen.changed(**absent) for name, seen in self._seen.items()}
        for peer in list(self._link.peers.values()):
            now[peer.name] = self._of(peer, online=running and peer.stream is not None)
        self._seen = now
        waiting = self._now_waiting() if running else {}
        connected = self._link.aggregators.connected if running else {}
        return FleetSnapshot(
            at=time.time(),
            running=running,
            participants=now,
            waiting=waiting,
            aggregators={name: each.devices for name, each in connected.items()},
        )

    def away(self) -> Iterator[tuple[str, float]]:
        """Devices that are away until they check in, and when that is, in Unix seconds."""
        now = time.time()
        gone = self._link.enrolments.revoked_names
        for name, seen in self._seen.items():
            if seen.checks_in_at > now and name not in self._link.peers and name not in gone:
                yield name, seen.checks_in_at

    def figures(self) -> FleetFigures:
        """How many devices there are, and where they are now."""
        online = [
            peer
            for peer in self._link.peers.values()
            if peer.role == link_pb2.CLIENT and peer.stream is not None
        ]
        aggregated = sum(peer.place is not None for peer in online)
        back = [at for _, at in self.away()]
        linked = self._link.aggregators.connected
        return FleetFigures(
            enrolled=self._link.enrolments.population(),
            direct=len(online) - aggregated,
            aggregated=aggregated,
            away=len(back),
            next_check_in=min(back, default=None),
            aggregators={name: each.devices for name, each in linked.items()},
        )

    async def _keep(self) -> None:
        written = None
        at = 0.0
        while True:
            found = self.snapshot()
            if not found.says_the_same(written) or time.monotonic() - at > _ALIVE_SECONDS:
                await self._write(found)
                written = found
                at = time.monotonic()
            await asyncio.sleep(_WRITE_SECONDS)

    async def _write(self, found: FleetSnapshot) -> None:
        try:
            await asyncio.to_thread(lambda: write_sealed_bytes(self._path, found.to_json()))
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be written: %s", self._path, error.strerror)
            self._failed = True


def read_snapshot(directory: Path) -> FleetSnapshot | None:
    """What the server of a state directory wrote last; None if it is lost or damaged."""
    with contextlib.suppress(OSError, DamagedError, ValueError, TypeError, KeyError):
        return FleetSnapshot.of_json(read_sealed_bytes(directory / FILE))
    return None
