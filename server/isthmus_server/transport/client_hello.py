"""Read what a caller's first message of TLS offers: its application protocols (ALPN).

The message is anybody's, and nothing in it is proven. It only chooses which of several listeners
gets the connection, each of which authenticates its callers as it does at a port of its own.
Whatever is not exactly of the form of RFC 8446, section 4.1.2, in one record, is refused.
"""

from __future__ import annotations

RECORD_HEADER = 5
"""Bytes before the content of a record of TLS."""
LARGEST_HELLO = RECORD_HEADER + (1 << 14)
"""Bytes of the largest record of TLS."""

_HANDSHAKE = 22
_CLIENT_HELLO = 1
_RANDOM_BYTES = 32
_LONGEST_SESSION = 32
_ALPN = 16
_MOST = 64
"""Extensions, and protocols, of a message; browsers offer about 20, and of protocols two."""


class NotAClientHello(Exception):
    """Bytes that do not begin a connection of TLS."""


def size_of(data: bytes) -> int:
    """Bytes of the first record, header included; of the header, as long as that is incomplete.

    >>> size_of(bytes.fromhex("16 03 01 00 f0"))
    245

    Raises:
        NotAClientHello: it is no record of a handshake, or of a size that TLS forbids.
    """
    if data[:1] and data[0] != _HANDSHAKE:
        raise NotAClientHello("it is no handshake of TLS")
    if data[1:2] and data[1] != 3:
        raise NotAClientHello("it is of no known version of TLS")
    if len(data) < RECORD_HEADER:
        return RECORD_HEADER
    size = RECORD_HEADER + int.from_bytes(data[3:5], "big")
    if not RECORD_HEADER < size <= LARGEST_HELLO:
        raise NotAClientHello("its first record has a size that TLS forbids")
    return size


def protocols_of(record: bytes) -> tuple[bytes, ...]:
    """The protocols that a complete first record offers, in its order; none without ALPN.

    Raises:
        NotAClientHello: it is anything but one whole message, of the form of RFC 8446.
    """
    if len(record) <= RECORD_HEADER or size_of(record) != len(record):
        raise NotAClientHello("its first record is incomplete")
    outer = _HelloReader(record[RECORD_HEADER:])
    if outer.take(1)[0] != _CLIENT_HELLO:
        raise NotAClientHello("its first message is no ClientHello")
    hello = _HelloReader(outer.vector(3))
    outer.check_end()
    hello.take(2 + _RANDOM_BYTES)
    if len(hello.vector(1)) > _LONGEST_SESSION:
        raise NotAClientHello("its session has too long a name")
    suites = hello.vector(2)
    if not suites or len(suites) % 2:
        raise NotAClientHello("it offers no ciphers")
    if not hello.vector(1):
        raise NotAClientHello("it offers no compression")
    if hello.is_at_end:  # TLS 1.2 without extensions
        return ()
    extensions = _HelloReader(hello.vector(2))
    hello.check_end()
    seen: dict[int, bytes] = {}
    while not extensions.is_at_end:
        kind = int.from_bytes(extensions.take(2), "big")
        content = extensions.vector(2)
        if kind in seen:
            raise NotAClientHello("it has an extension twice")
        if len(seen) == _MOST:
            raise NotAClientHello("it has too many extensions")
        seen[kind] = content
    return _alpn(seen[_ALPN]) if _ALPN in seen else ()


def _alpn(content: bytes) -> tuple[bytes, ...]:
    outer = _HelloReader(content)
    names = _HelloReader(outer.vector(2))
    outer.check_end()
    found: list[bytes] = []
    while not names.is_at_end:
        if len(found) == _MOST:
            raise NotAClientHello("it offers too many protocols")
        found.append(names.vector(1))
    if not found or not all(found):
        raise NotAClientHello("it offers a protocol without a name")
    return tuple(found)


class _HelloReader:
    """Takes bytes from the front of others, and never more than there are."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise NotAClientHello("it ends within a field")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def vector(self, length_bytes: int) -> bytes:
        """What has its length before it."""
        return self.take(int.from_bytes(self.take(length_bytes), "big"))

    def check_end(self) -> None:
        if not self.is_at_end:
            raise NotAClientHello("it has bytes after its end")
