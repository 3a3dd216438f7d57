"""The server's end of the link: who is here, asking them for work, moving contents both ways.

Every participant dials in and holds one stream open. A participant outlives its stream: when the
stream breaks, what it was asked for stays pending until it is back or its lease is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable

import grpc
import grpc.aio

from isthmus.errors import AdmissionRefused, ParticipantLost, UpdateError, UserError
from isthmus.identity.tls import Subject, is_loopback, is_socket
from isthmus.transport.blobs import Assembly, Buffer, InFile, Piece, Write
from isthmus.transport.heartbeats import Heartbeats
from isthmus.transport.stream import Stream, to_the_end
from isthmus.wire import link_pb2
from isthmus_server.transport.blob_store import Published
from isthmus_server.transport.enrolment import Enrolments
from isthmus_server.transport.limits import (
    ANSWERS,
    HELLO_SECONDS,
    IDLE_SECONDS,
    LONGEST_ID,
    MAX_FROM_PARTICIPANT,
    SPOKEN,
    STREAMS_EACH,
    caller_of,
    certificate_of,
    end,
    greet,
    listen,
    listening_options,
)
from isthmus_server.transport.peer import Fetch, Peer

GROUPS = 16
"""In which idle streams are pinged, so that no ping has to wait for thousands of others."""

log = logging.getLogger(__name__)


class Link:
    """Everybody who dialled in.

    Guarantees:
      * `ask` and `fetch` end: with a result, or with `ParticipantLost` one lease after the stream
        broke; a stream on which nothing is heard for a lease counts as broken;
      * a reply to a request that nobody waits for any more is refused, never used;
      * what became of a request is told until it has been heard, whatever breaks in between;
      * nothing is read from the network beyond `MAX_FROM_PARTICIPANT` at a time, and no caller has
        more than `STREAMS_EACH` streams, of which the one that was welcomed last is heard;
      * with TLS, who speaks is who the certificate says, and may say only what its role says.
    """

    def __init__(self, lease_seconds: float, enrolments: Enrolments | None = None) -> None:
        """`lease_seconds`: silence after which a participant counts as gone."""
        self.lease_seconds = lease_seconds
        self.enrolments = enrolments or Enrolments()
        self.peers: dict[str, Peer] = {}
        self.on_join: Callable[[Peer], None] = lambda peer: None
        self.on_leave: Callable[[Peer, str], None] = lambda peer, reason: None
        self.on_progress: Callable[[str, link_pb2.Progress], None] = lambda name, progress: None
        self.beside: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        """Other services on the same port, by name; to be set before `start`."""
        self._published = Published()
        self._instance = uuid.uuid4().hex[:12]
        self._ids = itertools.count(1)
        self._server: grpc.aio.Server | None = None
        self._streams: Counter[bytes] = Counter()
        self._heartbeats = Heartbeats(lease_seconds, GROUPS)

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
    ) -> int:
        """Listen; returns the port. `credentials` must ask callers for their certificate.

        Raises:
            UserError: an address that others can reach without credentials, or a port in use.
        """
        if credentials is None and not is_loopback(host):
            raise UserError(
                f"address={host!r} is not loopback, and this link is not encrypted; use 127.0.0.1, "
                "or `isthmus server`"
            )
        return await self._listen(f"{host}:{port}", credentials)

    async def start_on_socket(self, address: str) -> None:
        """Listen on a Unix socket, `unix:PATH`: only who may enter its directory can dial.

        Raises:
            UserError: it cannot be made.
        """
        assert is_socket(address)
        await self._listen(address, None)

    async def _listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        self._server, bound = await listen(
            {"isthmus.link.v1.Link": {"Connect": handler}, **self.beside},
            address,
            credentials,
            listening_options(20_000, MAX_FROM_PARTICIPANT, IDLE_SECONDS),
            calls=20_000,
        )
        return bound

    async def stop(self) -> None:
        """Close every stream and stop listening."""
        for peer in self.peers.values():
            if peer.lease is not None:
                peer.lease.cancel()
            peer.lose("the server is stopping")
        if self._server is not None:
            await self._server.stop(grace=0.2)

    # -- asking ------------------------------------------------------------------------------------

    def new_id(self) -> str:
        """A request id that no server process has used before."""
        return f"{self._instance}-{next(self._ids)}"

    async def ask(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        """Send a request (its id must be `new_id()`) and wait for the reply.

        Cancelling the wait tells the participant that the result is not wanted any more.

        Raises:
            ParticipantLost: it is not here, or went away before it replied.
        """
        peer = self._peer(name)
        future: asyncio.Future[link_pb2.Reply] = asyncio.get_running_loop().create_future()
        peer.asked[request.id] = (request, future)
        try:
            if peer.stream is not None:
                await peer.stream.send_quietly(link_pb2.Envelope(request=request))
            return await future
        except asyncio.CancelledError:
            if request.id in peer.unacknowledged:
                self.acknowledge(name, request.id, False, "too late: nobody waits for it")
            else:
                peer.tell(link_pb2.Envelope(cancel=link_pb2.Cancel(id=request.id)))
            raise
        finally:
            peer.asked.pop(request.id, None)

    async def fetch(self, name: str, blob: link_pb2.Blob, write: Write) -> None:
        """Pull a content from a participant, piece by piece, into `write`, perhaps in threads.

        Raises:
            ParticipantLost: it went away before everything was here.
            UpdateError: it does not hold the content, or what came is not what was named.
        """
        if blob.size == 0:
            return
        peer = self._peer(name)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        fetch = peer.fetches[blob.sha256] = Fetch(Assembly(blob, write), done)
        try:
            if peer.stream is not None:
                pull = link_pb2.Pull(sha256=blob.sha256)
                await peer.stream.send_quietly(link_pb2.Envelope(pull=pull))
            await done
        finally:
            peer.fetches.pop(blob.sha256, None)
            await to_the_end(fetch.idle())

    def acknowledge(self, name: str, request_id: str, accepted: bool, reason: str = "") -> None:
        """Tell a participant what became of its reply, so that it can let go of its content."""
        peer = self.peers.get(name)
        if peer is not None:
            peer.unacknowledged.discard(request_id)
            receipt = link_pb2.Receipt(id=request_id, accepted=accepted, reason=reason)
            peer.tell(link_pb2.Envelope(receipt=receipt))

    def publish(self, blob: link_pb2.Blob, payload: Buffer | InFile) -> None:
        """Serve a content to whoever wants it, straight from `payload`, until `retract`."""
        self._published.publish(blob, payload)

    def retract(self, blob: link_pb2.Blob) -> None:
        """Stop serving a content; its memory is the caller's again. Who lacks some is told."""
        self._published.retract(blob)

    def _peer(self, name: str) -> Peer:
        peer = self.peers.get(name)
        if peer is None:
            raise ParticipantLost(f"{name} is not connected", reached=False)
        return peer

    # -- one stream --------------------------------------------------------------------------------

    async def _connect(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        caller = caller_of(context)
        if caller and self._streams[caller] >= STREAMS_EACH:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many open streams")
        self._streams[caller] += 1
        try:
            await self._serve(Stream(context), context)
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _serve(self, stream: Stream, context: grpc.aio.ServicerContext) -> None:
        peer: Peer | None = None
        try:
            hello = await stream.receive(timeout=HELLO_SECONDS)
            version, refusal = greet(hello)
            if refusal:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
            assert isinstance(hello, link_pb2.Envelope)
            subject = self.enrolments.admit(hello.hello, certificate_of(context))
            peer = await self._enter(hello.hello, subject, stream, context)
            welcome = self._welcome(version, hello.hello, peer)
            async with asyncio.timeout(HELLO_SECONDS):
                await stream.send(link_pb2.Envelope(welcome=welcome))
            del hello
            async with self._heartbeats.of(stream):
                if peer.fresh:
                    peer.fresh = False
                    self.on_join(peer)
                else:
                    await self._resume(peer, stream)
                while (message := await stream.receive()) is not None:
                    await self._take(peer, stream, message)
        except AdmissionRefused as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except UpdateError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            log.info("%s: nothing heard for a lease", peer.name if peer else "a caller")
        except asyncio.CancelledError:
            if peer is None or (peer.refused is None and peer.stream is stream):
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            await end(context, peer.refused)
        finally:
            stream.close()
            if peer is not None and peer.stream is stream:
                peer.stream = None
                if peer.refused is None:
                    self._start_lease(peer)

    def _welcome(self, version: int, hello: link_pb2.Hello, peer: Peer) -> link_pb2.Welcome:
        end = None if peer.subject is None else peer.subject.not_after
        return link_pb2.Welcome(
            version=version,
            lease_seconds=self.lease_seconds,
            authority=self.enrolments.authority,
            enrolment=self.enrolments.enrol(peer.name, hello.identity, end),
            instance=self._instance,
            is_new=peer.fresh,
        )

    def _start_lease(self, peer: Peer) -> None:
        peer.lease = asyncio.get_running_loop().call_later(
            self.lease_seconds,
            self._expire,
            peer,
            f"lost: silent for longer than the lease of {self.lease_seconds:g} s",
        )

    def cut(self, name: str, reason: str) -> None:
        """Have nothing to do with a participant any more, from this moment on."""
        peer = self.peers.get(name)
        if peer is None:
            return
        peer.refused = reason
        self._expire(peer, reason)
        if peer.stream is not None and peer.serving is not None:
            peer.serving.cancel()

    async def _enter(
        self,
        hello: link_pb2.Hello,
        subject: Subject | None,
        stream: Stream,
        context: grpc.aio.ServicerContext,
    ) -> Peer:
        known = self.peers.get(hello.name)
        if known is not None and known.instance != hello.instance:
            if known.stream is not None:
                # Perhaps the old process died without a word: it may be back after a lease.
                await context.abort(
                    grpc.StatusCode.ABORTED, f"a participant named {hello.name!r} is connected"
                )
            self._expire(known, "lost: its process ended, and a new one has come back")
            known = None
        if known is not None:
            if known.stream is not None and known.serving is not None:
                known.stream.close()
                known.serving.cancel()
            if known.lease is not None:
                known.lease.cancel()
        else:
            known = self.peers[hello.name] = Peer(hello, subject)
        known.subject = subject
        known.stream = stream
        known.pumps = {}
        known.serving = asyncio.current_task()
        return known

    def _expire(self, peer: Peer, reason: str) -> None:
        if peer.lease is not None:
            peer.lease.cancel()
        if self.peers.get(peer.name) is peer:
            del self.peers[peer.name]
        peer.lose(reason)
        self.on_leave(peer, reason)

    async def _resume(self, peer: Peer, stream: Stream) -> None:
        """After a reconnection: tell again what is over, and ask again for what is pending."""
        for message in list(peer.outbox):
            await stream.send(message)
        for request, _ in list(peer.asked.values()):
            await stream.send(link_pb2.Envelope(request=request))
        for sha256, fetch in list(peer.fetches.items()):
            await fetch.idle()
            pull = link_pb2.Pull(sha256=sha256, offset=fetch.assembly.offset)
            await stream.send(link_pb2.Envelope(pull=pull))

    async def _take(self, peer: Peer, stream: Stream, message: link_pb2.Envelope | Piece) -> None:
        if isinstance(message, Piece):
            await self._chunk(peer, message)
            return
        kind = message.WhichOneof("body")
        if kind is not None and kind not in SPOKEN:
            raise AdmissionRefused(
                f"a {link_pb2.Role.Name(peer.role).lower()} may not send {kind!r}"
            )
        if kind == "chunk":
            await self._chunk(peer, message.chunk)
        elif kind == "pull":
            self._published.send(peer, stream, message.pull)
        elif kind == "reply":
            await self._reply(peer, stream, message.reply)
        elif kind == "progress":
            if message.progress.id in peer.asked:
                self.on_progress(peer.name, message.progress)
        elif kind == "renew":
            await stream.send(link_pb2.Envelope(renewed=await self._renew(peer, message.renew)))

    async def _reply(self, peer: Peer, stream: Stream, reply: link_pb2.Reply) -> None:
        if reply.id in peer.unacknowledged:
            return  # after a break it was asked again, just when it replied
        asked = peer.asked.get(reply.id)
        if len(reply.id) > LONGEST_ID:
            raise UpdateError("it answered a request that no server has made")
        if asked is None:
            # Waiting here, so that whoever sends many and reads nothing is not read either.
            late = link_pb2.Receipt(id=reply.id, reason="too late: nobody waits for it")
            peer.outbox.append(link_pb2.Envelope(receipt=late).SerializeToString())
            await stream.send_quietly(peer.outbox[-1])
            return
        request, waiting = asked
        outcome = reply.WhichOneof("outcome")
        if outcome not in ANSWERS[request.WhichOneof("work") or ""] | {"failure"}:
            reason = f"it answered something else than was asked: {outcome!r}"
            reply = link_pb2.Reply(id=reply.id, failure=link_pb2.Failure(reason=reason))
        if not waiting.done():
            peer.unacknowledged.add(reply.id)
            waiting.set_result(reply)

    async def _renew(self, peer: Peer, renew: link_pb2.Renew) -> link_pb2.Renewed:
        try:
            if peer.subject is None:
                raise AdmissionRefused("nobody has certificates here")
            certificate, peer.subject = await self.enrolments.renew(
                peer.subject, renew.signing_request
            )
        except AdmissionRefused as error:
            return link_pb2.Renewed(reason=str(error))
        subject = peer.subject
        log.info("%s has a new certificate until %s", peer.name, time.ctime(subject.not_after))
        enrolment = self.enrolments.enrol(subject.name, subject.identity, subject.not_after)
        return link_pb2.Renewed(certificate=certificate, enrolment=enrolment)

    async def _chunk(self, peer: Peer, chunk: link_pb2.Chunk | Piece) -> None:
        fetch = peer.fetches.get(chunk.sha256)
        if fetch is None or fetch.done.done():
            return
        peer.bytes_in += len(chunk.data)
        if not chunk.absent:
            await fetch.take(chunk)
            return
        fetch.done.set_exception(UpdateError(f"{peer.name} does not hold the content it named"))
