"""Updates that devices put into a store, where the server gets them rather than on the link.

Each is there for as long as one device's update is being received, encrypted with a key of its own,
which is in memory and on the link, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from isthmus.transport.encrypted_blobs import KEY_BYTES, keystream
from isthmus.transport.own_threads import in_own_thread
from isthmus.wire import link_pb2
from isthmus_server.mirror.claimed_place import ClaimedPlace, signed, without_addresses
from isthmus_server.mirror.place import UploadStore

LEAST_BYTES = 256 << 10
"""Smaller updates come on the link: three requests to the store would cost more than they do."""
REST_SECONDS = 600.0
"""After the store has failed, or a device has put something else there, for so long the updates of
all, or of that device, come on the link."""
SILENT_SECONDS = 30.0
"""A store that gives less than a piece in so long hangs."""
SWEEP_SECONDS = 3600.0
"""Interval in which it is looked for what devices have put there after nobody waited for it."""
_SIGN_SECONDS = 30.0
"""Longest time for an address."""
_PIECE_BYTES = 64 << 10
"""Bytes that are read at a time."""
_AT_ONCE = 2
"""Addresses that are signed at the same time."""

log = logging.getLogger(__name__)


class ExpectedUpdate:
    """An update that a device is to put into the store."""

    def __init__(self, participant: str, blob: link_pb2.Blob, directory: Path) -> None:
        """Give it a key; see `StoredUpdates.expecting`."""
        self.participant = participant
        self.directory = directory
        self.blob = link_pb2.Blob(
            sha256=blob.sha256, size=blob.size, key=os.urandom(KEY_BYTES), address=""
        )
        """What the device is told: with the key, and the address once there is one."""

    @property
    def name(self) -> str:
        """In the store: says nothing of the update to those who do not have the key."""
        return hashlib.sha256(self.blob.key).hexdigest()


class StoredUpdates:
    """The updates of a server's devices in its store.

    Guarantees:
      * what is got from there has the announced size and SHA-256 before anything else reads it;
      * an object is removed when nobody waits for it any more; what a device puts there later, and
        what a crash leaves, within an hour of the next look or when the server starts again;
      * a store that fails or hangs delays an update by at most half a minute for each step, and the
        updates of the next ten minutes come on the link; a device that has put something else there
        is alone in that;
      * addresses and keys are in no log.
    """

    def __init__(self, store: UploadStore, *, sweep_seconds: float = SWEEP_SECONDS) -> None:
        """Prepare; `running` begins."""
        self._store = store
        self._own = ClaimedPlace(store, "the store of updates")
        self._sweep_seconds = sweep_seconds
        self._expected: set[str] = set()
        """Names in the store of what is being waited for."""
        self._rests_until = 0.0
        self._mistrusted: dict[str, float] = {}
        """Until when the updates of some participants come on the link (monotonic)."""
        self._room = asyncio.Semaphore(_AT_ONCE)

    @asynccontextmanager
    async def running(self, owner: str) -> AsyncIterator[None]:
        """Have the store during the block; `owner` is the fingerprint of this server.

        Raises:
            UserError: the place is another server's, or cannot be used.
        """
        async with self._own.claimed(owner):
            sweeping = asyncio.create_task(self._sweep())
            try:
                yield
            finally:
                sweeping.cancel()

    @asynccontextmanager
    async def expecting(
        self, participant: str, blob: link_pb2.Blob, directory: Path
    ) -> AsyncIterator[ExpectedUpdate | None]:
        """A place in the store for an update, for the block; None: it is to come on the link.

        Args:
            participant: the device that has it.
            blob: its size and SHA-256.
            directory: where it is to be received, in a file without a name.
        """
        if blob.size < LEAST_BYTES or self._rests(participant):
            yield None
            return
        expected = ExpectedUpdate(participant, blob, directory)
        address = await self._address_of(expected)
        if not address:
            yield None
            return
        expected.blob.address = address
        self._expected.add(expected.name)
        try:
            yield expected
        finally:
            self._expected.discard(expected.name)
            self._own.begin_removal(expected.name)

    async def get(self, expected: ExpectedUpdate) -> BinaryIO | None:
        """An update in a file without a name; None, and a line in the log, if it is not there."""
        reading = _StoreReading(self._store, expected)
        try:
            return await reading.run()
        except _NotTheUpdate as error:
            self._mistrusted = {
                name: until for name, until in self._mistrusted.items() if until > time.monotonic()
            }
            self._mistrusted[expected.participant] = time.monotonic() + REST_SECONDS
            log.warning(
                "updates of %s come on the link for %g s: the store %s",
                expected.participant,
                REST_SECONDS,
                error,
            )
        except Exception as error:  # noqa: BLE001 - libraries of stores may raise anything
            self._give_up(without_addresses(error))
        return None

    def _rests(self, participant: str) -> bool:
        now = time.monotonic()
        return now < self._rests_until or now < self._mistrusted.get(participant, 0.0)

    async def _address_of(self, expected: ExpectedUpdate) -> str:
        """Where a device puts an update; empty if the store signs nothing now."""
        name = expected.name
        size = expected.blob.size
        async with self._room:
            if self._rests(expected.participant):  # since others have waited here
                return ""
            try:
                return await signed(lambda: self._store.upload_address(name, size), _SIGN_SECONDS)
            except Exception as error:  # noqa: BLE001 - as in `get`
                self._give_up(without_addresses(error))
                return ""

    def _give_up(self, why: str) -> None:
        if time.monotonic() < self._rests_until:
            return
        self._rests_until = time.monotonic() + REST_SECONDS
        log.warning(
            "the store of updates fails, and they come on the link for %g s: %s", REST_SECONDS, why
        )

    async def _sweep(self) -> None:
        """Remove now and then what came after nobody waited for it."""
        while True:
            await asyncio.sleep(self._sweep_seconds)
            try:
                found = await self._own.names()
            except Exception as error:  # noqa: BLE001 - as in `get`
                log.warning("the store of updates cannot be read: %s", without_addresses(error))
                continue
            await self._own.remove([name for name in found if name not in self._expected])


class _NotTheUpdate(Exception):
    """What is in the store is not the update that was announced; the message says what it is."""


class _StoreReading:
    """One update that is read from the store by a thread, decrypted and verified."""

    def __init__(self, store: UploadStore, expected: ExpectedUpdate) -> None:
        self._store = store
        self._expected = expected
        self._moved_at = time.monotonic()
        self._halted = threading.Event()

    async def run(self) -> BinaryIO:
        """The update, in a file without a name.

        Raises:
            _NotTheUpdate: something else is there.
            OSError: the store, or the disk, cannot be used.
        """
        reading = asyncio.ensure_future(in_own_thread(self._read))
        try:
            while not reading.done():
                left = self._moved_at + SILENT_SECONDS - time.monotonic()
                if left <= 0:
                    raise OSError(f"it gave too little for {SILENT_SECONDS:g} s")
                await asyncio.wait((reading,), timeout=left)
            return reading.result()
        finally:
            self._halted.set()
            reading.cancel()

    def _read(self) -> BinaryIO:
        blob = self._expected.blob
        try:
            stream, size = self._store.open(self._expected.name)
        except FileNotFoundError:
            raise _NotTheUpdate("does not have it") from None
        with contextlib.closing(stream):
            if size != blob.size:
                raise _NotTheUpdate(f"has {size} bytes in place of {blob.size}")
            file = tempfile.TemporaryFile(dir=self._expected.directory)  # noqa: SIM115 - returned
            try:
                self._copy(stream.read, file)
            except BaseException:
                file.close()
                raise
            return cast(BinaryIO, file)

    def _copy(self, read: Callable[[int], bytes], file: IO[bytes]) -> None:
        blob = self._expected.blob
        decrypting = keystream(blob.key, 0)
        digest = hashlib.sha256()
        left = blob.size
        while left:
            data = read(min(_PIECE_BYTES, left))
            if self._halted.is_set():
                raise OSError("nobody waits for it")
            if not data:
                raise OSError("it ends early")
            plain = decrypting.update(data)
            digest.update(plain)
            file.write(plain)
            left -= len(data)
            self._moved_at = time.monotonic()
        if digest.digest() != blob.sha256:
            raise _NotTheUpdate("has something else under its name")
