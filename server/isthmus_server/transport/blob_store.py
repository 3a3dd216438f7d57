"""Contents that the server sends to whoever wants them, each from where it is wanted."""

from __future__ import annotations

import asyncio
import logging

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Broadcast, Buffer, InFile
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2
from isthmus_server.transport.limits import PUMPS_EACH
from isthmus_server.transport.peer import Peer

log = logging.getLogger(__name__)


class Published:
    """What is served now, by digest.

    Guarantees:
      * a content is sent straight from its memory or file, and not any more once it is retracted:
        who lacks some of it is told;
      * no participant has more than `PUMPS_EACH` on their way to it.
    """

    def __init__(self) -> None:
        self._broadcasts: dict[bytes, Broadcast] = {}

    def __len__(self) -> int:
        return len(self._broadcasts)

    def get(self, sha256: bytes) -> Broadcast | None:
        """A content, while it is served."""
        return self._broadcasts.get(sha256)

    def publish(self, blob: link_pb2.Blob, payload: Buffer | InFile) -> None:
        """Serve a content until `retract`."""
        self._broadcasts[blob.sha256] = Broadcast(blob.sha256, payload)

    def retract(self, blob: link_pb2.Blob) -> None:
        """Stop serving a content; its memory is the caller's again."""
        self._broadcasts.pop(blob.sha256, None)

    def send(self, peer: Peer, stream: Stream, pull: link_pb2.Pull) -> None:
        """Begin to send a content; one that is on its way starts anew from where it is wanted.

        Raises:
            UpdateError: too many are on their way.
        """
        before = peer.pumps.pop(pull.sha256, None)
        if before is not None:
            before.cancel()
        if len(peer.pumps) >= PUMPS_EACH:
            raise UpdateError(f"more than {PUMPS_EACH} transfers were asked for at a time")
        pump = peer.pumps[pull.sha256] = stream.spawn(self._pump(peer, stream, pull))
        running = peer.pumps

        def ended(task: asyncio.Task[None]) -> None:
            if running.get(pull.sha256) is task:
                del running[pull.sha256]

        pump.add_done_callback(ended)

    async def _pump(self, peer: Peer, stream: Stream, pull: link_pb2.Pull) -> None:
        broadcast, peer.given = self._broadcasts.get(pull.sha256), b""
        try:
            for message in () if broadcast is None else broadcast.messages(pull.offset):
                if self._broadcasts.get(pull.sha256) is not broadcast:
                    broadcast = None  # retracted: the memory may already hold another model
                    break
                await stream.send(message)
                peer.bytes_out += len(message)
        except OSError:
            log.exception("a content cannot be sent to %s", peer.name)
            broadcast = None
        if broadcast is not None:
            peer.given = pull.sha256
            return
        absent = link_pb2.Chunk(sha256=pull.sha256, offset=pull.offset, absent=True)
        await stream.send(link_pb2.Envelope(chunk=absent))
