"""Blobs as mirrors and stores have them: encrypted, each with a key of its own.

Who has the place, or passes its bytes on, learns no model and no update. The key moves on the
link alone.
"""

from __future__ import annotations

import io
import threading
from typing import Protocol

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from isthmus.transport.blobs import Buffer, InFile

KEY_BYTES = 32
_BLOCK_BYTES = 16


class Keystream(Protocol):
    """Encrypts, or decrypts, bytes in their order."""

    def update(self, data: bytes) -> bytes:
        """The next bytes."""
        ...


def keystream(key: bytes, offset: int) -> Keystream:
    """AES-256 in counter mode for a blob, from one of its bytes on.

    It says nothing of whether the bytes are the right ones: that is what the SHA-256 is for.

    Args:
        key: of `KEY_BYTES`, which is used for one blob only.
        offset: of the first byte.

    >>> whole = keystream(bytes(32), 0).update(bytes(50))
    >>> keystream(bytes(32), 37).update(bytes(13)) == whole[37:]
    True
    """
    counter = (offset // _BLOCK_BYTES).to_bytes(_BLOCK_BYTES, "big")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    encryptor.update(bytes(offset % _BLOCK_BYTES))
    return encryptor


class BlobWithdrawn(Exception):
    """The blob may not be read any more: its memory may have another one."""


class BlobReading:
    """Reads a blob in a thread until it is withdrawn."""

    def __init__(self, payload: Buffer | InFile) -> None:
        self._payload: Buffer | InFile | None = payload
        self._lock = threading.Lock()

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the blob.

        Raises:
            BlobWithdrawn: it may not be read any more.
            OSError: its file cannot be read.
        """
        with self._lock:
            if self._payload is None:
                raise BlobWithdrawn
            if isinstance(self._payload, InFile):
                return self._payload.read(offset, size)
            return bytes(self._payload[offset : offset + size])

    def end(self) -> None:
        """Read nothing more; returns when nothing is being read."""
        with self._lock:
            self._payload = None


class EncryptedBlob(io.RawIOBase):
    """A blob as it is at a mirror or in a store, read once from its beginning."""

    _MOST_BYTES = 1 << 20
    """Bytes that are read at a time, which `BlobReading.end` may have to wait for."""

    def __init__(self, reading: BlobReading, key: bytes, size: int) -> None:
        super().__init__()
        self._reading = reading
        self._keystream = keystream(key, 0)
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """Whether there are bytes to read."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes: as many as are wanted, if there are so many."""
        left = self._size - self._at
        wanted = left if size is None or size < 0 else min(size, left)
        pieces = []
        while wanted:
            data = self._reading.read(self._at, min(wanted, self._MOST_BYTES))
            pieces.append(self._keystream.update(data))
            self._at += len(data)
            wanted -= len(data)
        return b"".join(pieces)
