"""A participant's end of the link: connects, executes requests, returns results, reconnects.

The participant opens one stream and keeps it open. When the stream breaks, it is opened again with
exponential backoff, and work continues: a request keeps its id, so that a running one is not
started twice and a finished one is answered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from isthmus import __version__
from isthmus.errors import AdmissionRefused, IsthmusError, UpdateError
from isthmus.grpc_errors import LOGIN_REFUSED, NOT_LINKED, details_of, short_message
from isthmus.identity.approach import Approach, approach_to
from isthmus.identity.membership import Membership, check_dialling
from isthmus.identity.obstacles import is_clear, obstacle, with_remedy
from isthmus.identity.proxies import LoginRefused, ProxyChoice, Road, RoadBlocked
from isthmus.identity.tls import is_socket
from isthmus.printable import in_a_line
from isthmus.system.clocks import CLOCK_METADATA
from isthmus.system.listeners import other_users_at
from isthmus.transport.backoff import Backoff
from isthmus.transport.blob_sources import Filling, NamedSource, RestingSource
from isthmus.transport.blobs import (
    MAX_MESSAGE_BYTES,
    Assembly,
    Buffer,
    InFile,
    Piece,
    WantedPiece,
    describe,
    into,
)
from isthmus.transport.dial_order import UNLINKED_SECONDS, DialOrder
from isthmus.transport.heartbeats import Heartbeats
from isthmus.transport.mirrors import MirrorSources
from isthmus.transport.own_places import OwnPlaces
from isthmus.transport.refused_logins import RefusedLogin
from isthmus.transport.renewal import CertificateRenewal
from isthmus.transport.requests import (
    OpenRequest,
    RequestLimits,
    blob_of,
    ends_at_once,
    failure,
    is_plain_update,
    model_of,
    send_result,
)
from isthmus.transport.shared_memory import machine, named, offered
from isthmus.transport.stream import GONE, Stream, to_the_end
from isthmus.transport.transfer_time import TransferTime
from isthmus.transport.uploads import Upload, UploadAddresses
from isthmus.transport.worker import Worker
from isthmus.wire import link_pb2

VERSION = 2
"""Newest version of the link protocol that this release supports."""
OLDEST_VERSION = 2
"""Oldest supported version: the one before `VERSION`, if an earlier release used it."""

METHOD = "/isthmus.link.v1.Link/Connect"
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # `isthmus.identity.proxies` reads the variables, and adds what a channel needs.
    ("grpc.enable_http_proxy", 0),
    # Several participants in one process have a connection each, as they would elsewhere.
    ("grpc.use_local_subchannel_pool", 1),
    # Windows that grow with what arrives would add up to a model for each of many participants.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 512 << 10),
)
_ONE_TRY = (
    # Each attempt has a channel of its own. One that failed lives on until it is collected, and
    # would try the login of a proxy again.
    ("grpc.initial_reconnect_backoff_ms", 3_600_000),
    ("grpc.max_reconnect_backoff_ms", 3_600_000),
)
"""Options for channels at a proxy that asks for a login."""
_FINAL = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
}
"""The server refused the request itself; a retry would not help."""

_WELCOME_SECONDS = 30.0
"""Time limit of the server's first message."""

_ASKED_SECONDS = 10.0
"""Time for an earlier address to answer whether it takes this participant."""

_IDLE_SECONDS = 1.0
"""Time without a request, and without a message of the server, after which a device may change its
address: between the steps of a secure sum it has none either."""

_LEAVE_SECONDS = 5.0
"""Time for the server to end the stream of a participant that leaves, or that goes back to an
earlier address."""

_LONGEST_AWAY = 36 * 3600.0
"""A server can keep a participant away for no longer, so that it renews its certificate."""

_AWAKE_SECONDS = 60.0
"""Longest sleep of a participant that is away, after which it looks at the time again."""

_LONGEST_SPREAD = _LONGEST_AWAY / 2
"""A server can have no return after a break be spread over longer: later attempts take twice as
long."""

_WARNED_TRIES = 4
"""From this attempt on a failure is a warning: shorter interruptions are usual."""

_TIMES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
"""What differs between two failures of one reason."""

_PROGRESS_SECONDS = 0.5
"""Shortest time between two progress messages of a request."""

log = logging.getLogger(__name__)


def _seconds_since_boot() -> float:
    """A clock that nobody sets; it goes on while the machine is suspended, where there is such."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclasses.dataclass(frozen=True)
class _Ended:
    """How a stream has ended, or why none was opened."""

    why: str
    refused: AdmissionRefused | None = None
    """The refusal, if the server or what is in front of it refuses this participant."""
    is_full: bool = False
    """Whether the server has no room for one more."""
    is_unlinked: bool = False
    """Whether an aggregator without a link to its server has ended it."""


class Uplink:
    """One participant's connection to the server.

    Guarantees:
      * each request is executed once, across any number of reconnections;
      * a result is kept until the server acknowledges it;
      * a stream on which the server sends nothing for a lease is closed and opened again;
      * with a membership, both ends authenticate with certificates, and the participant's is
        renewed before it expires; without one, only a server on this machine is accepted, of this
        user or root where the system says whose it is (Linux);
      * an expired certificate or a wrong clock never ends `run`;
      * what is taken from a source is verified, and what no source has is pulled on the link;
      * of results only plain updates are put into a store, and only where the owner allows it.
    """

    def __init__(
        self,
        address: str,
        name: str,
        role: link_pb2.Role,
        worker: Worker,
        *,
        identity: bytes = b"",
        on_welcome: Callable[[link_pb2.Welcome], None] = lambda welcome: None,
        longest_pause: float = 60.0,
        membership: Membership | None = None,
        now: Callable[[], float] = time.time,
        shares: bool = False,
        wanted: Callable[[link_pb2.Request], link_pb2.Blob | None] = model_of,
        held: Callable[[link_pb2.Request], Buffer | None] = lambda request: None,
        sources: Sequence[NamedSource] = (),
        mirrors: MirrorSources | None = None,
        uploads: UploadAddresses | None = None,
        proxy: ProxyChoice | None = None,
        stays: bool = False,
        others: Sequence[str] = (),
        places: Mapping[str, Path | None] | None = None,
        on_link: Callable[[str, str], None] = lambda address, why: None,
    ) -> None:
        """Set up the connection; `run` opens it.

        Args:
            address: host:port of the server.
            name: this participant's name.
            role: the participant's role.
            worker: executes the requests.
            identity: Ed25519 public key that the server enrols; empty for none, or for that of the
                membership.
            on_welcome: called with every welcome message, which contains the enrolment.
            longest_pause: most seconds between two connection attempts.
            membership: the participant's certificate and keys, for a server that requires them.
            now: returns the time in Unix seconds.
            shares: blobs may pass as open files, with a server that started this process.
            wanted: returns the blob that the worker needs for a request.
            held: returns the beginning of that blob, as far as the worker has it already.
            sources: where a blob may be, in the order in which they are asked before the link.
            mirrors: where the server may have blobs fetched, after the sources; None for nowhere.
            uploads: where the server may have plain updates put; None for nowhere.
            proxy: what the owner says about proxies; by default what was said with the join, and
                else the variables decide. Without a membership there is none.
            stays: does not hang up when the server does not need it.
            others: further addresses of the server and of its aggregators, which are tried in turn
                when one does not answer.
            places: directories of this machine, by the options that name them. A server on another
                machine reads the options in place of these paths, and of that of the membership.
            on_link: called with the address of each new link, and with an empty one and why when
                there is none.

        Raises:
            UserError: the server is on another machine and there is no membership, the membership
                belongs to another participant, or a proxy cannot be used.
        """
        for each in (address, *others):
            check_dialling(each, link_pb2.Role.Name(role).lower(), name, membership)
        self._roads = [
            Road(each) if membership is None else membership.road(proxy, each)
            for each in (address, *others)
        ]
        self._addresses = (address, *others)
        self._order = DialOrder(len(self._addresses))
        """Which of the addresses is dialled."""
        self._returns_to: int | None = None
        """The earlier address for which the stream is ended."""
        self._heard_at = -math.inf
        """Monotonic time of the server's last message, pings excepted."""
        self._refused_at: set[int] = set()
        """Addresses that have refused this participant since a stream ended otherwise."""
        self.membership = membership
        self._renewal = None if membership is None else CertificateRenewal(membership, now)
        self.name = name
        self.role = role
        self.worker = worker
        self.identity = identity if membership is None else membership.identity_public
        self.on_welcome = on_welcome
        self._on_link = on_link
        self.longest_pause = longest_pause
        self._places = (
            None
            if membership is None
            else OwnPlaces({"--state": membership.directory, **(places or {})})
        )
        self._wanted = wanted
        self._held = held
        self._sources = sources
        self._mirrors = mirrors
        self._uploads = uploads
        self.received = TransferTime()
        """What the server has sent of blobs."""
        self.sent = TransferTime()
        """What this participant has sent of its results."""
        self._instance = uuid.uuid4().hex
        self._machine = machine() if shares else ""
        self._jobs: dict[str, OpenRequest] = {}
        self._limits = RequestLimits()
        self._stream: Stream | None = None
        self._linked_at = math.inf
        """Monotonic time of the welcome; infinity without a connection."""
        self._welcome: link_pb2.Welcome | None = None
        self._approaches: list[Approach] = []
        """Where the channels of `run` dial, for each address."""
        self._refused_login = RefusedLogin()
        self._reasons: dict[int, str] = {}
        """Why the last attempt has failed, at each of the addresses."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[object] | None = None
        self._filling: set[asyncio.Task[None]] = set()
        self._pieces: dict[bytes, WantedPiece] = {}
        """Pieces of blobs that are asked for besides requests, by SHA-256."""
        self._leaving = False
        self._stays = stays
        self._away = 0.0
        """Seconds until the server wants it back; 0 if it is not asked to hang up."""
        self._spread = 0.0
        """What the server has said of a return after a break, see `Backoff`."""
        self._ended = asyncio.Event()
        """Set when a request may have ended."""

    async def run(self) -> None:
        """Serve until cancelled, or until `leave` has ended it.

        Raises:
            AdmissionRefused: the server refused this participant, with the reason; of several
                addresses each did.
        """
        with contextlib.ExitStack() as stack:
            self._approaches = [stack.enter_context(approach_to(road)) for road in self._roads]
            await self._run()

    @property
    def _way(self) -> int:
        """The number of the address that is dialled."""
        return self._order.now

    @property
    def address(self) -> str:
        """The address that is dialled."""
        return self._addresses[self._way]

    @property
    def _road(self) -> Road:
        return self._roads[self._way]

    @property
    def _approach(self) -> Approach | None:
        return self._approaches[self._way] if self._approaches else None

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = asyncio.current_task()
        backoff = Backoff(self.longest_pause)
        if self._road.announcement:
            log.info("%s", self._road.announcement)
        self._on_link("", "it has just been started")
        try:
            while True:
                self._linked_at = math.inf
                login = self._login()
                ended = await self._attempt()
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise asyncio.CancelledError  # gRPC replaced it by an error
                if self._leaving and not self._jobs:
                    return
                if ended.refused is not None:
                    self._refuse_if_all_do(ended.refused)
                elif self._linked_at < math.inf:
                    self._refused_at.clear()
                if self._linked_at < math.inf:
                    self._on_link("", ended.why)
                # One that works is one of few, and its round waits for it.
                backoff.spread = 0.0 if self._jobs else self._spread
                if self._linked_at < math.inf:
                    backoff.away = 0.0
                if self._away:
                    backoff.away = self._away
                    self._order.now = 0
                    self._returns_to = None
                    await self._go_away()
                    continue
                if self._returns_to is not None:
                    backoff.broke(open_seconds=time.monotonic() - self._linked_at)
                    self._order.now = self._returns_to
                    self._returns_to = None
                    continue
                await self._await_next(ended, login, backoff)
        finally:
            for job in self._jobs.values():
                job.abandon()
                if job.task is not None:
                    job.task.cancel()
            for filling in self._filling:
                filling.cancel()

    async def _attempt(self) -> _Ended:
        """Open a stream, and serve it until it ends."""
        try:
            await self._serve_one_stream()
        except AdmissionRefused as error:
            return _Ended(str(error), refused=error)
        except grpc.aio.AioRpcError as error:
            return self._ended_by(error)
        except (TimeoutError, UpdateError, RoadBlocked, *GONE) as error:
            return _Ended(str(error) or "silence")
        return _Ended("the server ended the stream")

    def _ended_by(self, error: grpc.aio.AioRpcError) -> _Ended:
        code = error.code()
        if code in _FINAL:
            refused = AdmissionRefused(f"the server refused {self.name!r}: {details_of(error)}")
            return _Ended(str(refused), refused=refused)
        why = details_of(error) or code.name
        if code is grpc.StatusCode.UNAVAILABLE:
            why = short_message(why)
        is_full = code is grpc.StatusCode.RESOURCE_EXHAUSTED
        return _Ended(why, is_full=is_full, is_unlinked=why == NOT_LINKED)

    async def _await_next(self, ended: _Ended, login: str, backoff: Backoff) -> None:
        """Say why there is no link, choose where to dial next, and wait until then.

        Args:
            ended: how the last stream has ended.
            login: what the proxy on its road was given; empty for nothing.
            backoff: the pauses.
        """
        why = ended.why
        is_login_refused = self._is_login_refused(why, login)
        is_new = is_login_refused and not self._refused_login.is_same(login)
        is_told = backoff.broke(open_seconds=time.monotonic() - self._linked_at)
        if self._is_another(why) or is_told or is_new:
            why = await self._explained(why, login if is_login_refused else "")
            self._complain(why, backoff.tries)
            self._on_link("", why)
        self._order.choose(
            tries=backoff.tries,
            was_open=self._linked_at < math.inf,
            goes_on=ended.is_full or ended.refused is not None,
            is_unlinked=ended.is_unlinked,
            works=bool(self._jobs),
            # Pauses of a check-in without a server are long: one of them is enough.
            patience=0.0 if backoff.away else self._patience(),
        )
        if is_login_refused:
            self._refused_login.note(login, why if is_new else self._refused_login.sentence)
            await self._refused_login.pause(self._login)
        else:
            await asyncio.sleep(backoff.pause())

    def _refuse_if_all_do(self, refused: AdmissionRefused) -> None:
        """Note that the present address refuses this participant, and end if each one has.

        An aggregator may say anything, and is not to cut a device off from the server.

        Raises:
            AdmissionRefused: no other address is left.
        """
        self._refused_at.add(self._way)
        if len(self._refused_at) == len(self._addresses):
            raise refused

    def _patience(self) -> float:
        """Seconds for which it tries aggregators without a link before the last address.

        With a request it has to be back within its lease, if only the aggregator lost its link.
        """
        if not self._jobs or self._welcome is None:
            return UNLINKED_SECONDS
        return min(UNLINKED_SECONDS, self._welcome.lease_seconds / 2)

    async def _return(
        self, call: grpc.aio.StreamStreamCall[Any, Any], limit: asyncio.Timeout
    ) -> None:
        """End the stream at a later address when an earlier one takes this device again.

        The server keeps the device's place for a lease, and repeats on the next stream what it
        asks meanwhile.

        Args:
            call: the stream.
            limit: of the time for which it is served.
        """
        while True:
            await asyncio.sleep(self._order.pause(self._spread))
            way = await self._better_way()
            if way is None:
                continue
            log.info("goes back from %s to %s", self.address, self._addresses[way])
            self._returns_to = way
            await call.done_writing()
            # Nothing can be answered any more, and the other end may not notice.
            limit.reschedule(asyncio.get_running_loop().time() + _LEAVE_SECONDS)
            return

    async def _better_way(self) -> int | None:
        """The first earlier address that takes this device now, if it does nothing meanwhile."""
        while True:
            while not self._is_idle():  # noqa: ASYNC110 - no event says that nothing was sent
                await asyncio.sleep(_IDLE_SECONDS)
            for way in self._order.earlier():
                if await self._is_open(way):
                    break
            else:
                return None
            if self._is_idle():
                return way

    def _is_idle(self) -> bool:
        if self._jobs or self._leaving or self._away:
            return False
        return time.monotonic() - self._heard_at > _IDLE_SECONDS

    async def _is_open(self, way: int) -> bool:
        """Whether an address accepts a stream; an aggregator without a link, or full, does not."""
        login = self._login(way)
        if login and (login != self._login(self._way) or self._refused_login.is_resting(login)):
            return False  # each try with one that is not accepted could lock its account
        why = ""
        self._approaches[way].blocked = None  # by an earlier attempt
        async with self._channel(way) as channel:
            call = channel.stream_stream(METHOD)()
            try:
                async with asyncio.timeout(_ASKED_SECONDS):
                    told = await call.initial_metadata()
                    if any(key == CLOCK_METADATA for key, _ in told or ()):
                        return True
                    why = short_message(await call.details() or "")
            except (TimeoutError, RoadBlocked, *GONE):
                pass
            finally:
                call.cancel()
        if login:
            await self._note_refused_login(way, login, why)
        return False

    async def _note_refused_login(self, way: int, login: str, why: str) -> None:
        """Take note of it if an earlier address was not reached because of a login.

        The stream here may be older than the change of a password.

        Args:
            way: the number of the address.
            login: what the proxy was given.
            why: why no stream was opened, as far as gRPC says it.
        """
        blocked = self._approaches[way].blocked
        if not isinstance(blocked, LoginRefused) and why != LOGIN_REFUSED:
            return
        if self._refused_login.is_same(login):
            self._refused_login.note(login, self._refused_login.sentence)
            return
        if not isinstance(blocked, LoginRefused):
            assert self.membership is not None
            blocked = await obstacle(self._roads[way], self.membership.authority)
        sentence = str(blocked or why)
        self._refused_login.note(login, sentence)
        log.warning("cannot ask %s: %s", self._addresses[way], sentence)

    async def leave(self, grace_seconds: float) -> None:
        """Begin no more requests, give the running ones that long to end, then end `run`.

        A request that has not ended by then is given up, and at once one whose result is for a sum
        that needs this participant afterwards: the others would wait for it, and then lose their
        sum. The server is told, so that it does not wait for the lease.
        """
        self._leaving = True
        log.info("%s leaves as soon as its requests have ended", self.name)
        for job in [job for job in self._jobs.values() if ends_at_once(job.request)]:
            del self._jobs[job.id]
            self._drop(job, False, f"{self.name} leaves, and is not in the sum")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while any(job.task is not None for job in self._jobs.values()):
                    self._ended.clear()
                    await self._ended.wait()
        self._forget(f"not done within {grace_seconds:g} s, and {self.name} leaves")
        assert self._running is not None
        if self._stream is not None:
            self._stream.spawn(self._stream.send(link_pb2.Envelope(leave=link_pb2.Leave())))
            await asyncio.wait((self._running,), timeout=_LEAVE_SECONDS)
        self._running.cancel()

    async def piece(self, sha256: bytes, offset: int, length: int) -> bytearray:
        """A piece of a blob that the server offers, which is not verified by itself.

        Args:
            sha256: of the whole blob.
            offset: of the first byte.
            length: in bytes; the memory that a server can have this participant use.

        Raises:
            ConnectionError: there is no stream, or it breaks before the piece is here.
            UpdateError: the server does not have the blob, or sends something else.
        """
        stream = self._stream
        if stream is None:
            raise ConnectionError(f"there is no link to {self.address}")
        wanted = WantedPiece(offset, length, asyncio.get_running_loop().create_future())
        self._pieces[sha256] = wanted
        try:
            pull = link_pb2.Pull(sha256=sha256, offset=offset, length=length)
            self.received.begin(time.monotonic())
            await stream.send(link_pb2.Envelope(pull=pull))
            return await wanted.done
        except GONE as error:
            raise ConnectionError(f"the link to {self.address} broke") from error
        finally:
            if self._pieces.get(sha256) is wanted:
                del self._pieces[sha256]

    async def _go_away(self) -> None:
        """Wait until the server wants this participant back."""
        seconds = self._away
        self._away = 0.0
        at = time.strftime("%H:%M", time.localtime(time.time() + seconds))
        log.info("%s is not needed now, and checks in again at %s", self.name, at)
        self._on_link("", f"it is not needed now, and checks in again at {at}")
        # Also the time in which the machine is suspended, which an event loop does not count: a
        # laptop that wakes up for an hour a day would stay away for weeks.
        end = _seconds_since_boot() + seconds
        while (left := end - _seconds_since_boot()) > 0:  # noqa: ASYNC110 - no event says this
            await asyncio.sleep(min(left, _AWAKE_SECONDS))

    async def _hang_up(self, stream: Stream, seconds: float) -> None:
        """End the stream because the server does not need this participant for a while."""
        if self._renewal is not None:
            await self._renewal.settled(_LEAVE_SECONDS)
        if self._stays or self._leaving or self._jobs or self._stream is not stream:
            return
        self._away = seconds
        await stream.send_quietly(link_pb2.Envelope(leave=link_pb2.Leave()))

    def _channel(self, way: int) -> grpc.aio.Channel:
        if self.membership is None:
            return grpc.aio.insecure_channel(self._addresses[way], CHANNEL_OPTIONS)
        credentials = self.membership.channel_credentials()
        approach = self._approaches[way]
        once = _ONE_TRY if self._login(way) else ()
        options = (*CHANNEL_OPTIONS, *approach.options(), *once)
        return grpc.aio.secure_channel(approach.target, credentials, options)

    def _is_another(self, why: str) -> bool:
        """Whether a reason is another one than that of the last failure at this address."""
        if self._approach is not None and self._approach.blocked is not None:
            why = str(self._approach.blocked)
        why = _TIMES.sub("", why)
        before = self._reasons.get(self._way)
        self._reasons[self._way] = why
        return why != before

    def _complain(self, why: str, tries: int) -> None:
        """Say in the log why there is no link."""
        level = logging.INFO if tries < _WARNED_TRIES else logging.WARNING
        more = f" ({tries} tries so far)" if tries > 1 else ""
        log.log(level, "no link to %s%s: %s%s", self.address, self._road.detour, why, more)

    def _login(self, way: int | None = None) -> str:
        """What the proxy on the road is given; empty if there is none, or it cannot be read.

        Args:
            way: the number of the address; None for the one that is dialled.
        """
        proxy = self._roads[self._way if way is None else way].proxy
        if proxy is None:
            return ""
        try:
            return proxy.authorization()
        except RoadBlocked:
            return ""  # the next attempt says so

    def _is_login_refused(self, why: str, login: str) -> bool:
        """Whether a login is why no stream was opened."""
        if not login or self._linked_at < math.inf:
            return False
        blocked = None if self._approach is None else self._approach.blocked
        return isinstance(blocked, LoginRefused) or why == LOGIN_REFUSED

    async def _explained(self, why: str, refused_login: str) -> str:
        """The reason why no stream was opened, by what is in the way if that is found.

        Args:
            why: what is known of it.
            refused_login: what the proxy does not accept; empty if that is not the reason.
        """
        if self._renewal is not None and self._linked_at == math.inf:
            why += self._renewal.doubt(why)
        if refused_login and self._refused_login.is_same(refused_login):
            return self._refused_login.sentence  # asking the proxy is one more try
        if self._approach is not None and self._approach.blocked is not None:
            return str(self._approach.blocked)
        if self.membership is None or self._linked_at < math.inf:
            return why
        if is_clear(self._road, why):
            return with_remedy(self._road, why)
        blocked = await obstacle(self._road, self.membership.authority)
        if blocked is None:
            return why
        self._found(blocked)
        return str(blocked)

    def _found(self, blocked: RoadBlocked) -> None:
        """Take what is in the way to the server; `run` ends with what this raises.

        A participant goes on: laptops are in other networks at times, and come back.
        """

    def _check_listener(self) -> None:
        """Refuse a port of this machine that another user has: without certificates none is safe.

        Who listens there says which code this process runs.

        Raises:
            AdmissionRefused: it is another user's.
        """
        if self.membership is not None or is_socket(self.address):
            return
        port = int(self.address.rpartition(":")[2])
        if others := other_users_at(port):
            users = ", ".join(map(str, others))
            raise AdmissionRefused(
                f"a process of another user of this machine (uid {users}) listens at "
                f"{self.address}, and would say which code {self.name!r} runs; choose another "
                "port for `isthmus run --address`, or join a server"
            )

    async def _serve_one_stream(self) -> None:
        self._check_listener()
        async with self._channel(self._way) as channel:
            call = channel.stream_stream(METHOD)()
            stream = Stream(call, answers=True)
            try:
                # Not awaited: if the server reads nothing, the missing welcome ends the stream.
                stream.spawn(stream.send(self._hello()))
                first = await stream.receive(timeout=_WELCOME_SECONDS)
                if not isinstance(first, link_pb2.Envelope) or not first.HasField("welcome"):
                    raise UpdateError("the server's first message was not a welcome")
                lease = first.welcome.lease_seconds
                self._welcomed(first.welcome)
                log.info("linked to %s as %s", self.address, self.name)
                self._refused_login.forget()
                self._stream = stream
                self._linked_at = time.monotonic()
                self._on_link(self.address, "")
                if self._renewal is not None:
                    stream.spawn(self._renewal.run(stream))
                async with Heartbeats(lease).of(stream), asyncio.timeout(None) as limit:
                    if self.role == link_pb2.CLIENT and self._order.earlier():
                        stream.spawn(self._return(call, limit))
                    while (message := await stream.receive()) is not None:
                        self._heard_at = time.monotonic()
                        await self._take(stream, message)
                        del message  # a chunk is not kept until the next one is here
                        self._ended.set()
            finally:
                self._stream = None
                if any(job.sent_on is stream for job in self._jobs.values()):
                    self.sent.has_broken = True
                for wanted in self._pieces.values():
                    wanted.fail(ConnectionError(f"the link to {self.address} broke"))
                call.cancel()
                stream.close()

    def _hello(self) -> link_pb2.Envelope:
        hello = link_pb2.Hello(name=self.name, role=self.role, identity=self.identity)
        hello.version_min = OLDEST_VERSION
        hello.version_max = VERSION
        hello.instance = self._instance
        hello.software = __version__
        hello.stores = self._uploads is not None
        return link_pb2.Envelope(hello=hello)

    def _welcomed(self, welcome: link_pb2.Welcome) -> None:
        if not welcome.lease_seconds > 0:
            raise UpdateError(f"the server's welcome has lease_seconds={welcome.lease_seconds}")
        if not 0 <= welcome.spread_seconds <= _LONGEST_SPREAD:
            raise UpdateError(f"the server's welcome has spread_seconds={welcome.spread_seconds}")
        self._spread = welcome.spread_seconds
        if self.membership is not None and welcome.authority != self.membership.enroller:
            raise AdmissionRefused("the server has another authority than the one that was joined")
        if self._renewal is not None:
            self._renewal.welcomed(welcome.clock)
        if self._welcome is not None and welcome.instance != self._welcome.instance:
            self._forget("the server was started anew")
        elif welcome.is_new:
            self._forget("the server did not hear of this participant for too long")
        self.on_welcome(welcome)
        self._welcome = welcome

    def _forget(self, reason: str) -> None:
        """Drop all requests of a server that restarted or gave them up."""
        jobs = self._jobs
        self._jobs = {}
        for job in jobs.values():
            self._drop(job, False, reason)

    def _drop(self, job: OpenRequest, accepted: bool, reason: str) -> None:
        job.abandon()  # before the worker may use its memory for something else
        if job.is_running:
            self._limits.drop(job)
            self.worker.cancel(job.request, reason)  # acknowledged when it has stopped
        else:
            self.worker.acknowledged(job.request, accepted, reason)

    async def _take(self, stream: Stream, message: link_pb2.Envelope | Piece) -> None:
        if isinstance(message, Piece):
            self._chunk(stream, message)
            return
        kind = message.WhichOneof("body")
        if kind == "request":
            await self._request(stream, message.request)
        elif kind == "chunk":
            self._chunk(stream, message.chunk)
        elif kind == "store":
            self._store(message.store.blob)
        elif kind == "pull":
            self._end_upload(message.pull.sha256)
            stream.spawn(send_result(stream, self._jobs, message.pull, self._machine, self.sent))
        elif kind == "receipt":
            job = self._jobs.pop(message.receipt.id, None)
            receipt = message.receipt
            if job is not None:
                if receipt.accepted and job.sent_on is stream:
                    self.sent.has_broken = False
                if not receipt.accepted and (
                    job.reply is None or not job.reply.HasField("failure")
                ):
                    log.info(
                        "%s: its result was not used: %s", self.name, in_a_line(receipt.reason)
                    )
                self._drop(job, receipt.accepted, receipt.reason)
        elif kind == "check_in":
            seconds = message.check_in.seconds
            if not 0 < seconds <= _LONGEST_AWAY:
                raise UpdateError(f"the server's check-in has seconds={seconds}")
            stream.spawn(self._hang_up(stream, seconds))
        elif kind == "renewed":
            renewal = self._renewal
            welcome = self._welcome
            if renewal and welcome and await renewal.take(message.renewed, stream):
                welcome.enrolment = message.renewed.enrolment
                self.on_welcome(welcome)
        elif kind == "cancel":
            job = self._jobs.get(message.cancel.id)
            reason = in_a_line(message.cancel.reason) or "nobody waits for it"
            if job is not None and job.is_running:
                self.worker.cancel(job.request, reason)
            elif job is not None:
                self._drop(self._jobs.pop(job.id), False, reason)
        # Everything else is a ping, or a message of a newer server that can be ignored.

    async def _request(self, stream: Stream, request: link_pb2.Request) -> None:
        job = self._jobs.get(request.id)
        if job is None:
            if self._leaving or self._away:  # the server knows by now, or will in a moment
                return
            self._limits.check_room(self._jobs)
            job = OpenRequest.of(request)
            self._jobs[job.id] = job
            if (blob := self._wanted(request)) is not None and blob.size:
                try:
                    job.buffer = self._limits.allocate(job, blob.size, self.worker, self._jobs)
                except UpdateError as error:
                    await self._answer(job, failure(str(error), error.code), None)
                    return
                if job.buffer is not None:
                    job.assembly = Assembly(blob, into(job.buffer))
                    if (held := self._held(request)) is not None:
                        await to_the_end(asyncio.to_thread(job.take, held))
                    if (filling := job.filled_from(self._sources_of(blob))) is not None:
                        self._spawn(self._fill(job, filling))
                        return
        if job.reply is not None:
            await stream.send(link_pb2.Envelope(reply=job.reply))
        elif job.filling is None:
            await self._pull(stream, job)

    def _sources_of(self, blob: link_pb2.Blob) -> list[RestingSource]:
        """Where a blob may be besides the link, in the order in which they are asked."""
        mirror = None if self._mirrors is None else self._mirrors.of(blob)
        return [*self._sources, *(() if mirror is None else (mirror,))]

    async def _pull(self, stream: Stream, job: OpenRequest) -> None:
        """Ask for what is not here of a request's blob, and begin if nothing is missing.

        A request that has begun is left as it is: the server repeats it on a new stream, perhaps
        just when its blob has come from a source.
        """
        if job.task is None and job.assembly is None:
            self._start(job)
        if job.task is not None or job.assembly is None:
            return
        job.wanted_on = stream
        self.received.begin(time.monotonic())
        await stream.send(job.pull(self._machine))
        # Without anything left to pull, this has told the server that the blob is here.
        if job.task is None and job.assembly.complete and self._jobs.get(job.id) is job:
            self._start(job)

    async def _fill(self, job: OpenRequest, filling: Filling) -> None:
        """Take a request's blob from the sources, and pull it if they do not have it."""
        await job.fill(filling)
        if self._jobs.get(job.id) is not job or self._stream is None:
            return  # dropped, or the server repeats the request on the next stream
        self._stream.spawn(self._pull(self._stream, job))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something besides the stream, which a broken stream does not end."""
        task = asyncio.create_task(work)
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    def _chunk(self, stream: Stream, chunk: link_pb2.Chunk | Piece) -> None:
        wanted = self._pieces.get(bytes(chunk.sha256))
        if wanted is not None:
            self.received.add(len(chunk.data), time.monotonic())
            wanted.add(chunk)
            return
        for job in self._jobs.values():
            assembly = job.assembly
            if assembly is None or job.task is not None or job.wanted_on is not stream:
                continue
            if assembly.blob.sha256 != chunk.sha256:
                continue
            if isinstance(chunk, link_pb2.Chunk) and chunk.HasField("file"):
                if job.read_on is stream:
                    self._start(job)
                elif self._machine:
                    stream.spawn(self._read(stream, job, chunk.file))
                continue
            if chunk.absent:
                job.task = asyncio.create_task(
                    self._answer(job, failure("the server no longer has the model"), None)
                )
                continue
            self.received.add(len(chunk.data), time.monotonic())
            try:
                assembly.add(chunk)
            except UpdateError as error:
                if assembly.offset < assembly.blob.size:
                    raise  # the next stream continues from this offset
                job.task = asyncio.create_task(self._answer(job, failure(str(error)), None))
                continue
            if assembly.complete:
                self._start(job)

    async def _read(self, stream: Stream, job: OpenRequest, file: link_pb2.OpenFile) -> None:
        is_read = await job.read(stream, file)
        await stream.send(job.pull(self._machine if is_read else ""))

    def _start(self, job: OpenRequest) -> None:
        job.task = asyncio.create_task(self._execute(job))

    async def _execute(self, job: OpenRequest) -> None:
        buffer = job.buffer
        job.buffer = None
        job.assembly = None
        try:
            reply, payload = await self.worker.work(
                job.request, buffer, lambda progress: self._progress(job, progress)
            )
        except IsthmusError as error:
            reply = failure(str(error), error.code)
            payload = None
        except Exception as error:
            log.exception("request %s failed", job.id)
            reply = failure(f"internal error: {type(error).__name__}: {error}")
            payload = None
        await self._answer(job, reply, payload)

    async def _answer(
        self, job: OpenRequest, reply: link_pb2.Reply, payload: Buffer | InFile | None
    ) -> None:
        job.buffer = job.assembly = None
        if payload is not None and not isinstance(payload, InFile):
            await _name_result(job, reply, payload)
        if self._jobs.get(job.id) is not job:
            self.worker.acknowledged(job.request, False, "the server dropped the request")
            return
        if job.note is not None:
            # The server drops what comes after the reply.
            await asyncio.wrap_future(job.note)
        reply.id = job.id
        job.payload = payload
        job.reply = reply
        if reply.HasField("failure"):  # for the owner, who does not see the server's report
            log.warning("%s could not execute a request: %s", self.name, reply.failure.reason)
            reply.failure.reason = self._told(reply.failure.reason)
        if reply.HasField("app_replied"):
            reply.app_replied.error = self._told(reply.app_replied.error)
        if self._stream is not None:
            await self._stream.send_quietly(link_pb2.Envelope(reply=reply))

    def _told(self, text: str) -> str:
        """A text as the server reads it."""
        return text if self._places is None else self._places.hidden(text)

    def _store(self, blob: link_pb2.Blob) -> None:
        """Put a result into the server's store, or have the server pull it.

        Once only: what hangs there would add up with each address that a lying server names.
        """
        sha256 = bytes(blob.sha256)
        job = next((job for job in self._jobs.values() if job.has_result(sha256)), None)
        if job is None or job.payload is None or self._uploads is None:
            self._say_stored(sha256, False)
            return
        if job.upload is not None:
            # Repeated on a new stream. One that is on its way is told of when it has ended.
            is_same = job.upload.address == blob.address
            if not is_same or job.upload.is_stored is not None:
                self._say_stored(sha256, is_same and job.upload.is_stored is True)
            return
        if is_plain_update(job.request):
            job.upload = self._uploads.of(blob, job.payload)
        if job.upload is None:
            self._say_stored(sha256, False)
        else:
            self._spawn(self._upload(job.upload, sha256))

    async def _upload(self, upload: Upload, sha256: bytes) -> None:
        is_stored = await upload.run(lambda sent: self._say_sent(sha256, sent))
        self._say_stored(sha256, is_stored)

    def _end_upload(self, sha256: bytes) -> None:
        """The server pulls a result, which it does not get, or has not got, from its store."""
        for job in self._jobs.values():
            if job.upload is None or not job.has_result(sha256):
                continue
            job.upload.abandon()
            if job.upload.is_stored is not False:  # else it was said
                job.upload.is_stored = False
                log.warning(
                    "%s: the server has not got an update from its store, and it goes over the "
                    "link",
                    self.name,
                )

    def _say_sent(self, sha256: bytes, sent: int) -> None:
        self._say(stored=link_pb2.Stored(sha256=sha256, bytes=sent))

    def _say_stored(self, sha256: bytes, is_stored: bool) -> None:
        stored = link_pb2.Stored(sha256=sha256, complete=is_stored, declined=not is_stored)
        self._say(stored=stored)

    def _say(self, **body: Any) -> None:
        """Send a message without which the other end goes on, if there is a stream."""
        if (stream := self._stream) is not None:
            stream.spawn(stream.send_quietly(link_pb2.Envelope(**body)))

    def _progress(self, job: OpenRequest, progress: link_pb2.Progress) -> None:
        now = time.monotonic()
        if not progress.note:
            if now - job.reported_at < _PROGRESS_SECONDS:
                return
            job.reported_at = now
        progress.id = job.id
        progress.note = self._told(progress.note)
        message = link_pb2.Envelope(progress=progress)
        stream = self._stream
        loop = self._loop
        if stream is not None and loop is not None:
            sending = asyncio.run_coroutine_threadsafe(stream.send_quietly(message), loop)
            if progress.note:
                job.note = sending


async def _name_result(job: OpenRequest, reply: link_pb2.Reply, payload: Buffer) -> None:
    """Name a result that its worker has left without a name.

    A server whose files this process has opened for the request opens this process's too, and
    verifies no SHA-256 then: computing it would take longer than all else that is done with the
    bytes.
    """
    blob = blob_of(reply)
    if blob.sha256:
        return
    if job.read_on is not None and offered(payload) is not None:
        blob.CopyFrom(named(payload))
    else:
        blob.CopyFrom(await asyncio.to_thread(describe, payload))
