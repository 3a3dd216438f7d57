"""The server's end of the link: who is here, asking them for work, moving contents both ways.

Every participant dials in and holds one stream open. A participant outlives its stream: when the
stream breaks, what it was asked for stays pending until it is back or its lease is over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from isthmus.contents import Assembly, Buffer, Write, chunks
from isthmus.errors import ParticipantLost, UpdateError, UserError
from isthmus.stream import Stream
from isthmus.uplink import CHANNEL_OPTIONS, OLDEST_VERSION, VERSION
from isthmus.wire import link_pb2
from isthmus_server.enrolment import Enrolments

log = logging.getLogger(__name__)

CLIENT = link_pb2.CLIENT
DATACENTER = link_pb2.DATACENTER


@dataclasses.dataclass
class _Fetch:
    """A content on its way in from one participant."""

    assembly: Assembly
    done: asyncio.Future[None]


class Peer:
    """One participant, as long as its process lives, across its streams."""

    def __init__(self, hello: link_pb2.Hello) -> None:
        self.name = hello.name
        self.role = hello.role
        self.instance = hello.instance
        self.version = min(hello.version_max, VERSION)
        """Of the link, as both sides speak it."""
        self.stream: Stream | None = None
        self.asked: dict[str, tuple[link_pb2.Request, asyncio.Future[link_pb2.Reply]]] = {}
        self.unsettled: set[str] = set()
        """Requests whose reply is in use."""
        self.fetches: dict[bytes, _Fetch] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.lease: asyncio.TimerHandle | None = None
        self.fresh = True

    def lose(self, reason: str) -> None:
        """Everything that was pending with this participant fails."""
        error = ParticipantLost(reason)
        waiting: list[asyncio.Future[link_pb2.Reply] | asyncio.Future[None]] = [
            future for _, future in self.asked.values()
        ]
        waiting += [fetch.done for fetch in self.fetches.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)


class Link:
    """Everybody who dialled in.

    Guarantees:
      * `ask` and `fetch` end: with a result, or with `ParticipantLost` one lease after the stream
        broke; a stream on which nothing is heard for a lease counts as broken;
      * a reply to a request that nobody waits for any more is refused, never used;
      * nothing is read from the network beyond `contents.MAX_MESSAGE_BYTES` at a time.
    """

    def __init__(self, lease_seconds: float, enrolment: Enrolments | None = None) -> None:
        """`lease_seconds`: silence after which a participant counts as gone."""
        self.lease_seconds = lease_seconds
        self.enrolments = enrolment or Enrolments()
        self.peers: dict[str, Peer] = {}
        self.on_join: Callable[[Peer], None] = lambda peer: None
        self.on_leave: Callable[[Peer, str], None] = lambda peer, reason: None
        self.on_progress: Callable[[str, link_pb2.Progress], None] = lambda name, progress: None
        self._published: dict[bytes, Buffer] = {}
        self._ids = itertools.count(1)
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port.

        Raises:
            UserError: not a loopback address (the link is not encrypted yet), or a port in use.
        """
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise UserError(
                f"address={host!r} is not loopback, and the link is not encrypted; use 127.0.0.1"
            )
        self._server = grpc.aio.server(
            options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)), maximum_concurrent_rpcs=20_000
        )
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("isthmus.link.v1.Link", {"Connect": handler}),)
        )
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise UserError(
                f"cannot listen on {host}:{port}; is the port in use? Give another, or 0 for any"
            ) from None
        await self._server.start()
        return int(bound)

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
        """A request id that is not in use."""
        return f"r{next(self._ids)}"

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
            if request.id in peer.unsettled:
                self.settle(name, request.id, False, "too late: nobody waits for it")
            else:
                self._tell(peer, link_pb2.Envelope(cancel=link_pb2.Cancel(id=request.id)))
            raise
        finally:
            peer.asked.pop(request.id, None)

    async def fetch(self, name: str, content: link_pb2.Content, write: Write) -> None:
        """Pull a content from a participant, piece by piece, into `write`.

        Raises:
            ParticipantLost: it went away before everything was here.
            UpdateError: it does not hold the content, or what came is not what was named.
        """
        if content.size == 0:
            return
        peer = self._peer(name)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        peer.fetches[content.sha256] = _Fetch(Assembly(content, write), done)
        try:
            if peer.stream is not None:
                want = link_pb2.Want(sha256=content.sha256)
                await peer.stream.send_quietly(link_pb2.Envelope(want=want))
            await done
        finally:
            peer.fetches.pop(content.sha256, None)

    def settle(self, name: str, request_id: str, accepted: bool, reason: str = "") -> None:
        """Tell a participant what became of its reply, so that it can let go of its content."""
        peer = self.peers.get(name)
        if peer is not None:
            peer.unsettled.discard(request_id)
            receipt = link_pb2.Receipt(id=request_id, accepted=accepted, reason=reason)
            self._tell(peer, link_pb2.Envelope(receipt=receipt))

    def publish(self, content: link_pb2.Content, payload: Buffer) -> None:
        """Serve a content to whoever wants it, straight from `payload`, until `retract`."""
        self._published[content.sha256] = payload

    def retract(self, content: link_pb2.Content) -> None:
        """Stop serving a content; its memory is the caller's again."""
        self._published.pop(content.sha256, None)

    def _peer(self, name: str) -> Peer:
        peer = self.peers.get(name)
        if peer is None:
            raise ParticipantLost(f"{name} is not connected")
        return peer

    def _tell(self, peer: Peer, message: link_pb2.Envelope) -> None:
        if peer.stream is not None:
            peer.stream.spawn(peer.stream.send_quietly(message))

    # -- one stream --------------------------------------------------------------------------------

    async def _connect(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        stream = Stream(context)
        peer: Peer | None = None
        try:
            hello = await stream.receive(timeout=30.0)
            version, refusal = _greet(hello)
            if hello is None or refusal:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
            assert hello is not None
            peer = await self._enter(hello.hello, stream, context)
            welcome = link_pb2.Welcome(
                version=version,
                lease_seconds=self.lease_seconds,
                authority=self.enrolments.authority,
                enrolment=self.enrolments.enrol(peer.name, hello.hello.identity),
            )
            await stream.send(link_pb2.Envelope(welcome=welcome))
            stream.beat(self.lease_seconds / 3)
            if peer.fresh:
                peer.fresh = False
                self.on_join(peer)
            else:
                await self._resume(peer, stream)
            while (message := await stream.receive(timeout=self.lease_seconds)) is not None:
                await self._take(peer, stream, message)
        except UpdateError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            log.info("%s: nothing heard for a lease", peer.name if peer else "a caller")
        finally:
            stream.close()
            if peer is not None and peer.stream is stream:
                peer.stream = None
                loop = asyncio.get_running_loop()
                peer.lease = loop.call_later(
                    self.lease_seconds,
                    self._expire,
                    peer,
                    f"lost: silent for longer than the lease of {self.lease_seconds:g} s",
                )

    async def _enter(
        self, hello: link_pb2.Hello, stream: Stream, context: grpc.aio.ServicerContext
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
            if known.stream is not None:
                known.stream.close()
            if known.lease is not None:
                known.lease.cancel()
            known.stream = stream
            return known
        peer = self.peers[hello.name] = Peer(hello)
        peer.stream = stream
        return peer

    def _expire(self, peer: Peer, reason: str) -> None:
        if peer.lease is not None:
            peer.lease.cancel()
        if self.peers.get(peer.name) is peer:
            del self.peers[peer.name]
        peer.lose(reason)
        self.on_leave(peer, reason)

    async def _resume(self, peer: Peer, stream: Stream) -> None:
        """After a reconnection: ask again for what is still pending."""
        for request, _ in list(peer.asked.values()):
            await stream.send(link_pb2.Envelope(request=request))
        for sha256, fetch in list(peer.fetches.items()):
            want = link_pb2.Want(sha256=sha256, offset=fetch.assembly.offset)
            await stream.send(link_pb2.Envelope(want=want))

    async def _take(self, peer: Peer, stream: Stream, message: link_pb2.Envelope) -> None:
        kind = message.WhichOneof("body")
        if kind == "chunk":
            self._chunk(peer, message.chunk)
        elif kind == "want":
            stream.spawn(self._pump(peer, stream, message.want))
        elif kind == "reply":
            asked = peer.asked.get(message.reply.id)
            if message.reply.id in peer.unsettled:
                return  # after a break it was asked again, just when it replied
            if asked is None:
                self.settle(peer.name, message.reply.id, False, "too late: nobody waits for it")
            elif not asked[1].done():
                peer.unsettled.add(message.reply.id)
                asked[1].set_result(message.reply)
        elif kind == "progress":
            self.on_progress(peer.name, message.progress)

    def _chunk(self, peer: Peer, chunk: link_pb2.Chunk) -> None:
        fetch = peer.fetches.get(chunk.sha256)
        if fetch is None or fetch.done.done():
            return
        peer.bytes_in += len(chunk.data)
        try:
            if chunk.absent:
                raise UpdateError(f"{peer.name} does not hold the content it named")
            fetch.assembly.add(chunk)
            if fetch.assembly.complete:
                fetch.done.set_result(None)
        except (UpdateError, OSError) as error:
            fetch.done.set_exception(error)

    async def _pump(self, peer: Peer, stream: Stream, want: link_pb2.Want) -> None:
        payload = self._published.get(want.sha256)
        if payload is None:
            absent = link_pb2.Chunk(sha256=want.sha256, offset=want.offset, absent=True)
            await stream.send(link_pb2.Envelope(chunk=absent))
            return
        for message in chunks(want.sha256, payload, offset=want.offset):
            if self._published.get(want.sha256) is not payload:
                return  # retracted: the memory may already hold another model
            await stream.send(message)
            peer.bytes_out += len(message)


def _greet(first: link_pb2.Envelope | None) -> tuple[int, str]:
    """The version to speak, or why there is none."""
    if first is None or first.WhichOneof("body") != "hello":
        return 0, "the first message must be a hello"
    hello = first.hello
    if not hello.name or len(hello.name) > 128 or not hello.instance:
        return 0, "a hello needs a name of 1 to 128 characters and an instance"
    if hello.role not in (CLIENT, DATACENTER):
        return 0, f"role={hello.role} is not one this server knows"
    version = min(hello.version_max, VERSION)
    if version < max(hello.version_min, OLDEST_VERSION):
        return 0, (
            f"link version {hello.version_min} to {hello.version_max} is spoken there and "
            f"{OLDEST_VERSION} to {VERSION} here; upgrade the older side"
        )
    return version, ""
