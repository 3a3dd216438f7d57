"""A link without a network, whose participants are workers in this process.

For simulations: the coordinator and everything above the link run unchanged. A participant is any
`isthmus.transport.worker.Worker`, of a real device or a virtual one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid

from isthmus.errors import IsthmusError, UpdateError
from isthmus.transport.blobs import MAX_CHUNK_BYTES, Buffer, InFile, Write
from isthmus.transport.requests import blob_of, failure, model_of
from isthmus.transport.shared_memory import Take
from isthmus.transport.worker import Worker
from isthmus.wire import link_pb2
from isthmus_server.mirror.stored_updates import ExpectedUpdate
from isthmus_server.transport.enrolment import Enrolments
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import Peer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Result:
    """The result of a request that is not acknowledged yet."""

    name: str
    request: link_pb2.Request
    sha256: bytes
    payload: Buffer | InFile | None


class SimulatedEnrolments(Enrolments):
    """Admits the workers of this process."""

    simulated = True


class InProcessLink(Link):
    """Implements `Link` by function calls.

    Workers are called on the event loop and are trusted like this process: blobs are passed as a
    whole, without a check of their SHA-256.
    """

    def __init__(self, lease_seconds: float = 10.0) -> None:
        super().__init__(lease_seconds, SimulatedEnrolments())
        self._workers: dict[str, Worker] = {}
        self._unacknowledged: dict[str, _Result] = {}
        """Results by request id."""

    def join(self, name: str, role: link_pb2.Role, worker: Worker) -> None:
        """Add a participant."""
        instance = uuid.uuid4().hex
        hello = link_pb2.Hello(name=name, role=role, instance=instance)
        peer = Peer(hello)
        peer.is_new = False
        self.peers[name] = peer
        self._workers[name] = worker
        self.listeners.joined(peer)

    def leave(self, name: str, reason: str) -> None:
        """Remove a participant; its pending requests fail."""
        del self._workers[name]
        self._remove(self.peers[name], reason)

    async def idle(self) -> None:
        """Return when no request is pending, so that every participant that joined has answered."""
        await asyncio.sleep(0)
        while any(peer.pending for peer in self.peers.values()):  # noqa: ASYNC110 - workers run here
            await asyncio.sleep(0)

    async def ask(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        """Pass a request to a worker and return its reply.

        Raises:
            ParticipantLost: it is not connected, or left before it replied.
        """
        peer = self._peer(name)
        future: asyncio.Future[link_pb2.Reply] = asyncio.get_running_loop().create_future()
        peer.pending[request.id] = (request, future)
        work = asyncio.create_task(self._work(name, request))

        def answered(work: asyncio.Task[link_pb2.Reply]) -> None:
            if future.done() or work.cancelled():
                return
            if (error := work.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(work.result())

        # A wait for both takes longer than many a device's work.
        work.add_done_callback(answered)
        try:
            return await future
        except asyncio.CancelledError:
            self._unacknowledged.pop(request.id, None)
            if name in self._workers:
                self._workers[name].cancel(request, "the request was cancelled")
            raise
        finally:
            peer.pending.pop(request.id, None)
            if not future.done():
                future.cancel()
            work.cancel()

    async def _work(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        worker = self._workers[name]
        blob = model_of(request)
        buffer: Buffer | None = None
        try:
            if blob is not None and blob.size:
                broadcast = self._blobs.get(blob.sha256)
                if broadcast is None:
                    raise UpdateError("the server no longer has the model")
                buffer = worker.buffer(request, blob.size)
                if buffer is not None:
                    broadcast.fill(buffer)
                if not request.HasField("secure_step"):  # messages are not counted here
                    peer = self.peers[name]
                    peer.last_blob = blob.sha256
                    peer.sent.add(blob.sha256, blob.size)
            reply, payload = await worker.work(request, buffer, lambda progress: None)
        except IsthmusError as error:
            reply = failure(str(error))
            payload = None
        except Exception as error:  # as of a real participant: the server decides what follows
            # Hundreds of devices may fail in the same way, and the command ends in one sentence.
            log.debug("request %s of %s failed", request.id, name, exc_info=True)
            reply = failure(f"internal error: {type(error).__name__}: {error}")
            payload = None
        reply.id = request.id
        self._unacknowledged[request.id] = _Result(name, request, blob_of(reply).sha256, payload)
        return reply

    async def fetch(
        self,
        name: str,
        blob: link_pb2.Blob,
        write: Write,
        take: Take | None = None,
        stored: ExpectedUpdate | None = None,
    ) -> None:
        """Copy a blob from a worker's result.

        Raises:
            ParticipantLost: it is not connected.
            UpdateError: it does not hold the blob.
        """
        if blob.size == 0:
            return
        peer = self._peer(name)
        results = (
            result.payload
            for result in self._unacknowledged.values()
            if (result.name, result.sha256) == (name, blob.sha256)
        )
        payload = next(results, None)
        if payload is None:
            raise UpdateError(f"{name} does not hold the blob it named")
        peer.received.add(blob.sha256, len(payload))
        if isinstance(payload, InFile):
            for start in range(0, len(payload), MAX_CHUNK_BYTES):
                size = min(MAX_CHUNK_BYTES, len(payload) - start)
                write(start, payload.read(start, size))
        else:
            write(0, memoryview(payload))

    def acknowledge(self, name: str, request_id: str, accepted: bool, reason: str = "") -> None:
        """Notify a worker whether its reply was accepted."""
        result = self._unacknowledged.pop(request_id, None)
        worker = self._workers.get(name)
        if worker is not None and result is not None:
            worker.acknowledged(result.request, accepted, reason)
