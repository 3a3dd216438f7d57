"""Send blobs to participants, each from the offset at which the participant needs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Broadcast, Buffer, InFile
from isthmus.transport.shared_memory import answer
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2
from isthmus_server.mirror.mirrored_blobs import MirroredBlobs
from isthmus_server.transport.limits import MAX_TRANSFERS_PER_PARTICIPANT
from isthmus_server.transport.peer import Peer

log = logging.getLogger(__name__)


class BlobStore:
    """Blobs that participants can pull now, by SHA-256.

    Guarantees:
      * a blob is sent directly from its memory or file, and never after it was retracted; a
        participant that lacks the rest of it is notified;
      * no participant has more than `MAX_TRANSFERS_PER_PARTICIPANT` transfers at the same time.
    """

    def __init__(self, shared: BlobStore | None = None, machine: str = "") -> None:
        """Offer nothing yet; with `shared`, participants pull from both, and each retracts its own.

        Participants of the same `machine` (see `isthmus.transport.shared_memory`) get a file.
        """
        self._machine: str = machine if shared is None else shared._machine
        self._broadcasts: dict[bytes, list[Broadcast]] = (
            {} if shared is None else shared._broadcasts  # an empty store is false
        )
        self._own: dict[bytes, Broadcast] = {}
        self.mirror: MirroredBlobs | None = None if shared is None else shared.mirror
        """Where devices may fetch blobs besides, if anywhere."""

    def __len__(self) -> int:
        return len(self._broadcasts)

    def get(self, sha256: bytes) -> Broadcast | None:
        """Return a published blob; None if there is none."""
        offered = self._broadcasts.get(sha256)
        return offered[-1] if offered else None

    def publish(
        self, blob: link_pb2.Blob, payload: bytes | Buffer | InFile, *, together: bool = True
    ) -> None:
        """Offer a blob until `retract`; `together` if many may pull it at the same time."""
        self.retract(blob)
        broadcast = self._own[blob.sha256] = Broadcast(blob.sha256, payload, together=together)
        self._broadcasts.setdefault(blob.sha256, []).append(broadcast)

    def retract(self, blob: link_pb2.Blob) -> None:
        """Stop offering a blob; its memory belongs to the caller again."""
        if (broadcast := self._own.pop(blob.sha256, None)) is None:
            return
        offered = self._broadcasts[blob.sha256]
        offered.remove(broadcast)
        if not offered:
            del self._broadcasts[blob.sha256]
        if self.mirror is not None:
            self.mirror.withdraw(broadcast, is_last=not offered)

    def send(self, peer: Peer, stream: Stream, pull: link_pb2.Pull) -> None:
        """Start to send a blob; a transfer of the same blob is restarted at the new offset.

        Raises:
            UpdateError: too many transfers are in progress.
        """
        if self.mirror is not None and (broadcast := self.get(pull.sha256)) is not None:
            # A participant that has all of it says so by a pull of nothing.
            is_whole = pull.offset >= len(broadcast.payload)
            self.mirror.use.pulled(peer.name, bytes(pull.sha256), is_whole=is_whole)
        previous = peer.transfers.pop(pull.sha256, None)
        if previous is not None:
            previous.cancel()
        if len(peer.transfers) >= MAX_TRANSFERS_PER_PARTICIPANT:
            raise UpdateError(
                f"more than {MAX_TRANSFERS_PER_PARTICIPANT} transfers were requested at a time"
            )
        transfer = peer.transfers[pull.sha256] = stream.spawn(self._transfer(peer, stream, pull))
        transfers = peer.transfers

        def remove(task: asyncio.Task[None]) -> None:
            if transfers.get(pull.sha256) is task:
                del transfers[pull.sha256]

        transfer.add_done_callback(remove)

    async def _transfer(self, peer: Peer, stream: Stream, pull: link_pb2.Pull) -> None:
        broadcast = self.get(pull.sha256)
        offered = peer.offered_file
        peer.last_blob = peer.offered_file = b""
        file = None if broadcast is None else answer(pull, broadcast.payload, self._machine)
        if broadcast is not None and file is not None:
            # It asks again when it has read the file; one that cannot read it asks for the bytes.
            if offered == pull.sha256:
                peer.sent.add(pull.sha256, len(broadcast.payload))
            else:
                peer.offered_file = pull.sha256
            peer.last_blob = pull.sha256
            peer.messages_sent.add(pull.sha256, file.ByteSize())
            await stream.send(file)
            return
        moved = peer.transfer_time
        moved.begin(time.monotonic())
        messages: Iterable[tuple[bytes, int]] = ()
        if broadcast is not None:
            blob, on = peer.last_sent
            peer.last_sent = pull.sha256, stream
            again = blob == pull.sha256 and on is not stream
            chunk_bytes = moved.chunk_bytes(broadcast.chunk_bytes, again=again)
            messages = broadcast.messages(pull.offset, chunk_bytes, pull.length)
        end = pull.offset
        try:
            # None for a participant that has the whole blob already, and only says so.
            for message, size in messages:
                if broadcast not in self._broadcasts.get(pull.sha256, ()):
                    broadcast = None  # retracted: the memory may already hold another model
                    break
                # Before it is sent: the reply may be here before this task goes on.
                peer.sent.add(pull.sha256, size)
                peer.messages_sent.add(pull.sha256, len(message) - size)
                await stream.send(message)
                end += size
                reached = peer.reached.get(pull.sha256, 0)
                moved.add(size, time.monotonic(), again=min(size, max(0, size + reached - end)))
                peer.reached[pull.sha256] = max(reached, end)
        except OSError:
            log.exception("a blob cannot be sent to %s", peer.name)
            broadcast = None
        if broadcast is not None:
            peer.last_blob = pull.sha256
            return
        absent = link_pb2.Chunk(sha256=pull.sha256, offset=pull.offset, absent=True)
        await stream.send(link_pb2.Envelope(chunk=absent))
