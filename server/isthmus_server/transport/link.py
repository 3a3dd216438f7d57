"""The server's end of the link: connected participants, requests to them, blobs in both directions.

Every participant connects to the server and keeps one stream open. Its state outlives the stream:
when a stream breaks, requests stay pending until the participant reconnects or its lease expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

import grpc
import grpc.aio

from isthmus.errors import (
    AdmissionRefused,
    ParticipantLost,
    TransferStalled,
    UpdateError,
    UserError,
)
from isthmus.identity.tls import Subject, is_loopback, is_socket
from isthmus.system.clocks import CLOCK_METADATA
from isthmus.system.private_socket import private_socket
from isthmus.transport.blobs import Buffer, InFile, Piece, Write
from isthmus.transport.heartbeats import Heartbeats
from isthmus.transport.shared_memory import Take, machine
from isthmus.transport.stream import Stream, to_the_end
from isthmus.transport.transfer_time import TransferTime
from isthmus.wire import link_pb2
from isthmus_server.mirror.mirrored_blobs import MirroredBlobs
from isthmus_server.mirror.stored_updates import ExpectedUpdate, StoredUpdates
from isthmus_server.transport.aggregators import Aggregators, ConnectedAggregator, DeviceChannel
from isthmus_server.transport.blob_store import BlobStore
from isthmus_server.transport.check_ins import CheckIns, in_words
from isthmus_server.transport.enrolment import Enrolments
from isthmus_server.transport.limits import (
    DENIED,
    HELLO_SECONDS,
    IDLE_SECONDS,
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_ID,
    MAX_STREAMS_PER_CERTIFICATE,
    MESSAGES_OF,
    REPLY_KINDS,
    RESERVED_FILES,
    SHA256_BYTES,
    Refusal,
    Services,
    abort_stream,
    certificate_digest,
    certificate_of,
    listen,
    negotiate,
    server_options,
)
from isthmus_server.transport.peer import Fetched, ListenerGroup, Peer, Place
from isthmus_server.transport.relay import Relay
from isthmus_server.transport.renewal_proofs import UNSIGNED, RenewalProofs
from isthmus_server.transport.turns import AllTurns

CONNECTIONS = 20_000
"""Most connections, if the process may open as many files."""

PING_GROUPS = 16
"""Groups in which idle streams are pinged, so that no ping waits for thousands of others."""

_REQUEST_ENDED = "too late: the request has ended"
"""Reason for refusing a reply to a request that no call waits for any more."""

log = logging.getLogger(__name__)


class Link(AllTurns):
    """Connections of all participants.

    Guarantees:
      * `ask` and `fetch` end: with a result, or with `ParticipantLost` one lease after the stream
        broke; a stream without a message for the length of a lease counts as broken;
      * a reply that arrives after its request has ended is refused, never used;
      * receipts and cancellations are repeated on every new stream until they have arrived;
      * nothing larger than `MAX_MESSAGE_BYTES` is read from the network at a time, and no
        certificate has more than `MAX_STREAMS_PER_CERTIFICATE` streams, of which only the latest is
        read;
      * with TLS, a participant has the identity of its certificate, and may only send what its role
        allows.
    """

    def __init__(
        self, lease_seconds: float, enrolments: Enrolments | None = None, *, shares: bool = False
    ) -> None:
        """Create a link that does not listen yet.

        Args:
            lease_seconds: time without a message after which a participant is removed.
            enrolments: decides which participants may connect; None admits all.
            shares: blobs may pass as open files, see `isthmus.transport.shared_memory`.
        """
        self.lease_seconds = lease_seconds
        self.enrolments = enrolments or Enrolments()
        self.peers: dict[str, Peer] = {}
        """Participants, by name."""
        self.aggregating: dict[str, Peer] = {}
        """Aggregators, by name: they take part in nothing, so that no job knows of them."""
        self.aggregators = Aggregators()
        """Which of them are connected."""
        self.listeners = ListenerGroup()
        """Notified of participants that join, leave or report progress."""
        self.check_ins = CheckIns()
        """Who stays connected; by default everybody."""
        self._machine = machine() if shares else ""
        self.shares_memory = bool(self._machine)
        self._blobs = BlobStore(machine=self._machine)
        self.uploads: StoredUpdates | None = None
        """Where devices may put updates besides the link, if anywhere; set before jobs have views
        of this link."""
        self._instance = uuid.uuid4().hex[:12]
        self._ids = itertools.count(1)
        self._servers: list[grpc.aio.Server] = []
        self._passing: Relay | None = None
        self._private = contextlib.ExitStack()
        self._streams: Counter[bytes] = Counter()
        self._heartbeats = Heartbeats(lease_seconds, PING_GROUPS)

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
        services: Services | None = None,
    ) -> int:
        """Listen on a TCP port (0: any), and return it.

        `credentials` must request the callers' certificates; `services` are further gRPC services
        on the same port.

        Raises:
            UserError: an address that others can reach without credentials, or a port in use.
        """
        if credentials is None and not is_loopback(host):
            raise UserError(
                f"address={host!r} is not loopback, and this link is not encrypted; use 127.0.0.1, "
                "or `isthmus server`"
            )
        return await self._listen(f"{host}:{port}", credentials, services or {})

    async def start_on_socket(self, address: str) -> None:
        """Listen on a Unix socket, `unix:PATH`; its directory decides who may connect.

        Raises:
            UserError: it cannot be created.
        """
        assert is_socket(address)
        await self._listen(address, None, {})

    async def start_behind(
        self, credentials: grpc.ServerCredentials, services: Services, more_files: int = 0
    ) -> Callable[[socket.socket, str], None]:
        """Serve connections that a port of this process accepts; returns what takes one over.

        `more_files` are open elsewhere for each of them; the other arguments are as in `start`.

        Raises:
            UserError: there can be no socket in the temporary folder.
        """
        address = self._private.enter_context(private_socket())
        # Twice as many: gRPC sees later than the relay that a connection is closed.
        await self._listen(address, credentials, services, 2 * CONNECTIONS)
        path = address.removeprefix("unix:")
        self._passing = Relay(path, CONNECTIONS, RESERVED_FILES, more_files)
        return self._passing.take

    async def _listen(
        self,
        address: str,
        credentials: grpc.ServerCredentials | None,
        services: Services,
        connections: int = CONNECTIONS,
    ) -> int:
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        server, port = await listen(
            {"isthmus.link.v1.Link": {"Connect": handler}, **services},
            address,
            credentials,
            server_options(connections, MAX_MESSAGE_BYTES, IDLE_SECONDS),
            calls=CONNECTIONS,
        )
        self._servers.append(server)
        return port

    async def stop(self) -> None:
        """Close every stream and stop listening."""
        for peer in (*self.peers.values(), *self.aggregating.values()):
            if peer.lease is not None:
                peer.lease.cancel()
            peer.fail_pending("the server is stopping")
        await asyncio.gather(*(server.stop(grace=0.2) for server in self._servers))
        if self._passing is not None:
            await self._passing.stop()
        self._private.close()

    # -- requests and blobs ------------------------------------------------------------------------

    def new_id(self) -> str:
        """Return a request id that no server process has used before."""
        return f"{self._instance}-{next(self._ids)}"

    async def ask(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        """Send a request (its id must be `new_id()`) and wait for the reply.

        If the wait is cancelled, the participant is told to cancel the request.

        Raises:
            ParticipantLost: it is not connected, or was lost before it replied.
        """
        if self.mirror is not None and self._peer(name).role == link_pb2.CLIENT:
            await self.mirror.add_addresses(name, request, self._blobs.get)
        peer = self._peer(name)
        reply: asyncio.Future[link_pb2.Reply] = asyncio.get_running_loop().create_future()
        peer.pending[request.id] = (request, reply)
        try:
            await peer.send_request(request)
            return await reply
        except asyncio.CancelledError:
            if request.id in peer.unacknowledged:
                self.acknowledge(name, request.id, False, _REQUEST_ENDED)
            else:
                peer.send_and_keep(link_pb2.Envelope(cancel=link_pb2.Cancel(id=request.id)))
            raise
        finally:
            peer.pending.pop(request.id, None)

    async def ask_aggregator(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        """Send a request to an aggregator, as `ask` does; jobs take no turns with these.

        Raises:
            ParticipantLost: it is not connected, or was lost before it replied.
        """
        return await Link.ask(self, name, request)

    @contextlib.asynccontextmanager
    async def stored(
        self, name: str, blob: link_pb2.Blob, directory: Path
    ) -> AsyncIterator[ExpectedUpdate | None]:
        """Have a device put its plain update into the store; in the block `fetch` gets it there.

        Args:
            name: the device.
            blob: the update.
            directory: where it is to be received, in a file without a name.

        Yields:
            What is there, as the device says; None if the update is to be pulled.

        Raises:
            ParticipantLost: the device was lost before it said so.
        """
        peer = self._peer(name)
        # An aggregator's devices are its own: it spares the server what a store would.
        if self.uploads is None or not peer.stores or peer.place is not None:
            yield None
            return
        async with self.uploads.expecting(name, blob, directory) as expected:
            is_there = False
            if expected is not None:
                pause = TransferTime.LONGEST_PAUSE + self.lease_seconds
                with contextlib.suppress(TransferStalled):
                    is_there = await peer.store(expected.blob, pause=pause)
            yield expected if is_there else None

    async def fetch(
        self,
        name: str,
        blob: link_pb2.Blob,
        write: Write,
        take: Take | None = None,
        stored: ExpectedUpdate | None = None,
    ) -> None:
        """Pull a blob from a participant; `write` receives its pieces, possibly in threads.

        A participant that shares its memory may have `take` receive it as a whole, in a thread;
        so is what is `stored`, if it is the blob.

        Raises:
            ParticipantLost: it was lost before the blob was complete.
            TransferStalled: nothing of it came for `LONGEST_PAUSE` and a lease.
            UpdateError: it does not hold the blob, or the bytes do not match the SHA-256, which is
                not verified of a file, or under a random name where memory is shared.
        """
        if stored is not None and take is not None and self.uploads is not None:
            file = await self.uploads.get(stored)
            if file is not None:
                if (peer := self.peers.get(name)) is not None:
                    peer.received.add(blob.sha256, blob.size)
                await to_the_end(_taken(take, file))
                return
        if blob.size:
            # It may be without a stream for a lease, and then has as long as others.
            pause = TransferTime.LONGEST_PAUSE + self.lease_seconds
            await self._peer(name).fetch(blob, write, take, self._machine, pause=pause)

    def acknowledge(self, name: str, request_id: str, accepted: bool, reason: str = "") -> None:
        """Notify a participant whether its reply was accepted, so that it can free the result."""
        if (peer := self.peers.get(name) or self.aggregating.get(name)) is not None:
            peer.unacknowledged.discard(request_id)
            receipt = link_pb2.Receipt(id=request_id, accepted=accepted, reason=reason)
            peer.send_and_keep(link_pb2.Envelope(receipt=receipt))

    @property
    def mirror(self) -> MirroredBlobs | None:
        """Where devices may fetch blobs besides the link, if anywhere."""
        return self._blobs.mirror

    @mirror.setter
    def mirror(self, mirror: MirroredBlobs | None) -> None:
        """Set before anything is published, and before jobs have views of this link."""
        self._blobs.mirror = mirror

    @property
    def published_blobs(self) -> int:
        """Number of blobs that participants can pull now."""
        return len(self._blobs)

    def publish(
        self, blob: link_pb2.Blob, payload: bytes | Buffer | InFile, *, together: bool = True
    ) -> None:
        """Let participants pull a blob, directly from `payload`, until `retract`.

        `together`: many may do so at the same time, and messages are shared.
        """
        self._blobs.publish(blob, payload, together=together)

    def retract(self, blob: link_pb2.Blob) -> None:
        """Stop offering a blob; its memory belongs to the caller again."""
        self._blobs.retract(blob)

    def _peer(self, name: str) -> Peer:
        peer = self.peers.get(name) or self.aggregating.get(name)
        if peer is None:
            raise ParticipantLost(f"{name} is not connected", reached=False)
        return peer

    def _among(self, role: link_pb2.Role) -> dict[str, Peer]:
        """The callers of a role, by name."""
        return self.aggregating if role == link_pb2.AGGREGATOR else self.peers

    # -- the life of a stream ----------------------------------------------------------------------

    async def _connect(
        self, _requests: object, context: grpc.aio.ServicerContext | DeviceChannel
    ) -> None:
        caller = certificate_digest(context)
        if caller and self._streams[caller] >= MAX_STREAMS_PER_CERTIFICATE:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many open streams")
        self._streams[caller] += 1
        try:
            clock = (CLOCK_METADATA, f"{self.enrolments.now():.3f}")
            await context.send_initial_metadata((clock,))  # `isthmus doctor` asks for no more
            await self._serve(Stream(context), context)
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _serve(
        self, stream: Stream, context: grpc.aio.ServicerContext | DeviceChannel
    ) -> None:
        peer: Peer | None = None
        try:
            hello = await stream.receive(timeout=HELLO_SECONDS)
            version, refusal = negotiate(hello)
            if refusal:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
            assert isinstance(hello, link_pb2.Envelope)
            if hello.hello.role == link_pb2.AGGREGATOR:
                self._check_aggregator(context)
            subject = await self.enrolments.admit(hello.hello, certificate_of(context))
            if self._passing is not None:
                self._passing.admitted(context.peer())
            peer = await self._take_stream(hello.hello, subject, stream, context)
            welcome = self._welcome(version, hello.hello, peer)
            async with asyncio.timeout(HELLO_SECONDS):
                await stream.send(link_pb2.Envelope(welcome=welcome))
            del hello
            async with self._supervised(stream, context):
                if peer.role == link_pb2.AGGREGATOR:
                    await self._serve_aggregator(peer, stream)
                    return
                if peer.is_new:
                    self._take_in(peer)
                else:
                    await peer.resume(stream)
                while (message := await stream.receive()) is not None:
                    await self._handle(peer, stream, message)
                    del message  # a chunk is not kept until the next one is here
        except AdmissionRefused as error:
            await abort_stream(context, Refusal.of(error))
        except UpdateError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            log.info("%s: no message for the length of a lease", peer.name if peer else "a caller")
        except asyncio.CancelledError:
            if peer is None or (peer.refusal is None and peer.stream is stream):
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            await abort_stream(context, peer.refusal)
        finally:
            stream.close()
            if peer is not None and peer.stream is stream:
                peer.stream = None
                if peer.refusal is None:
                    self._start_lease(peer)

    def _supervised(
        self, stream: Stream, context: grpc.aio.ServicerContext | DeviceChannel
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep a stream alive; those of devices at an aggregator are kept alive there."""
        if isinstance(context, DeviceChannel):
            return contextlib.nullcontext()
        return self._heartbeats.of(stream)

    def _check_aggregator(self, context: grpc.aio.ServicerContext | DeviceChannel) -> None:
        """Refuse aggregators where nobody can be told apart, or behind another one.

        Raises:
            AdmissionRefused: it is one of these.
        """
        if not self.enrolments.certified or isinstance(context, DeviceChannel):
            raise AdmissionRefused(
                "an aggregator connects to a server on a network (isthmus server start), and "
                "through no other aggregator"
            )

    async def _serve_aggregator(self, peer: Peer, stream: Stream) -> None:
        """Serve an aggregator, and the devices that have a stream there."""
        async with self.aggregators.serving(peer, stream) as aggregator:
            peer.is_new = False
            await peer.resume(stream)
            while (message := await stream.receive()) is not None:
                kind = None if isinstance(message, Piece) else message.WhichOneof("body")
                if kind == "caller":
                    assert isinstance(message, link_pb2.Envelope)
                    await self._open_channel(aggregator, message.caller)
                elif kind in ("through", "hang_up", "passed"):
                    assert isinstance(message, link_pb2.Envelope)
                    await aggregator.take(message)
                else:
                    await self._handle(peer, stream, message)
                del message  # as in `_serve`

    async def _open_channel(self, aggregator: ConnectedAggregator, caller: link_pb2.Caller) -> None:
        """Serve a device at an aggregator, or refuse it and no other.

        Raises:
            UpdateError: the channel is open already.
        """
        if aggregator.is_full:
            full = "this aggregator has too many devices"
            await aggregator.refuse(caller.channel, grpc.StatusCode.RESOURCE_EXHAUSTED, full)
            return
        try:
            channel = aggregator.open(caller, self.enrolments.authority_pem)
        except AdmissionRefused as error:
            await aggregator.refuse(caller.channel, DENIED, str(error))
            return
        aggregator.serve(channel, self._connect(None, channel))

    def _take_in(self, peer: Peer) -> None:
        """Give a new participant a place, or have it come back later."""
        is_kept = True
        for who, seconds in self.check_ins.called_back(peer, self.enrolments.population()):
            self._call_back(who, seconds)
            is_kept = is_kept and who is not peer
        if is_kept:
            self._announce(peer)
            return
        # Not announced, so that nobody asks it for anything. One that does not go is needed no less
        # than others.
        asyncio.get_running_loop().call_later(self.lease_seconds, self._announce, peer)

    def _call_back(self, peer: Peer, seconds: float) -> None:
        if peer.stream is None:
            return
        peer.checks_in_at = time.time() + seconds
        check_in = link_pb2.Envelope(check_in=link_pb2.CheckIn(seconds=seconds))
        peer.stream.spawn(peer.stream.send_quietly(check_in))

    def _announce(self, peer: Peer) -> None:
        if peer.is_new and self.peers.get(peer.name) is peer:
            peer.is_new = False
            self.check_ins.joined(peer)
            self.listeners.joined(peer)

    def _welcome(self, version: int, hello: link_pb2.Hello, peer: Peer) -> link_pb2.Welcome:
        not_after = None if peer.subject is None else peer.subject.not_after
        schedule = self.check_ins.schedule(self.enrolments.population())
        return link_pb2.Welcome(
            version=version,
            lease_seconds=self.lease_seconds,
            authority=self.enrolments.authority,
            enrolment=self.enrolments.enrol(peer.name, hello.identity, not_after),
            instance=self._instance,
            is_new=peer.is_new,
            clock=self.enrolments.now(),
            spread_seconds=0.0 if schedule is None else schedule.spread,
        )

    async def _take_stream(
        self,
        hello: link_pb2.Hello,
        subject: Subject | None,
        stream: Stream,
        context: grpc.aio.ServicerContext | DeviceChannel,
    ) -> Peer:
        """Make a stream the participant's current one, in place of an older stream or process."""
        among = self._among(hello.role)
        peer = among.get(hello.name)
        if peer is not None and peer.instance != hello.instance:
            if peer.stream is not None:
                # The old process may have died without closing its stream: retry after a lease.
                await context.abort(
                    grpc.StatusCode.ABORTED, f"a participant named {hello.name!r} is connected"
                )
            self._remove(peer, "lost: its process ended, and a new one has come back")
            peer = None
        if peer is not None:
            if peer.stream is not None and peer.serving is not None:
                peer.stream.close()
                peer.serving.cancel()
            if peer.lease is not None:
                peer.lease.cancel()
        else:
            peer = among[hello.name] = Peer(hello, subject)
        peer.subject = subject
        peer.stream = stream
        peer.place = None
        peer.renewal_proofs = None
        if isinstance(context, DeviceChannel):
            peer.renewal_proofs = RenewalProofs(context.certificate)
            peer.place = Place(context.aggregator.peer, context.number)
            context.participant = peer
            through = context.aggregator.name
            log.info("%s is connected through the aggregator %s", peer.name, through)
        peer.transfers = {}
        peer.serving = asyncio.current_task()
        return peer

    # -- the end of a participant ------------------------------------------------------------------

    def _start_lease(self, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        peer.lease = loop.call_later(self.lease_seconds, self._expire_lease, peer)

    def _expire_lease(self, peer: Peer) -> None:
        self._remove(peer, f"lost: silent for longer than the lease of {self.lease_seconds:g} s")

    def disconnect(self, name: str, reason: str, status: grpc.StatusCode = DENIED) -> None:
        """Remove a participant and end its stream with a status; the reason is sent to it."""
        if (peer := self.peers.get(name) or self.aggregating.get(name)) is None:
            return
        peer.refusal = Refusal(reason, status)
        self._remove(peer, reason)
        if peer.stream is not None and peer.serving is not None:
            peer.serving.cancel()

    def _remove(self, peer: Peer, reason: str) -> None:
        """Remove a participant, fail its requests, and notify the listeners."""
        if peer.lease is not None:
            peer.lease.cancel()
        among = self._among(peer.role)
        if among.get(peer.name) is peer:
            del among[peer.name]
        peer.fail_pending(reason)
        if peer.role == link_pb2.AGGREGATOR:
            return
        self.check_ins.left(peer, reason)
        self.listeners.left(peer, reason)

    # -- messages ----------------------------------------------------------------------------------

    async def _handle(self, peer: Peer, stream: Stream, message: link_pb2.Envelope | Piece) -> None:
        size = stream.received_size
        if isinstance(message, Piece):
            await peer.add_chunk(message, size)
            return
        kind = message.WhichOneof("body")
        if kind is not None and kind not in MESSAGES_OF[peer.role]:
            raise AdmissionRefused(
                f"a {link_pb2.Role.Name(peer.role).lower()} may not send {kind!r}"
            )
        if kind == "chunk":
            await peer.add_chunk(message.chunk, size)
        elif kind == "pull":
            if len(message.pull.sha256) != SHA256_BYTES:
                raise UpdateError("it asked for a blob by something else than a SHA-256")
            peer.messages_received.add(message.pull.sha256, size)
            self._blobs.send(peer, stream, message.pull)
        elif kind == "reply":
            if message.reply.id in peer.pending:
                peer.messages_received.add(message.reply.id.encode(), size)
            await self._handle_reply(peer, stream, message.reply)
        elif kind == "progress":
            if message.progress.id in peer.pending:
                peer.messages_received.add(message.progress.id.encode(), size)
                peer.note = (message.progress.id, message.progress.note)
                peer.last_step = peer.last_step.followed_by(message.progress)
                if message.progress.HasField("fetched"):
                    peer.fetched = (message.progress.id, Fetched.of(message.progress.fetched))
                self.listeners.progressed(peer.name, message.progress)
        elif kind == "stored":
            peer.add_stored(message.stored, size)
        elif kind == "renew":
            await stream.send(link_pb2.Envelope(renewed=await self._renewed(peer, message.renew)))
        elif kind == "leave":
            self.disconnect(peer.name, _gone(peer), grpc.StatusCode.CANCELLED)

    async def _renewed(self, peer: Peer, asked: link_pb2.Renew) -> link_pb2.Renewed:
        """Answer a request for a certificate; an aggregator can neither make nor repeat one."""
        request = asked.signing_request
        proofs = peer.renewal_proofs
        if proofs is not None:
            if not asked.proof:
                return link_pb2.Renewed(nonce=proofs.new_nonce(), reason=UNSIGNED)
            try:
                proofs.check(request, asked.proof)
            except AdmissionRefused as error:
                return link_pb2.Renewed(reason=str(error))
        renewed, peer.subject = await self.enrolments.renewed(peer.subject, request)
        if proofs is not None and renewed.certificate:
            proofs.issued(renewed.certificate)
        return renewed

    async def _handle_reply(self, peer: Peer, stream: Stream, reply: link_pb2.Reply) -> None:
        if reply.id in peer.unacknowledged:
            return  # the request was repeated after a break, while the reply was on its way
        pending = peer.pending.get(reply.id)
        if len(reply.id) > MAX_REQUEST_ID:
            raise UpdateError("it replied to a request that was never sent")
        if pending is None:
            await self._refuse_late_reply(peer, stream, reply.id)
            return
        request, future = pending
        outcome = reply.WhichOneof("outcome")
        if outcome not in REPLY_KINDS[request.WhichOneof("work") or ""] | {"failure"}:
            reason = f"it answered something else than was asked: {outcome!r}"
            reply = link_pb2.Reply(id=reply.id, failure=link_pb2.Failure(reason=reason))
        if not future.done():
            peer.unacknowledged.add(reply.id)
            future.set_result(reply)

    async def _refuse_late_reply(self, peer: Peer, stream: Stream, request_id: str) -> None:
        """Send a receipt that refuses a late update, or another reply whose request has ended.

        Waits until it is sent, so that a participant that sends replies without reading receipts is
        not read either.
        """
        receipt = link_pb2.Receipt(id=request_id, reason=_REQUEST_ENDED)
        peer.outbox.append(link_pb2.Envelope(receipt=receipt).SerializeToString())
        await stream.send_quietly(peer.outbox[-1])


async def _taken(take: Take, file: BinaryIO) -> None:
    """Have a file taken in a thread."""
    await asyncio.to_thread(take, file)


def _gone(peer: Peer) -> str:
    """Why a participant has left."""
    if peer.checks_in_at is None or peer.checks_in_at <= time.time():  # it has stayed
        return "lost: it has left"
    return f"not needed: {in_words(peer.checks_in_at)}"
