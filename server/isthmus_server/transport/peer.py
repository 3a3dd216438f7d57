"""State that the server keeps for one participant, and the interface that reports changes of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from isthmus.errors import ParticipantLost, TransferStalled, UpdateError
from isthmus.identity.tls import Subject
from isthmus.printable import in_a_line
from isthmus.transport.blobs import Assembly, Piece, Write
from isthmus.transport.shared_memory import Take, has_random_name, opened
from isthmus.transport.stream import Stream, to_the_end
from isthmus.transport.transfer_time import TransferTime
from isthmus.wire import link_pb2
from isthmus_server.transport.limits import Refusal
from isthmus_server.transport.renewal_proofs import RenewalProofs

MAX_OUTBOX = 64
"""Receipts and cancellations kept for one participant: as many as it may have open requests."""
THREAD_CHUNK_BYTES = 512 << 10
"""Size from which a chunk is hashed and written in a thread instead of on the event loop."""
MAX_PAUSE = 200
"""Characters of why a participant does not download."""
MAX_ABANDONED = 16
"""Blobs of one participant of which chunks may still be on their way after their transfer ended."""
CAME = b"from"
"""Prefix of the SHA-256, in `Peer.reached`, of a blob that comes from it to its aggregator."""
LOOKS = 6
"""How often it is looked within a pause whether a transfer moves."""


@dataclasses.dataclass
class Fetch:
    """A blob that is being received from a participant."""

    assembly: Assembly
    done: asyncio.Future[None]
    take: Take | None = None
    """Takes the whole blob as a file instead; None if the last pull did not ask for one."""
    writing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Locked while a chunk is being written."""

    async def add(self, chunk: link_pb2.Chunk | Piece) -> None:
        """Write the next chunk; returns when its memory is not needed any more."""
        if len(chunk.data) < THREAD_CHUNK_BYTES and not self.writing.locked():
            self._write(chunk)  # nothing can interrupt it, so that it needs no task of its own
        else:
            await to_the_end(self._add(chunk))

    async def _add(self, chunk: link_pb2.Chunk | Piece) -> None:
        async with self.writing:
            if len(chunk.data) < THREAD_CHUNK_BYTES:
                self._write(chunk)
                return
            if self.done.done():
                return
            try:
                await asyncio.to_thread(self.assembly.add, chunk)
                self._end_if_complete()
            except (UpdateError, OSError) as error:
                self._fail(error)

    def _write(self, chunk: link_pb2.Chunk | Piece) -> None:
        """Write a small chunk, on the event loop."""
        if self.done.done():
            return
        try:
            self.assembly.add(chunk)
            self._end_if_complete()
        except (UpdateError, OSError) as error:
            self._fail(error)

    def _end_if_complete(self) -> None:
        if self.assembly.complete and not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():  # the participant may have been lost meanwhile
            self.done.set_exception(error)

    async def open(self, file: link_pb2.OpenFile) -> bool:
        """Take the blob from a file of the participant; False if it cannot be opened.

        Raises:
            UpdateError: no file was asked for, so that the transfer has failed.
        """
        take = self.take
        if take is None:
            # It names a process and a descriptor here: one that shares no memory with the server
            # would have it read any file that is open on this machine.
            error = UpdateError("it offered a file that was not asked for")
            self.done.set_exception(error)
            raise error
        self.take = None
        try:
            blob = opened(file, self.assembly.blob.size)
        except OSError:
            return False
        await to_the_end(self._take(take, blob))
        return True

    async def _take(self, take: Take, blob: BinaryIO) -> None:
        async with self.writing:
            if self.done.done():
                blob.close()
                return
            try:
                await asyncio.to_thread(take, blob)
                if not self.done.done():
                    self.done.set_result(None)
            except (UpdateError, OSError) as error:
                self._fail(error)

    async def idle(self) -> None:
        """Return when no chunk is being written."""
        async with self.writing:
            pass


@dataclasses.dataclass
class Storing:
    """A blob that a participant was asked to put into the store."""

    blob: link_pb2.Blob
    done: asyncio.Future[bool]
    sent: int = 0
    """Bytes that it has sent there, as it says."""


@dataclasses.dataclass(frozen=True)
class LastStep:
    """The last training step that a participant reported."""

    request: str = ""
    """Id of the request; empty if it has reported none."""
    steps: int = 0
    at: float = 0.0
    """When it was reported, in monotonic seconds."""

    def followed_by(self, progress: link_pb2.Progress) -> LastStep:
        """The step after a report: another one only if it is of other steps."""
        # Ranks that have restarted do some steps again, so fewer steps are other steps, too.
        if not progress.steps or (self.request, self.steps) == (progress.id, progress.steps):
            return self
        return LastStep(progress.id, progress.steps, time.monotonic())


@dataclasses.dataclass(frozen=True)
class Fetched:
    """How much of the files that a model starts from a participant has, as it says."""

    percent: int
    """0 to 100."""
    pause: str = ""
    """Why it fetches nothing now, in its words on one line; empty while it does."""

    @classmethod
    def of(cls, message: link_pb2.Fetched) -> Fetched:
        """Read a participant's report."""
        done = min(message.bytes, message.of)
        return cls(100 * done // max(1, message.of), in_a_line(message.pause[:MAX_PAUSE]))

    @property
    def sentence(self) -> str:
        """What to tell of it."""
        said = f"downloading the model, {self.percent} %"
        return f"{said} ({self.pause})" if self.pause else said


class MovedBytes:
    """Bytes that have moved in one direction and were not charged to a request yet.

    Those of blobs by the SHA-256 of each; those of messages by the id of their request, or by the
    SHA-256 of the blob that they ask for or carry.
    """

    LATE = b""
    """Key of the chunks that arrived after their transfer had been given up."""
    _KEPT = 64
    """Keys whose bytes are kept; those of requests that nobody waits for are forgotten."""

    def __init__(self) -> None:
        self._of: Counter[bytes] = Counter()
        self.total = 0
        """Bytes of all keys."""

    def add(self, key: bytes, count: int) -> None:
        """Count bytes."""
        self.total += count
        self._of[key] += count
        if len(self._of) > self._KEPT:
            del self._of[next(iter(self._of))]

    def take(self, keys: Iterable[bytes]) -> int:
        """Bytes of these keys since they were taken last."""
        return sum(self._of.pop(key, 0) for key in keys)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where a device has its stream, if that is not at the server itself."""

    aggregator: Peer
    channel: int
    """Number of the stream there."""


class Peer:
    """One process of a participant, across its streams."""

    def __init__(self, hello: link_pb2.Hello, subject: Subject | None = None) -> None:
        self.subject = subject
        """Subject of its certificate; None without TLS."""
        self.name = hello.name
        self.role = hello.role
        self.instance = hello.instance
        self.software = hello.software
        self.stores = hello.stores
        """Whether it answers when it is asked to put a result into the store."""
        self.stream: Stream | None = None
        self.serving: asyncio.Task[None] | None = None
        """The task that serves the stream."""
        self.place: Place | None = None
        """Where its stream is, if that is at an aggregator."""
        self.renewal_proofs: RenewalProofs | None = None
        """What its requests for another certificate have to prove on this stream; None at the
        server itself, where TLS has shown that it holds the key and says this now."""
        self.lease: asyncio.TimerHandle | None = None
        """Expires the participant, while it has no stream."""
        self.is_new = True
        """Whether listeners have not been notified of it yet."""
        self.checks_in_at: float | None = None
        """When it was asked to come back, in Unix seconds; None if it was not asked to go."""
        self.refusal: Refusal | None = None
        """Why its stream is being ended; None while it is admitted."""
        self.pending: dict[str, tuple[link_pb2.Request, asyncio.Future[link_pb2.Reply]]] = {}
        """Requests without a reply, by id."""
        self.note = ("", "")
        """Id of the request of the last progress that it reported, and the note there, if any."""
        self.last_step = LastStep()
        """The last training step that it reported."""
        self.fetched: tuple[str, Fetched] | None = None
        """Id of the request of the last report on a download, and the report."""
        self.unacknowledged: set[str] = set()
        """Requests whose reply has arrived and whose receipt has not been sent yet."""
        self.outbox: deque[bytes] = deque(maxlen=MAX_OUTBOX)
        """Receipts and cancellations, oldest first; sent again on every new stream."""
        self.fetches: dict[bytes, Fetch] = {}
        """Blobs that are being received from it, by SHA-256."""
        self.storing: dict[bytes, Storing] = {}
        """Blobs that it was asked to put into the store, by SHA-256."""
        self.stored_last = (b"", 0)
        """SHA-256 of the last of them, and how many bytes it said to have sent."""
        self.adding: set[bytes] = set()
        """Blobs of it that its aggregator was asked to get and add, by SHA-256."""
        self.abandoned: dict[bytes, int] = {}
        """Bytes that may still arrive of blobs whose transfer was given up, by SHA-256."""
        self.transfers: dict[bytes, asyncio.Task[None]] = {}
        """Blobs that are being sent to it on its present stream, by SHA-256."""
        self.last_blob = b""
        """SHA-256 of the blob that it asked for last and has completely."""
        self.last_sent: tuple[bytes, Stream | None] = (b"", None)
        """SHA-256 of the blob that was sent to it last, perhaps in part, and on which stream."""
        self.offered_file = b""
        """SHA-256 of the blob that it was last offered as a file, until it has read it."""
        self.sent = MovedBytes()
        self.received = MovedBytes()
        self.transfer_time = TransferTime()
        self.reached: dict[bytes, int] = {}
        """Up to which byte each blob was sent to it since its last request, by SHA-256, and up to
        which its own have come to its aggregator; see `CAME`."""
        self.messages_sent = MovedBytes()
        self.messages_received = MovedBytes()

    def send_and_keep(self, message: link_pb2.Envelope) -> None:
        """Send a receipt or cancellation now, and again on every stream that is opened later.

        A message that is sent into a breaking stream, or while there is none, is therefore not
        lost. Participants ignore repetitions.
        """
        data = message.SerializeToString()
        self.outbox.append(data)
        if self.stream is not None:
            body = message.receipt if message.HasField("receipt") else message.cancel
            self.messages_sent.add(body.id.encode(), len(data))
            self.stream.spawn(self.stream.send_quietly(data))

    async def resume(self, stream: Stream) -> None:
        """On a new stream, repeat receipts, cancellations, pending requests and pulls."""
        for message in list(self.outbox):
            await stream.send(message)
        for request, _ in list(self.pending.values()):
            await stream.send(self._counted(request.id.encode(), request=request))
        for sha256, fetch in list(self.fetches.items()):
            await fetch.idle()
            fetch.take = None
            pull = link_pb2.Pull(sha256=sha256, offset=fetch.assembly.offset)
            await stream.send(self._counted(sha256, pull=pull))
        for sha256, storing in list(self.storing.items()):
            store = link_pb2.Store(blob=storing.blob)
            await stream.send(self._counted(sha256, store=store))

    def _counted(self, key: bytes, **body: Any) -> bytes:
        """The message with this body, serialised, whose bytes are charged to the key."""
        data = link_pb2.Envelope(**body).SerializeToString()
        self.messages_sent.add(key, len(data))
        return data

    async def send_request(self, request: link_pb2.Request) -> None:
        """Send a request, if there is a stream; it is sent again on each later one."""
        self.reached.clear()  # of a model that it has not kept
        if self.stream is not None:
            await self.stream.send_quietly(self._counted(request.id.encode(), request=request))

    async def fetch(
        self,
        blob: link_pb2.Blob,
        write: Write,
        take: Take | None,
        machine: str,
        *,
        pause: float = TransferTime.LONGEST_PAUSE,
    ) -> None:
        """Pull a blob, see `Link.fetch`.

        Args:
            blob: what is pulled.
            write: receives its pieces.
            take: receives it as a whole instead, if the pull names a machine.
            machine: the server's; empty if it shares no memory. Only a pull that names it may be
                answered with a file.
            pause: seconds after which a blob of which nothing comes is given up.
        """
        if not machine:
            take = None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.abandoned.pop(blob.sha256, None)
        self.transfer_time.begin(time.monotonic())
        # A participant that the server has started may give what it offers as a file another name
        # than its SHA-256. It comes in chunks if nobody takes it, or it cannot be opened.
        verified = not (machine and has_random_name(blob))
        assembly = Assembly(blob, write, verified=verified)
        fetch = self.fetches[blob.sha256] = Fetch(assembly, done, take)
        try:
            if self.stream is not None:
                pull = link_pb2.Pull(sha256=blob.sha256, machine=machine if fetch.take else "")
                # Not awaited: one that does not read would keep it for ever.
                message = self._counted(blob.sha256, pull=pull)
                self.stream.spawn(self.stream.send_quietly(message))
            with self._given_up_if_still(done, pause):
                await done
        finally:
            self.fetches.pop(blob.sha256, None)
            if not fetch.assembly.complete:
                self._abandon(fetch.assembly)
            await to_the_end(fetch.idle())

    async def store(self, blob: link_pb2.Blob, *, pause: float) -> bool:
        """Have it put a blob into the store.

        Args:
            blob: what it has, with the address and the key for it.
            pause: seconds after which it is given up if it says nothing new of it.

        Returns:
            Whether the blob is there, as it says.

        Raises:
            ParticipantLost: it was lost before.
            TransferStalled: it was given up.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        storing = self.storing[blob.sha256] = Storing(blob, done)
        self.transfer_time.begin(time.monotonic())
        try:
            if self.stream is not None:
                message = self._counted(blob.sha256, store=link_pb2.Store(blob=blob))
                self.stream.spawn(self.stream.send_quietly(message))
            with self._given_up_if_still(done, pause):
                return await done
        finally:
            self.storing.pop(blob.sha256, None)
            self.stored_last = (blob.sha256, storing.sent)

    def add_stored(self, stored: link_pb2.Stored, size: int) -> None:
        """Note how much of a blob it has put into the store; what was not asked for is dropped.

        Args:
            stored: what it says.
            size: bytes of the message.
        """
        storing = self.storing.get(stored.sha256)
        if storing is None or storing.done.done():
            return
        self.messages_received.add(bytes(stored.sha256), size)
        sent = storing.blob.size if stored.complete else min(stored.bytes, storing.blob.size)
        if sent > storing.sent:
            # What moves there takes as long as on the link, and no longer than all of it.
            self.transfer_time.add(sent - storing.sent, time.monotonic())
            storing.sent = sent
        if stored.complete or stored.declined:
            storing.done.set_result(stored.complete)

    @contextlib.contextmanager
    def _given_up_if_still(
        self, done: asyncio.Future[None] | asyncio.Future[bool], pause: float
    ) -> Iterator[None]:
        """Fail a transfer in the block when nothing has come of this participant for a pause.

        Looks are counted and not seconds, so that one of them passes while this process is stopped.
        """
        loop = asyncio.get_running_loop()
        still = 0
        before = self._arrived
        handle: asyncio.TimerHandle

        def look() -> None:
            nonlocal still, before, handle
            if done.done():
                return
            now = self._arrived
            # What is being written has come. Without a stream it goes on: otherwise one that comes
            # and goes would never end.
            is_written = any(each.writing.locked() for each in self.fetches.values())
            still = 0 if is_written or now != before else still + 1
            before = now
            if still >= LOOKS:
                why = f"nothing of its result came for {pause:g} s"
                done.set_exception(TransferStalled(why))
                return
            handle = loop.call_later(pause / LOOKS, look)

        handle = loop.call_later(pause / LOOKS, look)
        try:
            yield
        finally:
            handle.cancel()

    @property
    def _arrived(self) -> int:
        """A number that changes with each new byte of any blob that is being received from it.

        Of any: a slow link has them one after the other.
        """
        stored = sum(each.sent for each in self.storing.values())
        return stored + sum(each.assembly.offset for each in self.fetches.values())

    def _abandon(self, assembly: Assembly) -> None:
        """Expect the rest of a blob that is not wanted any more, until its sender knows that."""
        self.abandoned[assembly.blob.sha256] = assembly.blob.size - assembly.offset
        if len(self.abandoned) > MAX_ABANDONED:
            del self.abandoned[next(iter(self.abandoned))]

    async def add_chunk(self, chunk: link_pb2.Chunk | Piece, size: int) -> None:
        """Add a chunk to the blob that it belongs to; a chunk that was not requested is dropped.

        What was on its way when its transfer was given up is counted all the same, for the next
        call of the participant; what was never requested is not, so that nobody can raise the
        costs of a run by sending.

        Args:
            chunk: the chunk.
            size: bytes of the message with the chunk.
        """
        fetch = self.fetches.get(chunk.sha256)
        if fetch is None:
            expected = min(len(chunk.data), self.abandoned.get(chunk.sha256, 0))
            if expected:
                self.abandoned[chunk.sha256] -= expected
                self.received.add(MovedBytes.LATE, expected)
            return
        if fetch.done.done():
            return
        if isinstance(chunk, link_pb2.Chunk) and chunk.HasField("file"):
            if await fetch.open(chunk.file):
                self.received.add(chunk.sha256, fetch.assembly.blob.size)
            elif self.stream is not None:
                pull = link_pb2.Pull(sha256=chunk.sha256)
                await self.stream.send_quietly(self._counted(chunk.sha256, pull=pull))
            return
        self.received.add(bytes(chunk.sha256), len(chunk.data))
        about, stored = self.stored_last
        known = max(fetch.assembly.offset, stored if about == chunk.sha256 else 0)
        again = min(len(chunk.data), max(0, known - chunk.offset))
        self.transfer_time.add(len(chunk.data), time.monotonic(), again=again)
        self.messages_received.add(bytes(chunk.sha256), size - len(chunk.data))
        if not chunk.absent:
            await fetch.add(chunk)
            return
        fetch.done.set_exception(UpdateError(f"{self.name} does not hold the blob it named"))

    def came_to_aggregator(self, blob: link_pb2.Blob) -> bool:
        """Whether all of a blob of it is at its aggregator, as that says."""
        return self.reached.get(CAME + blob.sha256, 0) >= blob.size

    @property
    def is_moving(self) -> bool:
        """Whether a blob is on its way, as far as the server has asked for it or sends it."""
        return bool(self.transfers or self.fetches or self.storing or self.adding)

    def download_of(self, request_id: str) -> str:
        """What the participant has said last of the files that a request is for."""
        about, fetched = self.fetched or ("", None)
        return (fetched if fetched and about == request_id else Fetched(0)).sentence

    def fail_pending(self, reason: str) -> None:
        """Fail all requests and transfers that wait for this participant."""
        error = ParticipantLost(reason)
        waiting: list[asyncio.Future[Any]] = [future for _, future in self.pending.values()]
        waiting += [fetch.done for fetch in self.fetches.values()]
        waiting += [storing.done for storing in self.storing.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)


class ParticipantListener:
    """Receives changes of a link's participants; override what is needed.

    Methods are called on the event loop and must return quickly.
    """

    def joined(self, peer: Peer) -> None:
        """A new process of a participant was admitted."""

    def left(self, peer: Peer, reason: str) -> None:
        """A participant was lost, or removed."""

    def progressed(self, name: str, progress: link_pb2.Progress) -> None:
        """A participant reported progress of a pending request."""


class ListenerGroup(ParticipantListener):
    """Forwards changes to any number of listeners."""

    def __init__(self) -> None:
        self._listeners: list[ParticipantListener] = []

    def attach(self, listener: ParticipantListener) -> None:
        """Notify a listener of all changes from now on."""
        self._listeners.append(listener)

    def detach(self, listener: ParticipantListener) -> None:
        """Stop notifying a listener; without effect if it is not attached."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def joined(self, peer: Peer) -> None:
        """Notify all listeners; see `ParticipantListener`."""
        for listener in list(self._listeners):
            listener.joined(peer)

    def left(self, peer: Peer, reason: str) -> None:
        """Notify all listeners; see `ParticipantListener`."""
        for listener in list(self._listeners):
            listener.left(peer, reason)

    def progressed(self, name: str, progress: link_pb2.Progress) -> None:
        """Notify all listeners; see `ParticipantListener`."""
        for listener in list(self._listeners):
            listener.progressed(name, progress)
