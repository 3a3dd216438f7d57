"""The participants of a run: those that have opened it, and those that declined."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from isthmus.errors import ParticipantsMissing
from isthmus.job import Job, RegimeName
from isthmus.job.section import Hours
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_server.regimes.call import CallFailed, call
from isthmus_server.regimes.opening import (
    check_examples,
    group_of,
    hours_of,
    installed_package,
    opening_of_ranks,
)
from isthmus_server.regimes.reasons import group_reasons
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.cohort_wait import CohortWait
from isthmus_server.rounds.start_offer import StartOffer
from isthmus_server.storage.events import (
    CohortAwaited,
    Event,
    ParticipantDeclined,
    ParticipantJoined,
    ParticipantLate,
    ParticipantLeft,
    ParticipantProgress,
    ParticipantReady,
    RunServed,
    WaitingForParticipants,
)
from isthmus_server.strategy.gradients import REST
from isthmus_server.transport.check_ins import away_in_words
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import Fetched, ParticipantListener, Peer

log = logging.getLogger(__name__)

_FETCH_AGAIN_SECONDS = 600.0
"""Until a device that could not get the files of a start is asked again."""
_CHECK_INS_NAMED = 3
"""Next check-ins of devices that are away of which a wait tells the time."""
_REPEAT_SECONDS = 10.0
"""Interval in which it is published again that the run waits."""


@dataclasses.dataclass(frozen=True)
class ReadyParticipant:
    """A participant that has opened the run."""

    name: str
    instance: str
    examples: int
    """Size of its own training data."""
    hours: tuple[Hours, ...] = ()
    """When it accepts invitations; empty for always."""
    group: str = REST
    """The group that its owner has declared, if the job sums that by itself."""


class ParticipantRoster(ParticipantListener):
    """Opens the run on every participant that joins, and lists those that are ready.

    A participant that cannot take part (no data, another model, a task that raises) gives the
    reason, and is not asked again until it returns as a new process.
    """

    def __init__(
        self,
        link: Link,
        job: Job,
        run: link_pb2.OpenRun,
        availability: DeviceAvailability,
        publish: Callable[[Event], None],
        ranks_job: Job | None = None,
        *,
        start: StartOffer | None = None,
        now: Callable[[], float] = time.monotonic,
        earlier: Iterable[Event] = (),
    ) -> None:
        """Prepare; `start` begins to open the run.

        Args:
            link: the server's link.
            job: the job.
            run: what participants are asked to open; the task's package is added to it, so that
                devices can fetch it.
            availability: when each device may be invited.
            publish: receives an event for each participant that joins, leaves or declines.
            ranks_job: the job with the layout of the ranks, if that has changed in the run.
            start: files that devices need before the run can be opened on them.
            now: seconds of a clock that never jumps, for how late devices are.
            earlier: events of the run before it was stopped.
        """
        self.clients: dict[str, ReadyParticipant] = {}
        self.datacenters: dict[str, ReadyParticipant] = {}
        self._link = link
        self._job = job
        self._run = run
        self._availability = availability
        self._publish = publish
        self._start = start
        self._away: tuple[int, tuple[float, ...]] = (0, ())
        """See `away`."""
        self._away_until = -math.inf
        """Until when that is not looked up again, by the clock of `now`."""
        self._fetching: dict[str, Fetched] = {}
        """Devices that get the files which the model starts from, and what they say of it."""
        self._furthest: dict[str, int] = {}
        """The highest percentage that each of them has said, of all its processes."""
        self._has_moved = False
        """Whether one of them got further than ever since the last look."""
        self._declined: dict[str, tuple[link_pb2.Role, str]] = {}
        self._will_not_return: dict[str, tuple[link_pb2.Role, str]] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.started_clients = job.federated.clients
        """Devices that this machine starts."""
        self.waits_for_connected = False
        """Whether a round waits for all devices that are connected, not only for enough of them."""
        self.started_here: Mapping[str, link_pb2.Role] = {}
        """Names and roles of the participants that this machine starts, if they are known."""
        self._now = now
        self._waits = CohortWait(job.time, log.warning)
        self._waits.restore(earlier)
        self._awaited: dict[str, float] = {}
        """Devices that the present wait is for, and how many seconds of it each of them has."""
        self._has_less_time = False
        """Whether one of them has less time than when the wait for it began."""
        self._cohort_is_full = False
        """Whether as many devices were ready for the round as it invites."""
        self._package = installed_package(job, Path(run.base))
        if self._package is not None:
            package = self._package
            run.package.blob.CopyFrom(describe(package.data))
            run.package.digest = package.digest
            run.package.author = package.author
        self._run_of_ranks = run if ranks_job in (None, job) else opening_of_ranks(run, ranks_job)

    @property
    def declined(self) -> Mapping[str, tuple[link_pb2.Role, str]]:
        """Role and reason of each participant that cannot take part."""
        return self._declined

    def start(self) -> None:
        """Open the run on all participants, now and when they join."""
        self._publish(RunServed(deployment=self._link.enrolments.deployment))
        if self._package is not None:
            self._link.publish(self._run.package.blob, memoryview(self._package.data))
        if self._start is not None:
            self._start.publish(self._link)
        self._link.listeners.attach(self)
        for peer in list(self._link.peers.values()):
            if not peer.is_new and self._link.admits(
                peer.name
            ):  # a peer that is being welcomed now comes through `joined`
                self.joined(peer)

    async def stop(self, finished: bool) -> None:
        """Close the run at all participants.

        `finished`: the run will not be resumed, so datacenters may delete its checkpoints.
        """
        self._link.listeners.detach(self)
        self._publish_still_late()
        # First, so that none becomes ready after the list of those to close was made.
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        names = [*self.clients, *self.datacenters]
        # At once: one that does not answer takes a lease.
        closing = [
            asyncio.create_task(self._close(name, finished and name in self.datacenters))
            for name in names
        ]
        await asyncio.gather(*closing)
        self._link.retract(self._run.package.blob)
        if self._start is not None:
            self._start.retract(self._link)

    def decline(self, name: str, role: link_pb2.Role, reason: str) -> None:
        """Record why an expected participant will not take part.

        Of one that is still listed, because its lease has not ended yet, as soon as it has left.
        """
        if name in self.clients or name in self.datacenters:
            self._will_not_return[name] = (role, reason)
        else:
            self._declined[name] = (role, reason)
            self._awaited.pop(name, None)
            self._waits.declined(name)
            self._publish(ParticipantDeclined(participant=name, reason=reason))
            self._changed.set()

    def available(self, *, measured: bool = False) -> list[str]:
        """Ready devices that may be invited now, to train or to be `measured`."""
        unlimited = self._availability.is_unlimited  # this is asked for thousands of devices
        return [
            name
            for name, device in self.clients.items()
            if (unlimited and not device.hours)
            or self._availability.seconds_until(name, device.hours, measured=measured) <= 0
        ]

    def groups(self) -> dict[str, int]:
        """Ready devices that may be invited now, by group; empty for a job without groups."""
        if self._job.federated.groups is None:
            return {}
        return dict(sorted(Counter(self.clients[name].group for name in self.available()).items()))

    def seconds_until_available(self, name: str) -> float:
        """Seconds until a ready device may be invited: 0 now, infinity never."""
        return self._availability.seconds_until(name, self.clients[name].hours)

    def may_come(self, wanted: int) -> bool:
        """Whether so many devices are known and not ready, and may be invited once they are."""
        near = self._absent(set()) | self._fetching.keys()
        others = near | self.clients.keys() | self._declined.keys()
        # One by one, and no more than it takes: a million may have joined.
        joined = (
            name
            for name in self._link.enrolments.clients()
            if name not in others and self._link.admits(name)
        )
        usable = (
            name
            for name in itertools.chain(near, joined)
            if self._availability.seconds_until(name, ()) < math.inf
        )
        return sum(1 for _ in itertools.islice(usable, wanted)) == wanted

    # -- waiting -----------------------------------------------------------------------------------

    async def wait_for_embedded(self) -> None:
        """Wait until all participants that this machine starts are ready or have declined.

        Those that are not ready in time have declined: no round waits for them again.
        """
        clients = self.started_clients
        datacenters = int(self._job.datacenter.ranks > 0)
        if await self._wait_for(clients, datacenters, missing=self.started_here):
            return
        limit = f"{self._job.time.join_seconds:g} s (time.join_seconds)"
        for name, role in self.started_here.items():
            if name not in self._declined:
                self.decline(name, role, f"it was not ready within {limit}; it may still join")

    async def wait_for_datacenters(self) -> None:
        """Wait until the datacenters that are connected have opened the run or declined.

        A policy that decides before would plan without one that is about to be ready. A run that
        trains with devices alone does not wait.
        """
        if self._job.strategy.policy == "federated":
            return

        def opening() -> set[str]:
            peers = self._link.peers.values()
            names = {peer.name for peer in peers if peer.role == link_pb2.DATACENTER}
            names = {name for name in names if self._link.admits(name)}
            return names - self.datacenters.keys() - self._declined.keys()

        # Datacenters that connect meanwhile are welcome, and the run does not wait for them.
        expected = opening()
        await self.until(
            lambda: not opening() & expected,
            datacenters=len(expected),
            missing=expected,
            seconds=self._waits.longest,
            awaits_downloads=False,
        )

    async def require(self, regime: RegimeName) -> None:
        """Wait for the participants that a round of a regime needs at least.

        Raises:
            ParticipantsMissing: too few are ready in time.
        """
        clients = 0 if regime == "datacenter" else self._job.federated.needed
        datacenters = 0 if regime == "federated" else self._job.datacenter.needed
        in_time = await self._wait_for(clients, datacenters)
        missing: dict[link_pb2.Role, str] = {}
        # Counted after the wait, and not by its result: it also ends when no more can come.
        available = len(self.available())
        if available < clients:
            unavailable = len(self.clients) - available
            rest = f", while {unavailable} may not be invited now" if unavailable else ""
            if used_up := sum(map(math.isinf, map(self.seconds_until_available, self.clients))):
                rest += (
                    f" ({used_up} of them never again: their privacy budget or limit is used up)"
                )
            missing[link_pb2.CLIENT] = (
                f"a {regime} round needs {clients} devices (federated.quorum); "
                f"ready: {available}{rest}"
            )
        if len(self.datacenters) < datacenters:
            missing[link_pb2.DATACENTER] = (
                f"no datacenter is ready and a {regime} round needs one"
                if datacenters == 1
                else f"datacenter.compression needs {datacenters} datacenters (one alone sends "
                f"nothing to other participants); ready: {len(self.datacenters)}"
            )
        if missing:
            reasons = list(missing.values())
            count, times = self.away()
            if count and link_pb2.CLIENT in missing:
                reasons.append(away_in_words(count, times))
            if self._fetching and link_pb2.CLIENT in missing:
                reasons.append("; ".join(self._downloads()[:3]))
            if not in_time:
                waited = f"waited up to {self._job.time.join_seconds:g} s (time.join_seconds)"
                reasons.append(waited)
            reason = "; ".join([*reasons, *self._reasons_to_decline()[:3]])
            raise self.missing(reason, missing)

    def missing(self, reason: str, roles: Collection[link_pb2.Role]) -> ParticipantsMissing:
        """The error of a run that cannot continue without more participants of these roles."""
        ready = [*self.clients, *self.datacenters]
        return ParticipantsMissing(reason, roles=roles, ready=ready, declined=self._declined)

    def away(self) -> tuple[int, tuple[float, ...]]:
        """Devices that are away until they check in, and when the next of them do.

        It may be some seconds old: there may be thousands, and a wait asks for each that joins.
        """
        if self._now() < self._away_until:
            return self._away
        self._away_until = self._now() + _REPEAT_SECONDS
        times: list[float] = []
        if self._link.check_ins.schedule(self._link.enrolments.population()) is not None:
            times = [
                at
                for name, at in self._link.check_ins.away()
                if name not in self._declined and self._link.admits(name)
            ]
        self._away = len(times), tuple(heapq.nsmallest(_CHECK_INS_NAMED, times))
        return self._away

    def _downloads(self) -> list[str]:
        """What each device says that gets the files which the model starts from."""
        return [f"{name} is {each.sentence}" for name, each in sorted(self._fetching.items())]

    def _reasons_to_decline(self) -> list[str]:
        """Each reason once, with the names of some that gave it."""
        reasons = {name: reason for name, (_, reason) in self._declined.items()}
        return [f"{names} declined: {reason}" for names, reason in group_reasons(reasons)]

    async def _wait_for(
        self, clients: int, datacenters: int, missing: Collection[str] = ()
    ) -> bool:
        """Wait for that many, or until all that this machine starts are ready or have declined.

        Returns False if that took longer than `time.join_seconds`.
        """
        started_datacenters = int(self._job.datacenter.ranks > 0)
        if datacenters > 1:  # this machine starts one at most
            started_datacenters = 0

        def all_answered(role: link_pb2.Role, ready: int, started_here: int) -> bool:
            # Only of what this machine starts it is known how many there will be. On a server
            # others may still join, so that nothing follows from those that have declined.
            declined = sum(declined_role == role for declined_role, _ in self._declined.values())
            return started_here > 0 and ready + declined >= started_here

        def done() -> bool:
            return (
                len(self.available()) >= clients
                or all_answered(link_pb2.CLIENT, len(self.clients), self.started_clients)
            ) and (
                len(self.datacenters) >= datacenters
                or all_answered(link_pb2.DATACENTER, len(self.datacenters), started_datacenters)
            )

        return await self.until(done, clients=clients, datacenters=datacenters, missing=missing)

    async def gather_cohort(self, round_: int, wanted: int) -> None:
        """Wait for `wanted` devices while more are expected, for each as long as `CohortWait` says.

        Expected are the devices that are opening the run, those that have joined this server, and
        those that have taken part before; not one that did not come in time, until it returns. The
        devices that this machine starts are awaited at the start of the run.
        """
        if self.waits_for_connected:
            await self.until(
                lambda: not self._connected() - self.clients.keys(),
                clients=wanted,
                awaits_downloads=False,
            )
            return
        if self.started_clients:
            return
        started = self._now()
        is_full = len(self.available()) >= wanted
        # As of now: a device that connects meanwhile is welcome, and the round does not wait for
        # it. Without a wait it does not matter who has joined the server and never came, for which
        # its registry would be read in each round.
        expected = self._expected() if not is_full else self._absent(set())
        self._waits.quorum(expected, started)
        if not is_full:
            await self._await_devices(round_, wanted, expected, started)
        self._cohort_is_full = len(self.available()) >= wanted

    async def _await_devices(
        self, round_: int, wanted: int, expected: Collection[str], started: float
    ) -> None:
        """Wait for `wanted` devices, or until each of those expected is ready or has had its time.

        `started` is the time of the quorum.
        """
        connected = self._connected()
        limits = {
            name: self._waits.seconds(name, connected=name in connected)
            for name in expected
            if self._waits.is_awaited(name)
        }
        self._awaited = {name: seconds for name, seconds in limits.items() if seconds > 0}
        if not self._awaited:
            return
        began = started
        given_up: list[str] = []

        def done() -> bool:
            nonlocal began
            if self._link.waits_for:  # their rounds are not these devices' delay
                began = self._now()
                self._waits.postpone(self._awaited, began)
            return len(self.available()) >= wanted or not self._awaited

        def done_or_changed() -> bool:
            return done() or self._has_less_time

        while not done():
            self._has_less_time = False
            elapsed = self._now() - began
            over = [name for name, seconds in self._awaited.items() if seconds <= elapsed]
            for name in over:
                del self._awaited[name]
                self._waits.give_up(name)
            given_up += over
            if self._awaited:
                # One after the other, so that nobody has the time of another.
                left = min(self._awaited.values()) - elapsed
                missing = list(self._awaited)
                await self.until(
                    done_or_changed,
                    clients=wanted,
                    missing=missing,
                    seconds=left,
                    awaits_downloads=False,
                )
        self._awaited = {}
        seconds = self._now() - started
        self._publish(CohortAwaited(round=round_, seconds=seconds, given_up=sorted(given_up)))

    def begin(self, round_: int) -> None:
        """Note that a round with devices begins with those who are ready now."""
        self._waits.begin(round_, full=self._cohort_is_full)
        if not self._waits.has_absent:
            return
        for name in self._connected() - self.clients.keys():
            self._waits.warn_of_lasting(name, self._now())

    def _publish_still_late(self) -> None:
        """Tell of the devices that are connected and still open the run, as rounds have begun."""
        for name in sorted(self._connected() - self.clients.keys()):
            late = self._waits.absence(name, self._now())
            if late is not None and late.rounds_missed:
                self._publish(
                    ParticipantLate(participant=name, was_ready=False, **dataclasses.asdict(late))
                )

    def _expected(self) -> set[str]:
        """Devices that are not ready, and may be soon."""
        population = self._link.enrolments.population()
        if self._link.check_ins.schedule(population) is not None:
            return self._absent(set())  # the others come by schedule, and not for this round
        return self._absent(set(self._link.enrolments.clients()))

    def _absent(self, names: set[str]) -> set[str]:
        """Devices not ready, of these and of those that are connected or have taken part."""
        # A device that has taken part is expected again: it may only be restarting.
        names = names | self._availability.attendance.records.keys() | self._connected()
        names = names - self.clients.keys() - self._declined.keys() - self._fetching.keys()
        names -= self._link.enrolments.revoked_names  # it may have taken part, and never does again
        return {name for name in names if self._link.admits(name)}

    def _connected(self) -> set[str]:
        """Connected devices that have not declined, nor get files, which may take hours."""
        peers = self._link.peers.values()
        clients = [peer for peer in peers if peer.role == link_pb2.CLIENT]
        # Without those that have just come and are told to go: no round waits for them.
        names = {each.name for each in clients if not (each.is_new and each.checks_in_at)}
        return names - self._declined.keys() - self._fetching.keys()

    async def wait_for(
        self, *, devices: Collection[str] = (), datacenters: Collection[str] = ()
    ) -> bool:
        """Wait for particular participants, as after a restart; returns whether all are ready.

        A datacenter may hold the model, and devices may have unmasked a sum.
        """
        names = {*devices, *datacenters}

        def ready() -> set[str]:
            return {*self.clients, *self.datacenters}

        await self.until(
            lambda: names <= ready() | self._declined.keys(),
            clients=len(devices),
            datacenters=len(datacenters),
            missing=names,
        )
        return names <= ready()

    async def until(
        self,
        done: Callable[[], bool],
        *,
        clients: int = 0,
        datacenters: int = 0,
        missing: Collection[str] = (),
        reason: str = "",
        seconds: float | None = None,
        awaits_downloads: bool = True,
    ) -> bool:
        """Wait for a condition on the participants; what is missing is published meanwhile.

        Args:
            done: the condition.
            clients: how many devices it takes, for the event.
            datacenters: how many datacenters, likewise.
            missing: names of those that are needed.
            reason: why those that are ready are not enough.
            seconds: limit; None for `time.join_seconds`.
            awaits_downloads: the limit begins again when a device has got further with the files
                of a start than ever before, which is a hundred times for each at most. False for
                waits that are for other participants.

        Returns whether the condition is met.
        """
        if done():
            return True
        published = None
        self._has_moved = False
        limit = self._job.time.join_seconds if seconds is None else seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit) as waiting_until:
                while not done():
                    # Rounds of others are not this run's delay, nor is a download that gets on.
                    if self._link.waits_for or (awaits_downloads and self._has_moved):
                        self._has_moved = False
                        waiting_until.reschedule(asyncio.get_running_loop().time() + limit)
                    away, check_ins = self.away()
                    present = self.clients.keys() | self.datacenters.keys() | self._declined.keys()
                    waiting = WaitingForParticipants(
                        clients=clients,
                        datacenters=datacenters,
                        ready=len(self.available()),
                        missing=sorted(set(missing) - present),
                        reason=reason,
                        downloads=tuple(self._downloads()),
                        away=away,
                        check_ins=check_ins,
                    )
                    # Anything that changes wakes this loop, such as each of a thousand devices that
                    # join.
                    if waiting != published:
                        self._publish(waiting)
                        published = waiting
                    # After `done` and before the wait, with no await in between: no change is
                    # missed.
                    self._changed.clear()
                    try:
                        async with asyncio.timeout(_REPEAT_SECONDS):
                            await self._changed.wait()
                    except TimeoutError:
                        published = None
        return done()

    # -- joining and leaving -----------------------------------------------------------------------

    def joined(self, peer: Peer) -> None:
        """Open the run on a new participant."""
        self._declined.pop(peer.name, None)
        self._will_not_return.pop(peer.name, None)
        self._waits.joined(peer.name)
        if peer.name in self._awaited:
            self._awaited[peer.name] = self._waits.seconds(peer.name, connected=True)
        # A new process may have what the last one lacked, such as data or a task.
        self._publish(ParticipantJoined(participant=peer.name))
        task = asyncio.create_task(self._open(peer))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def left(self, peer: Peer, reason: str) -> None:
        """Remove a participant that was lost."""
        ready = self.clients.pop(peer.name, None) or self.datacenters.pop(peer.name, None)
        if ready is not None:
            self._publish(ParticipantLeft(participant=peer.name, reason=reason))
            self._changed.set()
        if gone := self._will_not_return.pop(peer.name, None):
            self.decline(peer.name, *gone)
        if peer.name in self._awaited:
            self._awaited[peer.name] = self._waits.seconds(peer.name, connected=False)
            self._has_less_time = True
            self._changed.set()

    def progressed(self, name: str, progress: link_pb2.Progress) -> None:
        """Publish the progress that a participant reports."""
        if progress.HasField("fetched"):
            if name in self._fetching:
                fetched = self._fetching[name] = Fetched.of(progress.fetched)
                # One that alternates between two would otherwise hold each wait open for ever.
                if fetched.percent > self._furthest.get(name, 0):
                    self._furthest[name] = fetched.percent
                    self._has_moved = True
            return
        self._publish(ParticipantProgress.from_message(name, progress))

    async def _open(self, peer: Peer) -> None:
        if not await self._prepared(peer):
            return
        if peer.role == link_pb2.CLIENT:
            await self._availability.account(peer.name)
        run = self._run_of_ranks if peer.role == link_pb2.DATACENTER else self._run
        request = link_pb2.Request(open=run)
        try:
            async with call(self._link, peer.name, request, "opened") as reply:
                check_examples(peer, reply.opened)
                hours = hours_of(reply.opened)
                group = group_of(reply.opened, self._job)
        except CallFailed as failed:
            if failed.status == "rejected":  # a participant that was lost is asked when it returns
                self.decline(peer.name, peer.role, failed.reason)
            return
        self._declined.pop(peer.name, None)  # it was late
        # Only now: rounds may ask whatever is listed as ready, so it must have opened the run.
        ready = ReadyParticipant(peer.name, peer.instance, reply.opened.examples, hours, group)
        side = self.clients if peer.role == link_pb2.CLIENT else self.datacenters
        side[peer.name] = ready
        self._publish(ParticipantReady(participant=peer.name, examples=ready.examples))
        self._awaited.pop(peer.name, None)
        if (late := self._waits.ready(peer.name, self._now())) is not None:
            self._publish(ParticipantLate(participant=peer.name, **dataclasses.asdict(late)))
        self._changed.set()

    async def _prepared(self, peer: Peer) -> bool:
        """Have a device get the files which the model starts from; False if it is lost.

        One that cannot is asked again after a while: its disk or a source may be mended meanwhile.
        """
        if self._start is None or peer.role != link_pb2.CLIENT:
            return True
        while self._link.peers.get(peer.name) is peer:
            self._fetching[peer.name] = Fetched(0)
            request = link_pb2.Request(prepare=self._start.request)
            try:
                async with call(self._link, peer.name, request, "prepared"):
                    return True
            except CallFailed as failed:
                if failed.status != "rejected":
                    return False
                why = failed.reason
            finally:
                self._fetching.pop(peer.name, None)
                self._changed.set()
            if self._declined.get(peer.name) != (peer.role, why):
                self.decline(peer.name, peer.role, why)
            await asyncio.sleep(_FETCH_AGAIN_SECONDS)
        return False

    async def _close(self, name: str, finished: bool) -> None:
        close = link_pb2.CloseRun(run_id=self._run.run_id, finished=finished)
        request = link_pb2.Request(close=close)
        seconds = self._link.lease_seconds
        try:
            async with call(self._link, name, request, "closed", seconds=seconds):
                pass
        except CallFailed as failed:
            log.debug("%s did not close the run: %s", name, failed.reason)
