"""A link without a network: participants are workers in this process.

For simulations: the coordinator and everything above the link run as they always do, and a
participant is any `isthmus.transport.worker.Worker`, a device's real one or a virtual one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid

from isthmus.errors import IsthmusError, UpdateError
from isthmus.transport.blobs import Buffer, Write
from isthmus.transport.requests import blob_of, model_of
from isthmus.transport.worker import Worker
from isthmus.wire import link_pb2
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import Peer


@dataclasses.dataclass(frozen=True)
class _Done:
    """A request whose result is not acknowledged yet."""

    name: str
    request: link_pb2.Request
    sha256: bytes
    payload: Buffer | None


class InProcessLink(Link):
    """The promises of `Link`, kept by function calls.

    Workers are called on the event loop and are trusted as this process is: contents are handed
    over whole, and not checked against their names.
    """

    def __init__(self, lease_seconds: float = 10.0) -> None:
        super().__init__(lease_seconds)
        self._workers: dict[str, Worker] = {}
        self._done: dict[str, _Done] = {}
        """By the request's id."""

    def join(self, name: str, role: link_pb2.Role, worker: Worker) -> None:
        """A participant dials in."""
        instance = uuid.uuid4().hex
        hello = link_pb2.Hello(name=name, role=role, instance=instance)
        peer = Peer(hello)
        peer.fresh = False
        self.peers[name] = peer
        self._workers[name] = worker
        self.on_join(peer)

    def leave(self, name: str, reason: str) -> None:
        """A participant goes away; what it was asked for fails."""
        del self._workers[name]
        self._expire(self.peers[name], reason)

    async def idle(self) -> None:
        """Return when nobody is being asked for anything: whoever joined has been heard."""
        await asyncio.sleep(0)
        while any(peer.asked for peer in self.peers.values()):  # noqa: ASYNC110 - workers run here
            await asyncio.sleep(0)

    async def ask(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        """Have a worker do a request.

        Raises:
            ParticipantLost: it is not here, or went away before it replied.
        """
        peer = self._peer(name)
        future: asyncio.Future[link_pb2.Reply] = asyncio.get_running_loop().create_future()
        peer.asked[request.id] = (request, future)
        work = asyncio.create_task(self._work(name, request))
        try:
            await asyncio.wait((work, future), return_when=asyncio.FIRST_COMPLETED)
            return future.result() if future.done() else work.result()
        except asyncio.CancelledError:
            self._done.pop(request.id, None)
            if name in self._workers:
                self._workers[name].cancel(request, "nobody waits for it")
            raise
        finally:
            peer.asked.pop(request.id, None)
            if not future.done():
                future.cancel()
            work.cancel()

    async def _work(self, name: str, request: link_pb2.Request) -> link_pb2.Reply:
        worker = self._workers[name]
        blob = model_of(request)
        buffer: Buffer | None = None
        try:
            if blob is not None and blob.size:
                published = self._published.get(blob.sha256)
                if published is None:
                    raise UpdateError("the server does not hold the model any more")
                buffer = worker.buffer(request, blob.size)
                if buffer is not None:
                    published.fill(buffer)
            reply, payload = await worker.work(request, buffer, lambda progress: None)
        except IsthmusError as error:
            reply, payload = link_pb2.Reply(failure=link_pb2.Failure(reason=str(error))), None
        reply.id = request.id
        self._done[request.id] = _Done(name, request, blob_of(reply).sha256, payload)
        return reply

    async def fetch(self, name: str, blob: link_pb2.Blob, write: Write) -> None:
        """Take what a worker handed back.

        Raises:
            ParticipantLost: it went away.
            UpdateError: it does not hold the content.
        """
        if blob.size == 0:
            return
        peer = self._peer(name)
        whose = (name, blob.sha256)
        held = (done.payload for done in self._done.values() if (done.name, done.sha256) == whose)
        payload = next(held, None)
        if payload is None:
            raise UpdateError(f"{name} does not hold the content it named")
        peer.bytes_in += len(payload)
        write(0, memoryview(payload))

    def acknowledge(self, name: str, request_id: str, accepted: bool, reason: str = "") -> None:
        """Tell a worker what became of its reply."""
        done = self._done.pop(request_id, None)
        worker = self._workers.get(name)
        if worker is not None and done is not None:
            worker.acknowledged(done.request, accepted, reason)
