"""Where a participant gets blobs from besides the link: a folder, or what a package provides.

Models and packages are named by their SHA-256, so that it does not matter who has them. The owner
of a participant names sources; the server does not know them. What a source gives is verified, and
the link is the last source, which has everything.

A package provides a kind of source by an entry point of the group `isthmus.blob_sources`: the part
before the colon of what owners write, such as `file:/srv/blobs`, and a class that is called with
the part after it, which raises `UserError` if it cannot be used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from isthmus.errors import UpdateError, UserError, cause_of
from isthmus.printable import in_a_line
from isthmus.provided import make_provided
from isthmus.transport.blobs import Assembly, Piece
from isthmus.transport.own_threads import OwnThread

SOURCES = "isthmus.blob_sources"
"""Entry-point group of sources."""

SILENT_SECONDS = 30.0
"""A source that gives nothing for so long is given up; a blob then comes from the next one."""

REST_SECONDS = 600.0
"""A source that was given up is not asked again for so long, so that it delays few requests."""

_TRIES = 3
"""Times that a source is opened without giving anything in between."""

_LEAST_BYTES = 64 << 10
"""A source that gives less of a blob in `SILENT_SECONDS`, and not the rest of it, hangs too."""

_READ_BYTES = _LEAST_BYTES // 4
"""Bytes that are read at a time. A stream may wait until it has all of them, which counts for
nothing before: so they are fewer than a source has to give."""

log = logging.getLogger(__name__)


class BlobSource(Protocol):
    """Has some blobs. Calls come from several threads."""

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """A stream of the bytes of a blob from `offset` on; None if this source does not have it.

        The stream is read to the end of the blob and closed. One that ends or fails before is
        opened again where it stopped.

        Args:
            sha256: of the blob, in hexadecimal digits.
            size: bytes of the whole blob.
            offset: of the first byte that is wanted.
        """
        ...


class Rest:
    """Whether sources are not to be asked now, because one of them hung."""

    def __init__(self) -> None:
        self._until = 0.0
        self._left: list[threading.Thread] = []
        """Threads that were left behind."""

    @property
    def lasts(self) -> bool:
        """Whether they are not to be asked now."""
        # Not while a thread hangs there, either: they would add up, one for each request.
        self._left = [thread for thread in self._left if thread.is_alive()]
        return bool(self._left) or time.monotonic() < self._until

    def begin(self, left: threading.Thread | None = None) -> None:
        """Begin it; `left` is a thread that was left behind in a source."""
        self._until = time.monotonic() + REST_SECONDS
        if left is not None:
            self._left.append(left)


class RestingSource:
    """A source that is not asked for a while after it hung."""

    then = ""
    """What follows where it had something else or could not be read, for the end of a sentence."""

    def __init__(self, named: str, rest: Rest | None = None) -> None:
        """`named` is for the log; `rest` is that of several sources together."""
        self.named = named
        self._rest = Rest() if rest is None else rest

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """See `BlobSource.open`."""
        raise NotImplementedError

    def about(self, blob: str) -> str:
        """How a sentence begins about what it does with a blob; a verb follows."""
        return f"{self.named}: blob {blob}: it"

    def failed(self) -> None:
        """It had something else under the name of a blob, or could not be read to its end."""

    @property
    def rests(self) -> bool:
        """Whether it is not to be asked now."""
        return self._rest.lasts

    def rest(self, left: threading.Thread | None = None) -> None:
        """Note that it hung, and perhaps the thread that was left behind in it."""
        self._rest.begin(left)


class NamedSource(RestingSource):
    """A source as its owner has named it."""

    def __init__(self, named: str) -> None:
        """Construct it.

        Args:
            named: `KIND:TARGET`, such as `file:/srv/blobs`.

        Raises:
            UserError: no installed package provides this kind, or it cannot use the target.
        """
        super().__init__(named)
        kind, colon, target = named.partition(":")
        if not colon or not kind or not target:
            raise UserError(
                f"--blobs {named} does not name a source: write KIND:TARGET, such as "
                "file:/srv/blobs"
            )
        self._source: BlobSource = make_provided(SOURCES, kind, f"--blobs {named}", target)
        if not callable(getattr(self._source, "open", None)):
            raise UserError(f"--blobs {named} is not a source of blobs: it has no open()")

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """See `BlobSource.open`."""
        return self._source.open(sha256, size, offset)


class Filling:
    """A blob that is being filled from sources, each read by a thread of its own.

    Guarantees:
      * the assembly is complete afterwards, with every byte verified, or at the offset where it
        was: nothing counts of a source that did not have all of it;
      * after `abandon`, and after a source was given up, nothing that it gives is written.
    """

    def __init__(self, assembly: Assembly, sources: Sequence[RestingSource]) -> None:
        """Prepare; `run` begins."""
        self._sources = sources
        self._begun = assembly
        self._is_abandoned = False
        self._lock = threading.Lock()
        self._current: Assembly | None = None
        """What the source that is being read fills; None if nobody waits for it."""
        self._number = 0
        """Number of the source that is being read, from 1."""
        self._reading: RestingSource | None = None
        self._begun_at = 0.0
        """When it was asked."""
        self._moved_at = 0.0
        self._moved = 0
        """Bytes that it has given since then."""

    def abandon(self) -> None:
        """Write nothing more; a source that hangs may keep its thread, but not the memory."""
        with self._lock:
            self._is_abandoned = True
            self._current = None
            reading = self._reading
        # The round may have ended because of it: the next one is not to wait for it again.
        if reading is not None and time.monotonic() - self._begun_at >= SILENT_SECONDS:
            reading.rest()

    async def run(self) -> Assembly:
        """Try the sources one after the other until one had the blob; returns the assembly."""
        for number, source in enumerate(self._sources, 1):
            if source.rests:
                continue
            with self._lock:
                if self._is_abandoned:
                    break
                self._current = self._begun.copy()
                self._number = number
                self._reading = source
                self._begun_at = self._moved_at = time.monotonic()
                self._moved = 0
            left = await _ended(_Reader(self, number, source, self._begun), self._silence)
            if left is not None:
                source.rest(left)
            # Under the lock, so that a source that is given up writes nothing afterwards.
            with self._lock:
                assembly = self._current
                self._current = self._reading = None
            if assembly is not None and assembly.complete:
                return assembly
        return self._begun

    def _silence(self) -> float:
        """Seconds since the current source gave as much as it must."""
        return time.monotonic() - self._moved_at

    def add(self, number: int, data: bytes) -> None:
        """Add the next bytes of a source.

        Raises:
            _Unwanted: nobody waits for them.
            UpdateError: the blob is not the announced one.
        """
        with self._lock:
            assembly = self._current
            if assembly is None or number != self._number:
                raise _Unwanted
            self._moved += len(data)
            if self._moved >= _LEAST_BYTES:
                self._moved_at = time.monotonic()
                self._moved = 0
            assembly.add(Piece(assembly.blob.sha256, assembly.offset, memoryview(data)))


class _Unwanted(Exception):
    """Nobody waits for what a source gives."""


class _Reader:
    """Reads a blob from one source; one that hangs keeps nothing of the memory that it is for."""

    def __init__(
        self, filling: Filling, number: int, source: RestingSource, begun: Assembly
    ) -> None:
        self._filling = weakref.ref(filling)
        self._number = number
        self._source = source
        self._sha256 = begun.blob.sha256.hex()
        self._size = begun.blob.size
        self._offset = begun.offset
        self.shown = source.about(self._sha256[:16])
        """The beginning of sentences."""
        self.then = source.then

    def read(self) -> None:
        """Read to the end, beginning again where a stream ended early."""
        first = self._offset
        tries = _TRIES
        why = ""
        while tries:
            start = self._offset
            try:
                stream = self._source.open(self._sha256, self._size, start)
                if stream is None:
                    return
                with stream:
                    self._copy(stream)
                if self._offset == self._size:
                    log.info("%s gave %s bytes", self.shown, f"{self._size - first:,}")
                    return
                why = "it sends only a part"
            except _Unwanted:
                return
            except UpdateError as error:
                log.warning(
                    "%s has something else under this name (%s)%s",
                    self.shown,
                    error,
                    self._source.then,
                )
                self._source.failed()
                return
            except Exception as error:  # noqa: BLE001 - third-party code may raise anything
                why = in_a_line(_reason(error))
            tries = _TRIES if self._offset > start else tries - 1
        if why.startswith("it "):
            what = why.removeprefix("it ")
        else:
            what = f"cannot be read to its end ({why})"
        log.warning("%s %s%s", self.shown, what, self._source.then)
        self._source.failed()

    def _copy(self, stream: IO[bytes]) -> None:
        while self._offset < self._size:
            # Never more than the announced size, whatever the source has.
            wanted = min(_READ_BYTES, self._size - self._offset)
            data = stream.read(wanted)
            if not data:
                return
            if len(data) > wanted:
                raise UpdateError(f"it gave {len(data)} bytes where {wanted} were wanted")
            self._give(data)
            self._offset += len(data)

    def _give(self, data: bytes) -> None:
        filling = self._filling()
        if filling is None:
            raise _Unwanted
        filling.add(self._number, data)


def _reason(error: Exception) -> str:
    """What a source has raised: a fault of the system without its type, which says nothing more."""
    if isinstance(error, OSError) and str(error):
        return cause_of(error)
    return f"{type(error).__name__}: {error}"


async def _ended(reader: _Reader, silence: Callable[[], float]) -> threading.Thread | None:
    """Have a source read in a thread, which is left behind if it gives too little for too long.

    Args:
        reader: of the source.
        silence: seconds since it gave enough.

    Returns:
        The thread that is left behind; None if it has ended.
    """
    reading = OwnThread(reader.read, reader.shown)
    while not reading.done.done():
        left = SILENT_SECONDS - silence()
        if left <= 0:
            log.warning(
                "%s gave too little for %g s%s",
                reader.shown,
                SILENT_SECONDS,
                reader.then or f", and is not asked again for {REST_SECONDS:g} s",
            )
            return reading.thread
        await asyncio.wait((reading.done,), timeout=left)  # it may have given something meanwhile
    return None


class FolderSource:
    """`file:FOLDER`: files with the SHA-256 of a blob in hexadecimal digits as their names."""

    def __init__(self, target: str) -> None:
        """Name the folder, which may be filled, or appear, later."""
        self._folder = Path(target)
        if not self._folder.is_absolute():
            raise UserError(f"--blobs file:{target} has to name a folder from / on")

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """See `BlobSource.open`; a file of another size is not the blob."""
        try:
            # Without waiting for the other end if it is a pipe.
            descriptor = os.open(self._folder / sha256, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            os.close(descriptor)
            return None
        file = os.fdopen(descriptor, "rb", buffering=0)
        file.seek(offset)
        return file
