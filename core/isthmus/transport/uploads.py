"""Updates that a device puts into a store at addresses of its server, rather than on the link.

The server names a signed address and a key for one update, which is encrypted with it: who has the
store learns no update. The server asks only for plain updates, takes nothing with another SHA-256
than the one that the device has told it, and pulls on the link what is not there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence

from isthmus.printable import in_a_line
from isthmus.transport import blob_sources
from isthmus.transport.blobs import Buffer, InFile
from isthmus.transport.encrypted_blobs import BlobReading, BlobWithdrawn, EncryptedBlob
from isthmus.transport.https_source import reason_of
from isthmus.transport.own_threads import OwnThread
from isthmus.transport.server_addresses import ServerAddresses
from isthmus.wire import link_pb2

_TRIES = 3
"""Times that an update is sent to the store."""
_PAUSE_SECONDS = 0.5
"""Before the second time; twice as long before each later one."""
_PIECE_BYTES = 64 << 10
"""Bytes that are sent at a time. A store that takes fewer in half a minute hangs."""
_TOLD_SECONDS = 1.0
"""Longest time until the server is told that the update advances."""
_LAST_TRY = (400, 401, 403, 404, 405, 411, 413)
"""Answers of a store that would be the same again."""

log = logging.getLogger(__name__)


class UploadAddresses(ServerAddresses):
    """The stores of a server, as far as the owner of a participant allows them."""

    def __init__(self, patterns: Sequence[str], named: str) -> None:
        """Send nothing yet.

        Args:
            patterns: of the addresses that the server may name; see `is_allowed`.
            named: where they are, for sentences.

        Raises:
            UserError: one of them names no host.
        """
        super().__init__(patterns, named, "updates go over the link: the server's store")

    def of(self, blob: link_pb2.Blob, payload: Buffer | InFile) -> Upload | None:
        """Prepare to put a result at the address of a blob; None if it is to go over the link.

        The first address that may not be used is said in the log.
        """
        if self.rest.lasts or not self.may_ask(blob):
            return None
        return Upload(blob, payload, self)


class Upload:
    """One update on its way to a store, sent by a thread of its own.

    Guarantees:
      * after `abandon`, and after the store was given up, nothing is read of the payload;
      * no redirection is followed, and the certificate of the store is verified;
      * it ends: a store that takes nothing for half a minute is given up, and so is one that has
        failed three times.
    """

    def __init__(
        self, blob: link_pb2.Blob, payload: Buffer | InFile, addresses: UploadAddresses
    ) -> None:
        """Prepare; `run` begins.

        Args:
            blob: with the address, and the key.
            payload: what is sent; it is left as it is until the upload has ended.
            addresses: which the owner allows.
        """
        self.address = blob.address
        self.is_stored: bool | None = None
        """Whether all of it is at the store; None as long as it is on its way."""
        self._key = bytes(blob.key)
        self._size = len(payload)
        self._reading = BlobReading(payload)
        self._addresses = addresses
        self._shown = f"the store {urllib.parse.urlsplit(blob.address).netloc}"
        self._abandoned = threading.Event()
        self._moved_at = 0.0
        self._sent = 0
        """Bytes that the store has taken, at the try that came furthest."""
        self._is_there = False
        self._why = ""
        """Why it is not at the store."""

    def abandon(self) -> None:
        """Send nothing more, and read nothing more of the payload."""
        self._abandoned.set()
        self._reading.end()

    async def run(self, told: Callable[[int], object]) -> bool:
        """Send it, unless it is abandoned.

        Args:
            told: is called now and then with the number of bytes that were sent.

        Returns:
            Whether the store has all of it.
        """
        self._moved_at = time.monotonic()
        sending = OwnThread(self._send, self._shown)
        reached = 0
        hanging: threading.Thread | None = None
        try:
            while not sending.done.done():
                seconds = self._moved_at + blob_sources.SILENT_SECONDS - time.monotonic()
                if seconds <= 0:
                    hanging = sending.thread
                    self._why = f"it took too little for {blob_sources.SILENT_SECONDS:g} s"
                    break
                await asyncio.wait((sending.done,), timeout=min(seconds, _TOLD_SECONDS))
                if self._sent > reached:
                    reached = self._sent
                    told(reached)
            was_abandoned = self._abandoned.is_set()
        finally:
            self.abandon()
        self.is_stored = sending.done.done() and self._is_there and not was_abandoned
        if self.is_stored:
            log.info("%s: an update of %d bytes", self._shown, self._size)
        elif not was_abandoned:
            self._addresses.rest.begin(hanging)
            log.warning(
                "%s: %s; the update goes over the link, and the store is left alone for %g s",
                self._shown,
                self._why,
                blob_sources.REST_SECONDS,
            )
        return self.is_stored

    def _send(self) -> None:
        """Send all of it, as often as it takes; the reason why it did not work is kept."""
        pause = _PAUSE_SECONDS
        for tries in range(1, _TRIES + 1):
            try:
                self._put()
            except BlobWithdrawn:
                return
            except _StoreRefuses as error:
                self._why = str(error)
                return
            except Exception as error:  # noqa: BLE001 - no server may end this with another one
                # Without the words of errors that may have the address, which is signed.
                words = str(error) if isinstance(error, OSError) else type(error).__name__
                why = in_a_line(words)[:200]
                if tries == _TRIES:
                    self._why = why or type(error).__name__
            else:
                self._is_there = True
                return
            if self._abandoned.wait(pause):
                return
            pause *= 2

    def _put(self) -> None:
        """Send all of it once.

        Raises:
            BlobWithdrawn: it was abandoned.
            OSError: the store cannot be reached, or answers with an error.
            _StoreRefuses: it would do so again.
        """
        headers = {
            "User-Agent": "isthmus",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(self._size),
        }
        request = urllib.request.Request(  # noqa: S310 - it is https
            self.address, data=self._pieces(), headers=headers, method="PUT"
        )
        # Redirections of a PUT are errors for it.
        handler = urllib.request.HTTPSHandler(context=self._addresses.context())
        opener = urllib.request.build_opener(handler)
        try:
            opener.open(request, timeout=blob_sources.SILENT_SECONDS).close()
        except urllib.error.HTTPError as error:
            error.close()
            said = f"it answers {error.code}"
            if error.code in _LAST_TRY:
                raise _StoreRefuses(said) from None
            raise OSError(said) from None
        except urllib.error.URLError as error:
            raise OSError(f"it cannot be reached: {reason_of(error)}") from None

    def _pieces(self) -> Iterator[bytes]:
        encrypted = EncryptedBlob(self._reading, self._key, self._size)
        sent = 0
        while data := encrypted.read(_PIECE_BYTES):
            yield data
            sent += len(data)
            self._sent = max(self._sent, sent)
            self._moved_at = time.monotonic()


class _StoreRefuses(Exception):
    """A store answers with an error that would be the same again."""
