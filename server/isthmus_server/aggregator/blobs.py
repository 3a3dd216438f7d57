"""What devices pull at an aggregator: got once from the server, and kept in files.

A request that passes says which blobs a device may pull, and how large they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO

from isthmus.errors import UpdateError
from isthmus.transport.blobs import Assembly, InFile, Piece
from isthmus.transport.requests import blobs_of
from isthmus.transport.stream import Stream
from isthmus.wire import link_pb2
from isthmus_server.transport.blob_store import BlobStore
from isthmus_server.transport.peer import Peer

KEPT = 16
"""Most blobs that are kept after nobody pulls them any more: some jobs' models, and their
changes."""
_NAMED = 4096
"""Blobs whose size is known."""
_FIRST_PIECE = 256 << 10
_PIECE = 16 << 20
"""Least and most bytes that are asked for at a time."""
_PIECE_SECONDS = 3.0
"""Time for a piece, and until it is said again how much is here."""
_AT_ONCE = 2
"""Blobs that are got at the same time, besides files that models start from."""
_FILES_AT_ONCE = 1
"""Such files that are got at the same time. Each may take hours, and rounds go on meanwhile."""

GetPiece = Callable[[bytes, int, int], Awaitable[bytearray]]
"""Gets a piece of a blob from the server: SHA-256, offset and length."""

Arrived = Callable[[bytes, int], Awaitable[None]]
"""Is told at times how much of a blob is here: its SHA-256, and the bytes."""

log = logging.getLogger(__name__)


class KeptBlobs:
    """Blobs for the devices of an aggregator.

    Guarantees:
      * each is got from the server once, however many devices pull it at the same time;
      * files that models start from, which may take hours, keep no model of a round waiting;
      * nothing is sent that does not match its SHA-256;
      * of blobs that nobody pulls now, at most `KEPT` take space, and no more than they leave free.
    """

    def __init__(self, directory: Path, piece: GetPiece, arrived: Arrived) -> None:
        """Files are in `directory`, without names; `piece` asks the server."""
        self._directory = directory
        self._piece = piece
        self._arrived = arrived
        self._store = BlobStore()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._of_starts: set[bytes] = set()
        """SHA-256 of those that are files from which models start."""
        self._files: OrderedDict[bytes, IO[bytes]] = OrderedDict()
        self._users: dict[bytes, int] = {}
        self._getting: dict[bytes, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._room_for_files = asyncio.Semaphore(_FILES_AT_ONCE)

    def note(self, request: link_pb2.Request) -> None:
        """Note which blobs a request names."""
        is_start = request.HasField("prepare")
        for blob in blobs_of(request):
            if blob.size:
                self._sizes[blob.sha256] = blob.size
                self._sizes.move_to_end(blob.sha256)
                if is_start:
                    self._of_starts.add(blob.sha256)
                else:
                    self._of_starts.discard(blob.sha256)
        while len(self._sizes) > _NAMED:
            forgotten, _ = self._sizes.popitem(last=False)
            self._of_starts.discard(forgotten)

    def has_all(self, pull: link_pb2.Pull) -> bool:
        """Whether a device that sends this has the whole blob already."""
        return 0 < self._sizes.get(pull.sha256, 0) <= pull.offset

    async def send(self, peer: Peer, stream: Stream, pull: link_pb2.Pull) -> None:
        """Send a device what it pulls, or that it is not to be had.

        Raises:
            OSError: there is no room for it here.
        """
        sha256 = pull.sha256
        self._users[sha256] = self._users.get(sha256, 0) + 1
        try:
            await self._get(sha256)
            self._store.send(peer, stream, pull)
            if (transfer := peer.transfers.get(sha256)) is not None:
                await asyncio.wait((transfer,))
        finally:
            self._users[sha256] -= 1
            if not self._users[sha256]:
                del self._users[sha256]
            self._make_room()

    def close(self) -> None:
        """Forget all."""
        for task in self._getting.values():
            task.cancel()
        for file in self._files.values():
            file.close()
        self._files.clear()

    async def _get(self, sha256: bytes) -> None:
        if sha256 in self._files:
            self._files.move_to_end(sha256)
            return
        task = self._getting.get(sha256)
        if task is None:
            task = self._getting[sha256] = asyncio.create_task(self._download(sha256))
            task.add_done_callback(lambda _: self._getting.pop(sha256, None))
        # One device that leaves does not end it for the others.
        with contextlib.suppress(UpdateError, ConnectionError):
            await asyncio.shield(task)

    async def _download(self, sha256: bytes) -> None:
        """Get a blob from the server.

        Raises:
            UpdateError: the server does not have it.
            ConnectionError: the link broke.
            OSError: the disk is full.
        """
        size = self._sizes.get(sha256)
        if size is None:
            raise UpdateError("no request has named it")
        async with self._room_for_files if sha256 in self._of_starts else self._room:
            self._make_room(size)
            file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - kept
            try:
                blob = link_pb2.Blob(sha256=sha256, size=size)
                assembly = Assembly(blob, lambda _, data: file.write(data))
                most = _FIRST_PIECE
                told = time.monotonic()
                while assembly.offset < size:
                    begun = time.monotonic()
                    length = min(most, size - assembly.offset)
                    data = await self._piece(sha256, assembly.offset, length)
                    piece = Piece(sha256, assembly.offset, memoryview(data))
                    await asyncio.to_thread(assembly.add, piece)
                    now = time.monotonic()
                    is_fast = now - begun < _PIECE_SECONDS
                    most = min(_PIECE, 2 * most) if is_fast else max(_FIRST_PIECE, most // 2)
                    if now - told >= _PIECE_SECONDS:
                        told = now
                        await self._arrived(sha256, assembly.offset)
                file.flush()
            except BaseException as error:
                file.close()
                log.info("a blob of the server was not got: %s", error)
                raise
        self._files[sha256] = file
        self._store.publish(link_pb2.Blob(sha256=sha256, size=size), InFile(file, size))

    def _make_room(self, coming: int = 0) -> None:
        """Forget some of what nobody pulls now; `coming` are the bytes of what is about to come."""
        idle = [sha256 for sha256 in self._files if sha256 not in self._users]
        kept = sum(self._sizes.get(sha256, 0) for sha256 in idle)
        for count, sha256 in zip(range(len(idle), 0, -1), idle, strict=True):
            if count <= KEPT and kept + coming <= shutil.disk_usage(self._directory).free:
                return
            kept -= self._sizes.get(sha256, 0)
            self._store.retract(link_pb2.Blob(sha256=sha256))
            self._files.pop(sha256).close()
