"""Who is here and has opened the run: the participants a round can be planned with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from isthmus.errors import IsthmusError, JobError, ParticipantLost, UserError
from isthmus.job import Job, RegimeName
from isthmus.job.section import Hours
from isthmus.task import packages
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_server.storage.events import (
    Event,
    ParticipantDeclined,
    ParticipantJoined,
    ParticipantLeft,
    ParticipantReady,
    WaitingForParticipants,
)
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import ParticipantListener, Peer
from isthmus_server.transport.sanitize import reason_of

log = logging.getLogger(__name__)

MAX_HOURS = 32
"""Entries of one device's hours: they are walked before every round."""
LONGEST_HOURS = 64
"""Characters of one entry."""
MAX_EXAMPLES = 1 << 30
"""That a device may say it has: the bits of a sum are shared out by what its cohort says."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """One participant that has opened the run."""

    name: str
    instance: str
    examples: int
    """Size of its own training data."""
    hours: tuple[Hours, ...] = ()
    """In which it wants to be asked; none: always."""


class Roster(ParticipantListener):
    """Opens the run on everyone who joins, and keeps the list of those who could.

    A participant that cannot take part (no data, another model, a task that raises) says why, is
    noted, and is not asked again until it comes back as a new process.
    """

    def __init__(
        self,
        link: Link,
        job: Job,
        run: link_pb2.OpenRun,
        publish: Callable[[Event], None],
    ) -> None:
        """`publish` receives an event for everyone who joins, leaves or declines.

        The package that the task was installed from goes to the devices that want it.
        """
        self.link = link
        self.job = job
        self.run = run
        self.publish = publish
        self.clients: dict[str, Ready] = {}
        self.datacenters: dict[str, Ready] = {}
        self.declined: dict[str, tuple[link_pb2.Role, str]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self.rests: Callable[[str], bool] = lambda name: False
        """Whether a device that is here may not be asked now."""
        self._changed = asyncio.Event()
        self._package = _installed(job, Path(run.base))
        if self._package is not None:
            package = self._package
            run.package.blob.CopyFrom(describe(package.data))
            run.package.digest, run.package.author = package.digest, package.author

    def start(self) -> None:
        """From now on the run is opened on everyone."""
        if self._package is not None:
            self.link.publish(self.run.package.blob, memoryview(self._package.data))
        self.link.listeners.attach(self)
        for peer in list(self.link.peers.values()):
            if not peer.is_new:  # a peer that is being welcomed now comes through `joined`
                self.joined(peer)

    async def stop(self, finished: bool) -> None:
        """Close the run at every participant; `finished` lets datacenters delete its checkpoints.

        They keep checkpoints of it until then; a device keeps nothing that it could let go of.
        """
        self.link.listeners.detach(self)
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        names = [*self.clients, *self.datacenters]
        closing = [
            asyncio.create_task(self._close(name, finished and name in self.datacenters))
            for name in names
        ]
        await asyncio.gather(*closing)
        self.link.retract(self.run.package.blob)

    def decline(self, name: str, role: link_pb2.Role, reason: str) -> None:
        """Somebody who was expected will not come."""
        if name not in self.clients and name not in self.datacenters:
            self.declined[name] = (role, reason)
            self.publish(ParticipantDeclined(participant=name, reason=reason))
            self._changed.set()

    def able(self) -> list[str]:
        """Devices that may be asked now."""
        return [name for name in self.clients if not self.rests(name)]

    # -- waiting -----------------------------------------------------------------------------------

    async def wait_for_embedded(self) -> None:
        """At the start, wait for everyone this machine starts; who does not come says why later."""
        await self._wait_for(self.job.federated.clients, int(self.job.datacenter.ranks > 0))

    async def require(self, regime: RegimeName) -> None:
        """Wait for those without whom a round in a regime cannot be committed.

        Raises:
            UserError: too few are ready in time.
        """
        clients = 0 if regime == "datacenter" else self.job.federated.needed
        datacenters = 0 if regime == "federated" else 1
        in_time = await self._wait_for(clients, datacenters)
        missing = []
        able = len(self.able())
        if able < clients:
            resting = len(self.clients) - able
            missing.append(
                f"{able} edge clients are ready and a {regime} round needs {clients} "
                "(federated.quorum)" + (f", while {resting} rest" if resting else "")
            )
        if len(self.datacenters) < datacenters:
            missing.append(f"no datacenter is ready and a {regime} round needs one")
        if missing:
            if not in_time:
                waited = f"waited up to {self.job.time.join_seconds:g} s (time.join_seconds)"
                missing.append(waited)
            raise UserError("; ".join([*missing, *self._why_declined()[:3]]))

    def _why_declined(self) -> list[str]:
        """Each reason once, with those who gave it."""
        names: dict[str, list[str]] = {}
        for name, (_, why) in sorted(self.declined.items()):
            names.setdefault(why, []).append(name)
        return [
            ", ".join(who[:3])
            + (f" and {len(who) - 3} more" if len(who) > 3 else "")
            + f" declined: {why}"
            for why, who in names.items()
        ]

    async def _wait_for(self, clients: int, datacenters: int) -> bool:
        """Wait until so many are ready, or all that this machine starts are ready or declined.

        Returns False if that took too long.
        """
        embedded = self.job.federated.clients, int(self.job.datacenter.ranks > 0)

        def done() -> bool:
            return all(
                able >= wanted
                or (started_here and len(ready) + self._have_declined(role) >= started_here)
                for role, ready, able, wanted, started_here in (
                    (link_pb2.CLIENT, self.clients, len(self.able()), clients, embedded[0]),
                    (
                        link_pb2.DATACENTER,
                        self.datacenters,
                        len(self.datacenters),
                        datacenters,
                        embedded[1],
                    ),
                )
            )

        return await self._until(done, clients, datacenters)

    async def wait_for(
        self, *, devices: Collection[str] = (), datacenters: Collection[str] = ()
    ) -> bool:
        """Wait for these very ones, as after a restart; returns whether all are ready.

        A datacenter may have the model, and devices may have opened a sum.
        """
        names = {*devices, *datacenters}

        def ready() -> set[str]:
            return {*self.clients, *self.datacenters}

        await self._until(
            lambda: names <= ready() | self.declined.keys(), len(devices), len(datacenters)
        )
        return names <= ready()

    async def _until(self, done: Callable[[], bool], clients: int, datacenters: int) -> bool:
        if done():
            return True
        self.publish(WaitingForParticipants(clients=clients, datacenters=datacenters))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.job.time.join_seconds):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
        return done()

    def _have_declined(self, role: link_pb2.Role) -> int:
        return sum(one == role for one, _ in self.declined.values())

    # -- coming and going --------------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        """Open the run on a new participant."""
        self.declined.pop(peer.name, None)
        self.publish(ParticipantJoined(participant=peer.name))
        task = asyncio.create_task(self._open(peer))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def left(self, peer: Peer, reason: str) -> None:
        """Remove a participant that was lost."""
        ready = self.clients.pop(peer.name, None) or self.datacenters.pop(peer.name, None)
        if ready is not None:
            self.publish(ParticipantLeft(participant=peer.name, reason=reason))
            self._changed.set()

    async def _open(self, peer: Peer) -> None:
        request = link_pb2.Request(id=self.link.new_id(), open=self.run)
        try:
            reply = await self.link.ask(peer.name, request)
        except ParticipantLost:
            return  # `left` has noted it, or it never was ready
        self.link.acknowledge(peer.name, request.id, True)
        if reply.WhichOneof("outcome") != "opened":
            reason = reason_of(reply)
            self.decline(peer.name, peer.role, reason)
            return
        try:
            _check_examples(peer, reply.opened)
            hours = _hours(reply.opened)
        except JobError as error:
            self.decline(peer.name, peer.role, str(error))
            return
        ready = Ready(peer.name, peer.instance, reply.opened.examples, hours)
        group = self.clients if peer.role == link_pb2.CLIENT else self.datacenters
        group[peer.name] = ready
        self.publish(ParticipantReady(participant=peer.name, examples=ready.examples))
        self._changed.set()

    async def _close(self, name: str, finished: bool) -> None:
        request = link_pb2.Request(
            id=self.link.new_id(),
            close=link_pb2.CloseRun(run_id=self.run.run_id, finished=finished),
        )
        try:
            async with asyncio.timeout(self.link.lease_seconds):
                await self.link.ask(name, request)
        except (ParticipantLost, TimeoutError) as error:
            log.debug("%s did not close the run: %s", name, error)
        else:
            self.link.acknowledge(name, request.id, True)


def _installed(job: Job, base: Path) -> packages.Package | None:
    """The package that a job's task was installed from, to be handed on."""
    try:
        return packages.installed(base, packages.name_of(job))
    except IsthmusError as error:
        log.warning("devices are not offered the task: %s", error)
        return None


def _check_examples(peer: Peer, opened: link_pb2.Opened) -> None:
    """Refuse so many examples that nothing of the others' updates would be left beside them.

    Raises:
        JobError: a device has more.
    """
    if peer.role == link_pb2.CLIENT and opened.examples > MAX_EXAMPLES:
        raise JobError(f"it has {opened.examples} examples, and {MAX_EXAMPLES} are the most")


def _hours(opened: link_pb2.Opened) -> tuple[Hours, ...]:
    """In which a device wants to be asked.

    Raises:
        JobError: so much text is no device's hours, or it is not of their form.
    """
    if len(opened.hours) > MAX_HOURS or any(len(one) > LONGEST_HOURS for one in opened.hours):
        raise JobError(
            f"its hours have more than {MAX_HOURS} entries, or one of more than {LONGEST_HOURS} "
            "characters; give fewer"
        )
    return tuple(Hours.parse(one) for one in opened.hours)
