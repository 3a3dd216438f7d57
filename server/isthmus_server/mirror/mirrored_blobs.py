"""Which blobs are at the mirror: put there when a device is asked for work that needs them.

A blob is there encrypted with a key of its own, which is in requests and in the memory of those who
send and receive them, and nowhere else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import IO, cast

from isthmus.printable import in_a_line
from isthmus.transport.blobs import Broadcast
from isthmus.transport.encrypted_blobs import (
    KEY_BYTES,
    BlobReading,
    BlobWithdrawn,
    EncryptedBlob,
)
from isthmus.transport.own_threads import in_own_thread
from isthmus.transport.requests import blobs_of
from isthmus.wire import link_pb2
from isthmus_server.mirror.claimed_place import ClaimedPlace, signed
from isthmus_server.mirror.mirror_use import MirrorUse
from isthmus_server.mirror.place import MirrorPlace

LEAST_BYTES = 64 << 10
"""Smaller blobs are not put there: a connection to the mirror would cost more than they do."""
REST_SECONDS = 600.0
"""After the mirror could not be written to, nothing is put there for so long."""
_KINDS = ("open", "train_local", "score", "evaluate")
"""Requests whose blobs are for many devices. Those of apps are for one each."""
_PUT_SECONDS = 30.0
"""Longest time that requests wait for a blob to be there."""
_KEPT_SECONDS = 60.0
"""The model of a round is often evaluated, and sent again for the next one, a moment later."""
_SIGNED_AGAIN_SECONDS = 3600.0
"""An address is told for so long, which is much shorter than it is valid."""
_AT_ONCE = 2
"""Blobs that are put there at the same time."""

log = logging.getLogger(__name__)


class MirroredBlobs:
    """The blobs of a server's link at its mirror.

    Guarantees:
      * a request names an address only while the whole blob is there;
      * what the link offers is read only until `withdraw` returns;
      * a blob is removed a minute after the link has offered it last, and all are when the server
        ends or, after a crash, begins again;
      * a mirror that fails, or is slow, delays requests once by at most half a minute, and one that
        does not sign addresses by another; it is then left alone for ten minutes, and participants
        pull on the link.
    """

    def __init__(
        self,
        place: MirrorPlace,
        *,
        kept_seconds: float = _KEPT_SECONDS,
        put_seconds: float = _PUT_SECONDS,
    ) -> None:
        """Prepare; `running` begins.

        Args:
            place: where blobs are put.
            kept_seconds: from when the link does not offer a blob any more to its removal.
            put_seconds: longest time that requests wait for a blob to be there, and for its
                address.
        """
        self._place = place
        self._own = ClaimedPlace(place, "the mirror")
        self._kept_seconds = kept_seconds
        self._put_seconds = put_seconds
        self._copies: dict[bytes, _Copy] = {}
        self._rests_until = 0.0
        self._unsigned_until = 0.0
        """Until then no address is asked for."""
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.use = MirrorUse()
        """Where devices get what is there."""

    @asynccontextmanager
    async def running(self, owner: str) -> AsyncIterator[None]:
        """Have the mirror during the block; `owner` is the fingerprint of this server.

        Raises:
            UserError: the mirror is another server's, or cannot be used.
        """
        async with self._own.claimed(owner):
            try:
                yield
            finally:
                self.use.end()
                for sha256 in list(self._copies):
                    self._forget(sha256)

    async def add_addresses(
        self, device: str, request: link_pb2.Request, offered: Callable[[bytes], Broadcast | None]
    ) -> None:
        """Put what a device needs for a request at the mirror, and name the addresses in it.

        Args:
            device: the name of who is asked.
            request: to it.
            offered: what the link offers, by SHA-256.
        """
        # Not the empty ones of messages that are unset, which a change would set.
        blobs = [blob for blob in blobs_of(request) if blob.size]
        for blob in blobs:  # of an earlier time that it was sent
            blob.ClearField("address")
            blob.ClearField("key")
        if request.WhichOneof("work") not in _KINDS:
            return
        copies = [(blob, copy) for blob in blobs if (copy := self._copy_of(blob, offered))]
        waiting = {copy.put for _, copy in copies if not copy.put.done()}
        if waiting and time.monotonic() >= self._rests_until:
            _, late = await asyncio.wait(waiting, timeout=self._put_seconds)
            if late:
                self._give_up(f"a blob was not there after {self._put_seconds:g} s")
        for blob, copy in copies:
            if copy.is_there and (address := await self._address_of(copy)):
                blob.address = address
                blob.key = copy.key
                self.use.told(device, request, blob)

    def withdraw(self, broadcast: Broadcast, *, is_last: bool) -> None:
        """Read nothing more of what the link has offered; `is_last`: it has it no other way."""
        for sha256, copy in list(self._copies.items()):
            if copy.broadcast is broadcast:
                copy.reading.end()
                copy.broadcast = None
            if is_last and sha256 == broadcast.sha256 and copy.removal is None:
                loop = asyncio.get_running_loop()
                copy.removal = loop.call_later(self._kept_seconds, self._forget, sha256)

    def _copy_of(
        self, blob: link_pb2.Blob, offered: Callable[[bytes], Broadcast | None]
    ) -> _Copy | None:
        """The copy of a blob that is at the mirror or on its way; None if there is to be none."""
        broadcast = offered(blob.sha256)
        if broadcast is None or len(broadcast.payload) < LEAST_BYTES:
            return None
        copy = self._copies.get(blob.sha256)
        if copy is not None and copy.put.done() and not copy.is_there:
            self._forget(blob.sha256)
            copy = None
        if copy is None:
            if time.monotonic() < self._rests_until:
                return None
            copy = self._copies[blob.sha256] = _Copy.of(broadcast, self._put)
        elif copy.removal is not None:
            copy.removal.cancel()
            copy.removal = None
        return copy

    async def _put(self, copy: _Copy) -> None:
        """Put a blob there; a failure is said in the log, once for a while."""
        async with self._room:
            stream = cast(IO[bytes], EncryptedBlob(copy.reading, copy.key, copy.size))
            try:
                await in_own_thread(lambda: self._place.put(copy.name, stream, copy.size))
                copy.is_there = True
            except BlobWithdrawn:
                pass
            except Exception as error:  # noqa: BLE001 - libraries of stores may raise anything
                self._give_up(in_a_line(str(error) or type(error).__name__))

    async def _address_of(self, copy: _Copy) -> str:
        """Where a blob is; empty if a store signs nothing now."""
        now = time.monotonic()
        if copy.address and now - copy.signed_at <= _SIGNED_AGAIN_SECONDS:
            return copy.address
        copy.address = ""
        if now < self._unsigned_until:
            return ""
        try:
            copy.address = await signed(lambda: self._place.address(copy.name), self._put_seconds)
            copy.signed_at = time.monotonic()
        except Exception as error:  # noqa: BLE001 - as in `_put`
            self._unsigned_until = time.monotonic() + REST_SECONDS
            self._give_up(in_a_line(str(error) or type(error).__name__))
        return copy.address

    def _give_up(self, why: str) -> None:
        if time.monotonic() < self._rests_until:
            return
        self._rests_until = time.monotonic() + REST_SECONDS
        log.warning(
            "the mirror cannot be written to, and devices pull on the link for %g s: %s",
            REST_SECONDS,
            why,
        )

    def _forget(self, sha256: bytes) -> None:
        """Remove a blob that is not offered any more, or that was not put there whole."""
        copy = self._copies.pop(sha256)
        self.use.forget(sha256)
        copy.reading.end()
        if copy.removal is not None:
            copy.removal.cancel()
        self._own.begin_removal(copy.name, after=copy.put)


@dataclasses.dataclass(eq=False)
class _Copy:
    """A blob at the mirror, or on its way there."""

    key: bytes
    size: int
    broadcast: Broadcast | None
    """What it is made of, until that is withdrawn."""
    reading: BlobReading
    put: asyncio.Task[None] = dataclasses.field(init=False)
    is_there: bool = False
    address: str = ""
    signed_at: float = 0.0
    """When the address was made (monotonic)."""
    removal: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, broadcast: Broadcast, put: Callable[[_Copy], Coroutine[None, None, None]]) -> _Copy:
        """Begin to make one."""
        payload = broadcast.payload
        copy = cls(os.urandom(KEY_BYTES), len(payload), broadcast, BlobReading(payload))
        copy.put = asyncio.create_task(put(copy))
        return copy

    @property
    def name(self) -> str:
        """At the mirror: says nothing of the blob to those who do not have the key."""
        return hashlib.sha256(self.key).hexdigest()
