"""Blobs: bytes identified by their SHA-256 and transferred over the link in bounded chunks.

The receiver sends a `Pull` with the offset that it already has; the holder answers with chunks.
The same two messages serve both directions, and first and resumed transfers.

>>> payload = bytes(range(256)) * 8
>>> name = describe(payload)
>>> copy = bytearray(name.size)
>>> assembly = Assembly(name, into(copy))
>>> for message in chunks(name.sha256, payload, offset=0, chunk_bytes=1000):
...     assembly.add(piece_of(message))
>>> assembly.complete, copy == payload
(True, True)
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

from isthmus.errors import UpdateError
from isthmus.wire import link_pb2

CHUNK_BYTES = 128 << 10
"""Chunk size of small blobs, in bytes."""

BROADCAST_BYTES = 256 << 10
"""Chunk size of small blobs sent to many receivers, which share one message in memory."""

SMALL_BYTES = 4 << 20
"""Largest blob sent in such chunks; copies of larger chunks would add up for many receivers."""

MAX_CHUNK_BYTES = 1 << 20
"""Chunk size of large blobs, for which the overhead of a message matters most."""

MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (64 << 20)
"""Largest message: a chunk or a layout's header. gRPC refuses larger ones before reading them."""

Buffer = bytearray | memoryview

Write = Callable[[int, bytes | memoryview], object]
"""Destination of received bytes: called with the offset and the bytes, in order."""

_PIECE_BODY = 0x2A
_PIECE_SHA256 = b"\x0a\x20"
_PIECE_OFFSET = 0x10
_PIECE_DATA = 0x1A
"""Protobuf tags of `Envelope.chunk` and of a chunk's fields; the digest's includes its length."""


def into(buffer: Buffer) -> Write:
    """A `Write` into memory."""
    view = memoryview(buffer)

    def write(offset: int, data: bytes | memoryview) -> None:
        view[offset : offset + len(data)] = data

    return write


def describe(payload: bytes | Buffer) -> link_pb2.Blob:
    """The SHA-256 and size of a payload."""
    return link_pb2.Blob(sha256=hashlib.sha256(payload).digest(), size=len(payload))


def chunk_size(size: int) -> int:
    """Chunk size for a blob of `size` bytes.

    One message in flight to each of 32 participants, held twice by gRPC, then takes less than half
    of the blob's size.
    """
    return max(CHUNK_BYTES, min(MAX_CHUNK_BYTES, size // 160))


def chunks(
    sha256: bytes, payload: bytes | Buffer | InFile, *, offset: int, chunk_bytes: int | None = None
) -> Iterator[bytes]:
    """The payload from `offset` on as serialised envelopes, with one copy of each byte.

    The envelope is assembled by hand (a chunk whose last field is the data), because protobuf
    would copy every byte three times.

    Raises:
        OSError: its file cannot be read.
    """
    chunk_bytes = chunk_bytes or chunk_size(len(payload))
    while offset < len(payload):
        data = _piece(payload, offset, min(offset + chunk_bytes, len(payload)))
        yield _message(sha256, offset, data)
        offset += len(data)


def _piece(payload: bytes | Buffer | InFile, start: int, end: int) -> bytes | memoryview:
    if isinstance(payload, InFile):
        return payload.read(start, end - start)
    return memoryview(payload)[start:end]


def _message(sha256: bytes, offset: int, data: bytes | memoryview) -> bytes:
    head = link_pb2.Chunk(sha256=sha256, offset=offset).SerializeToString()
    tail = bytes((_PIECE_DATA,)) + _varint(len(data))
    size = len(head) + len(tail) + len(data)
    return b"".join((bytes((_PIECE_BODY,)), _varint(size), head, tail, data))


class InFile:
    """A blob in a file that is read while it is sent, without keeping it in memory."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        """`file` must stay open and its first `size` bytes must not change."""
        self._file = file
        self._size = size

    def __len__(self) -> int:
        return self._size

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._file.fileno()

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`; threads may read at the same time.

        Raises:
            OSError: they cannot be read, or the file was truncated.
        """
        data = os.pread(self._file.fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{self._file.name} was cut short")
        return data


class Broadcast:
    """One blob sent to many receivers: receivers at the same offset share a message."""

    _KEPT = 8
    """Latest messages kept for other receivers: a few MB at most."""

    def __init__(
        self, sha256: bytes, payload: bytes | Buffer | InFile, *, together: bool = True
    ) -> None:
        """No message is kept of what receivers do not pull `together`."""
        self.sha256 = sha256
        """The SHA-256 of the blob."""
        self._kept = self._KEPT if together else 0
        self.payload = payload if isinstance(payload, InFile) else memoryview(payload)
        """The bytes."""
        least = BROADCAST_BYTES if len(payload) <= SMALL_BYTES else 0
        self.chunk_bytes = max(least, chunk_size(len(payload)))
        """Usual size of a chunk."""
        self._made: dict[tuple[int, int], bytes] = {}

    def messages(
        self, offset: int, chunk_bytes: int | None = None, length: int = 0
    ) -> Iterator[tuple[bytes, int]]:
        """The blob from `offset` on as serialised envelopes, each with the bytes of the blob in it.

        `chunk_bytes` is the size of a chunk; None for the usual one. `length` limits the bytes; 0
        is all.

        Raises:
            OSError: its file cannot be read.
        """
        step = chunk_bytes or self.chunk_bytes
        last = min(len(self.payload), offset + length) if length else len(self.payload)
        while offset < last:
            end = min(last, offset - offset % step + step)
            message = self._made.get((offset, end))
            if message is None:
                message = _message(self.sha256, offset, _piece(self.payload, offset, end))
                if self._kept:
                    if len(self._made) >= self._kept:
                        del self._made[next(iter(self._made))]
                    self._made[offset, end] = message
            yield message, end - offset
            offset = end

    def fill(self, buffer: Buffer) -> None:
        """Copy the whole blob into a buffer of its size."""
        end = len(self.payload)
        for start in range(0, end, MAX_CHUNK_BYTES):
            piece = _piece(self.payload, start, min(start + MAX_CHUNK_BYTES, end))
            buffer[start : start + len(piece)] = piece


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A received chunk whose data is a view of the serialised message."""

    sha256: bytes
    offset: int
    data: memoryview
    absent: bool = False


def piece_of(message: bytes) -> Piece | None:
    """The chunk in a serialised envelope that has the form `chunks` writes; otherwise None.

    The result is the same as protobuf's, without its two copies of every byte.
    """
    if len(message) < 2 or message[0] != _PIECE_BODY:
        return None
    offset = 0
    size, at = _read_varint(message, 1)
    if size != len(message) - at or message[at : at + 2] != _PIECE_SHA256:
        return None
    sha256 = message[at + 2 : at + 34]
    at += 34
    if message[at : at + 1] == bytes((_PIECE_OFFSET,)):
        offset, at = _read_varint(message, at + 1)
    if message[at : at + 1] != bytes((_PIECE_DATA,)):
        return None
    size, at = _read_varint(message, at + 1)
    if offset < 0 or size != len(message) - at:
        return None
    return Piece(sha256, offset, memoryview(message)[at:])


class Assembly:
    """A blob that is being received.

    Guarantees:
      * nothing is written beyond the size that was announced before memory was allocated;
      * `complete` is true only if every byte arrived in order and the SHA-256 matches, where it is
        verified.
    """

    def __init__(self, blob: link_pb2.Blob, write: Write, *, verified: bool = True) -> None:
        """Begin at the first byte.

        Args:
            blob: what is received.
            write: must accept exactly `blob.size` bytes.
            verified: false for a blob with another name than its SHA-256, from a process on this
                machine, see `isthmus.transport.shared_memory.has_random_name`.
        """
        self.blob = blob
        self._verified = verified
        self.offset = 0
        self._write = write
        self._hash = hashlib.sha256()

    def add(self, chunk: link_pb2.Chunk | Piece) -> None:
        """Add the next chunk; one that was added already (after a resume) is ignored.

        Raises:
            UpdateError: a gap, too many bytes, or at the end the wrong digest.
        """
        data = chunk.data
        if chunk.offset + len(data) <= self.offset:
            return
        if chunk.offset != self.offset or not data:
            raise UpdateError(f"a transfer has a gap: at byte {self.offset}, got {chunk.offset}")
        end = self.offset + len(data)
        if end > self.blob.size:
            raise UpdateError(f"a transfer of {self.blob.size} bytes continued to byte {end}")
        self._write(self.offset, data)
        if self._verified:
            self._hash.update(data)
        self.offset = end
        if end == self.blob.size and not self.complete:
            raise UpdateError("a transfer does not match its SHA-256: it was damaged in transit")

    def copy(self) -> Assembly:
        """Another one that goes on from here, into the same memory."""
        copy = Assembly(self.blob, self._write, verified=self._verified)
        copy.offset = self.offset
        copy._hash = self._hash.copy()
        return copy

    @property
    def complete(self) -> bool:
        """Whether all bytes arrived and match the SHA-256."""
        if self.offset != self.blob.size:
            return False
        return not self._verified or self._hash.digest() == self.blob.sha256


class WantedPiece:
    """A piece of a blob while its chunks arrive, in memory of its size."""

    def __init__(self, offset: int, length: int, done: asyncio.Future[bytearray]) -> None:
        """`done` gets the piece, or why there is none."""
        self.done = done
        self._offset = offset
        self._data = bytearray(length)
        self._at = 0

    def add(self, chunk: link_pb2.Chunk | Piece) -> None:
        """Add the next chunk; what was sent beyond the piece is left out."""
        if self.done.done():
            return
        if chunk.absent:
            self.fail(UpdateError("the server does not have it any more"))
            return
        data = chunk.data
        if chunk.offset != self._offset + self._at or not data:
            if chunk.offset + len(data) > self._offset + self._at:  # else of an earlier pull
                self.fail(UpdateError(f"a transfer has a gap at byte {self._offset + self._at}"))
            return
        count = min(len(data), len(self._data) - self._at)
        self._data[self._at : self._at + count] = data[:count]
        self._at += count
        if self._at == len(self._data):
            self.done.set_result(self._data)

    def fail(self, error: Exception) -> None:
        """There is no such piece."""
        if not self.done.done():
            self.done.set_exception(error)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint of up to 64 bits and the offset of its end; -1 if there is no valid one."""
    value = 0
    for count, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return (value if value < 1 << 64 else -1), at + count + 1
    return -1, at
