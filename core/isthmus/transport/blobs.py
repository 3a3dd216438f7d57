"""Contents: bytes that are named by their SHA-256 and cross the link in bounded chunks.

Whoever needs a content asks for it (`Want`) from the offset it already has; the holder answers
with chunks. The same two messages serve both directions, a first transfer and a resumed one.

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

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

from isthmus.errors import UpdateError
from isthmus.wire import link_pb2

CHUNK_BYTES = 128 << 10
"""Payload of one message of a small content."""

BROADCAST_BYTES = 256 << 10
"""The same where it goes to many, who share the message: only gRPC has a copy for each."""

SMALL_BYTES = 4 << 20
"""What counts as small there: with larger ones the copies of 32 receivers would be a model."""

MAX_CHUNK_BYTES = 1 << 20
"""Payload of one message of a large one, where every message costs more than its bytes."""

MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (64 << 20)
"""gRPC refuses anything larger before it is read: a chunk, or a layout's header."""

Buffer = bytearray | memoryview

Write = Callable[[int, bytes | memoryview], object]
"""Where arriving bytes go: called with an offset and the bytes, in order."""

_PIECE_BODY, _PIECE_SHA256, _PIECE_OFFSET, _PIECE_DATA = 0x2A, b"\x0a\x20", 0x10, 0x1A
"""Tags of `Envelope.chunk`, and of a chunk's fields; that of the digest with its length."""


def into(buffer: Buffer) -> Write:
    """Write arriving bytes into memory."""
    view = memoryview(buffer)

    def write(offset: int, data: bytes | memoryview) -> None:
        view[offset : offset + len(data)] = data

    return write


def describe(payload: bytes | Buffer) -> link_pb2.Blob:
    """The name and size of a payload."""
    return link_pb2.Blob(sha256=hashlib.sha256(payload).digest(), size=len(payload))


def chunk_size(size: int) -> int:
    """Payload of one message of a content of `size` bytes.

    A message on its way to each of 32 participants, twice with gRPC's copy, is not half a content.
    """
    return max(CHUNK_BYTES, min(MAX_CHUNK_BYTES, size // 160))


def chunks(
    sha256: bytes, payload: bytes | Buffer, *, offset: int, chunk_bytes: int | None = None
) -> Iterator[bytes]:
    """The payload from `offset` on, as serialised envelopes that each copy their bytes once.

    The envelope is put together by hand (a chunk whose last field is the data), because letting
    protobuf do it copies every byte three times.
    """
    view = memoryview(payload)
    chunk_bytes = chunk_bytes or chunk_size(len(view))
    while offset < len(view):
        data = view[offset : offset + chunk_bytes]
        yield _message(sha256, offset, data)
        offset += len(data)


def _message(sha256: bytes, offset: int, data: bytes | memoryview) -> bytes:
    head = link_pb2.Chunk(sha256=sha256, offset=offset).SerializeToString()
    tail = bytes((_PIECE_DATA,)) + _varint(len(data))
    size = len(head) + len(tail) + len(data)
    return b"".join((bytes((_PIECE_BODY,)), _varint(size), head, tail, data))


class InFile:
    """A content that lies in a file: it is read while it is sent, and none of it is held."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        """`file` stays open, and its first `size` bytes what they are."""
        self._file = file
        self._size = size

    def __len__(self) -> int:
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes, wherever others read.

        Raises:
            OSError: they cannot be read, or are not there any more.
        """
        data = os.pread(self._file.fileno(), size, offset)
        if len(data) != size:
            raise OSError(f"{self._file.name} was cut short")
        return data


class Broadcast:
    """A content on its way to many: a message is made once for all who are at the same place."""

    _KEPT = 8
    """Messages that are kept for who comes next: a few MB at most."""

    def __init__(self, sha256: bytes, payload: bytes | Buffer | InFile) -> None:
        self._sha256 = sha256
        self._payload = payload if isinstance(payload, InFile) else memoryview(payload)
        least = BROADCAST_BYTES if len(payload) <= SMALL_BYTES else 0
        self._chunk_bytes = max(least, chunk_size(len(payload)))
        self._made: dict[int, bytes] = {}

    def messages(self, offset: int) -> Iterator[bytes]:
        """The content from `offset` on, as serialised envelopes.

        Raises:
            OSError: its file cannot be read.
        """
        while offset < len(self._payload):
            message = self._made.get(offset)
            end = min(len(self._payload), offset - offset % self._chunk_bytes + self._chunk_bytes)
            if message is None:
                message = _message(self._sha256, offset, self._piece(offset, end))
                if len(self._made) >= self._KEPT:
                    del self._made[next(iter(self._made))]
                self._made[offset] = message
            yield message
            offset = end

    def fill(self, buffer: Buffer) -> None:
        """Copy all of it to where there is as much room."""
        end = len(self._payload)
        for start in range(0, end, MAX_CHUNK_BYTES):
            piece = self._piece(start, min(start + MAX_CHUNK_BYTES, end))
            buffer[start : start + len(piece)] = piece

    def _piece(self, start: int, end: int) -> bytes | memoryview:
        if isinstance(self._payload, InFile):
            return self._payload.read(start, end - start)
        return self._payload[start:end]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A `Chunk` whose data is still in the message that it came in."""

    sha256: bytes
    offset: int
    data: memoryview
    absent: bool = False


def piece_of(message: bytes) -> Piece | None:
    """The chunk in a serialised envelope, if it has the form that `chunks` gives it.

    What protobuf would read of it, without the two copies of every byte that it makes.
    """
    if len(message) < 2 or message[0] != _PIECE_BODY:
        return None
    offset = 0
    size, at = _read_varint(message, 1)
    if size != len(message) - at or message[at : at + 2] != _PIECE_SHA256:
        return None
    sha256, at = message[at + 2 : at + 34], at + 34
    if message[at : at + 1] == bytes((_PIECE_OFFSET,)):
        offset, at = _read_varint(message, at + 1)
    if message[at : at + 1] != bytes((_PIECE_DATA,)):
        return None
    size, at = _read_varint(message, at + 1)
    if offset < 0 or size != len(message) - at:
        return None
    return Piece(sha256, offset, memoryview(message)[at:])


class Assembly:
    """One content on its way in.

    Guarantees:
      * nothing is written beyond the size that was agreed before memory was taken;
      * `complete` is true only when every byte came, in order, and the digest is the name.
    """

    def __init__(self, blob: link_pb2.Blob, write: Write) -> None:
        """`write` has room for exactly `content.size` bytes."""
        self.blob = blob
        self.offset = 0
        self._write = write
        self._hash = hashlib.sha256()

    def add(self, chunk: link_pb2.Chunk | Piece) -> None:
        """Take the next chunk; one that was already taken (after a resume) is passed over.

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
            raise UpdateError(f"a transfer of {self.blob.size} bytes went on to byte {end}")
        self._write(self.offset, data)
        self._hash.update(data)
        self.offset = end
        if end == self.blob.size and not self.complete:
            raise UpdateError("a transfer does not match its SHA-256: it was damaged on the way")

    @property
    def complete(self) -> bool:
        """Everything is here and is what its name says."""
        return self.offset == self.blob.size and self._hash.digest() == self.blob.sha256


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of up to 64 bits and where it ends; a negative one if there is none."""
    value = 0
    for count, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return (value if value < 1 << 64 else -1), at + count + 1
    return -1, at
