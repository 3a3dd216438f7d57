"""Canonical encoding of everything that is signed, hashed or sent.

Every field is length-prefixed or of fixed length; numbers are little-endian; a set of clients is a
bitmap. Encoding is injective and no value has two encodings, so a signature over the bytes is a
signature over the value. Decoding is strict and bounded: no allocation depends on an unchecked
length from a peer.

>>> @dataclasses.dataclass(frozen=True)
... class Greeting(Message):
...     TAG = "greeting"
...     FIELDS = {"name": text(8), "age": NUMBER}
...     name: str
...     age: int
>>> Greeting.from_bytes(Greeting("Ada", 36).to_bytes())
Greeting(name='Ada', age=36)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from isthmus_privacy.crypto import refusal

DOMAIN = "isthmus/secagg/3/"
"""Prefix of the tag of every message, hash, signature and key derivation."""

MAX_CLIENTS = 1 << 16
"""Maximum length of a set of clients, and of a list with one item per client."""

T = TypeVar("T")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct("<d")


def tagged(tag: str, *fields: bytes) -> bytes:
    """`DOMAIN + tag` and the fields, each prefixed with its length."""
    parts = [_prefix(tag)]
    for field in fields:
        parts.append(_U32.pack(len(field)))
        parts.append(field)
    return b"".join(parts)


@functools.cache
def _prefix(tag: str) -> bytes:
    """What `tagged` begins with. Tags are constants of this code, and few."""
    name = (DOMAIN + tag).encode()
    return _U32.pack(len(name)) + name


def tagged_hash(tag: str, *fields: bytes) -> bytes:
    """SHA-256 of `tagged`."""
    return hashlib.sha256(tagged(tag, *fields)).digest()


class Reader:
    """Read position in received bytes."""

    def __init__(self, data: bytes | memoryview) -> None:
        # Not a view, whose parts would be copied a second time: a roster has thousands of fields.
        self.data = bytes(data)
        self.position = 0

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        start = self.position
        end = start + count
        if end > len(self.data):
            refusal.refuse("message-truncated", f"a message ends {count} bytes too early")
        self.position = end
        return self.data[start:end]

    @property
    def at_end(self) -> bool:
        """Whether all bytes are read."""
        return self.position == len(self.data)

    def count(self, maximum: int) -> int:
        """Read a length or number of items of at most `maximum`."""
        length: int = _U32.unpack(self.take(4))[0]
        if length > maximum:
            refusal.refuse("message-oversized", f"a field of {length} is longer than {maximum}")
        return length


@dataclasses.dataclass(frozen=True)
class Field(Generic[T]):
    """Encoder and decoder of one field."""

    write: Callable[[T], bytes]
    read: Callable[[Reader], T]


def blob(max_bytes: int) -> Field[bytes]:
    """Up to `max_bytes` bytes."""
    return Field(
        lambda value: _U32.pack(len(value)) + value,
        lambda reader: reader.take(reader.count(max_bytes)),
    )


def exactly(size: int) -> Field[bytes]:
    """Bytes of a fixed length, such as a key."""

    def write(value: bytes) -> bytes:
        if len(value) != size:
            raise ValueError(f"{len(value)} bytes in a field of {size}")
        return value

    return Field(write, lambda reader: reader.take(size))


def text(max_bytes: int) -> Field[str]:
    """UTF-8 of 1 to `max_bytes` bytes."""
    inner = blob(max_bytes)

    def read(reader: Reader) -> str:
        raw = inner.read(reader)
        value = raw.decode("utf-8", errors="replace")
        if not value or value.encode() != raw:
            _not_canonical("a text that is empty or not UTF-8")
        return value

    return Field(lambda value: inner.write(value.encode()), read)


NUMBER: Field[int] = Field(_U64.pack, lambda reader: int(_U64.unpack(reader.take(8))[0]))
"""An unsigned 64-bit integer."""

REAL: Field[float] = Field(_F64.pack, lambda reader: float(_F64.unpack(reader.take(8))[0]))
"""A float64."""

FLAG: Field[bool] = Field(lambda value: bytes([value]), lambda reader: _flag(reader.take(1)[0]))
"""A boolean."""


def items(inner: Field[T], max_items: int = MAX_CLIENTS) -> Field[tuple[T, ...]]:
    """A list of at most `max_items`."""
    return Field(
        lambda values: _U32.pack(len(values)) + b"".join([inner.write(value) for value in values]),
        lambda reader: tuple([inner.read(reader) for _ in range(reader.count(max_items))]),
    )


def row(*fields: Field[Any]) -> Field[tuple[Any, ...]]:
    """A fixed sequence of fields."""
    return Field(
        lambda values: b"".join([f.write(v) for f, v in zip(fields, values, strict=True)]),
        lambda reader: tuple([f.read(reader) for f in fields]),
    )


def optional(inner: Field[T]) -> Field[T | None]:
    """A field that may be absent."""
    return Field(
        lambda value: FLAG.write(False) if value is None else FLAG.write(True) + inner.write(value),
        lambda reader: inner.read(reader) if FLAG.read(reader) else None,
    )


def trailing(inner: Field[T]) -> Field[T | None]:
    """The last field of a message of its own, which may be absent, and then takes no byte."""
    return Field(
        lambda value: b"" if value is None else inner.write(value),
        lambda reader: None if reader.at_end else inner.read(reader),
    )


@dataclasses.dataclass(frozen=True)
class PositionSet:
    """A set of clients, by their positions in the roster."""

    size: int
    """Clients in the roster."""
    indices: frozenset[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __contains__(self, index: object) -> bool:
        return index in self.indices

    @functools.cached_property
    def bits(self) -> bytes:
        """The bitmap: client i is bit i mod 8 of byte i div 8.

        It is part of the key of each mask, of which a client has hundreds.
        """
        if self.indices and not 0 <= min(self.indices) <= max(self.indices) < self.size:
            raise ValueError(f"a member is outside the roster of {self.size}")
        bits = bytearray(-(-self.size // 8))
        for index in self.indices:
            bits[index >> 3] |= 1 << (index & 7)
        return bytes(bits)


def _write_members(members: PositionSet) -> bytes:
    return _U32.pack(members.size) + members.bits


def _read_members(reader: Reader) -> PositionSet:
    size = reader.count(MAX_CLIENTS)
    bits = int.from_bytes(reader.take(-(-size // 8)), "little")
    if bits >> size:
        _not_canonical("a set of clients with bits beyond its size")
    digits = bin(bits)[:1:-1]
    return PositionSet(size, frozenset(i for i, digit in enumerate(digits) if digit == "1"))


POSITION_SET: Field[PositionSet] = Field(_write_members, _read_members)
"""A set of clients."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A protocol message: a tag and its fields in order."""

    TAG: ClassVar[str]
    FIELDS: ClassVar[Mapping[str, Field[Any]]]

    def to_bytes(self) -> bytes:
        """Encode this message; no other encoding is accepted."""
        fields = [field.write(getattr(self, name)) for name, field in self.FIELDS.items()]
        return b"".join([_prefix(self.TAG), *fields])

    @classmethod
    def read(cls, reader: Reader) -> Self:
        """Decode a message nested in other fields."""
        tag = _prefix(cls.TAG)
        if reader.take(len(tag)) != tag:
            refusal.refuse(
                "message-wrong-kind", f"this is not a message {cls.TAG!r} of this protocol version"
            )
        return cls(**{name: field.read(reader) for name, field in cls.FIELDS.items()})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Decode a message strictly.

        Raises:
            PeerMisbehaved: the bytes are not the canonical encoding of a message of this class.
        """
        reader = Reader(data)
        message = cls.read(reader)
        if (trailing := len(reader.data) - reader.position) > 0:
            refusal.refuse("message-trailing", f"{trailing} bytes follow a message {cls.TAG!r}")
        return message


def nested(kind: type[Message]) -> Field[Any]:
    """A message as a field of another message."""
    return Field(lambda value: value.to_bytes(), kind.read)


def one_of(*kinds: type[Message]) -> Field[Any]:
    """A message of one of some classes as a field of another message; their tags differ."""

    def read(reader: Reader) -> Message:
        start = reader.position
        for kind in kinds[:-1]:
            tag = _prefix(kind.TAG)
            if reader.data[start : start + len(tag)] == tag:
                return kind.read(reader)
        return kinds[-1].read(reader)

    return Field(lambda value: value.to_bytes(), read)


def _flag(value: int) -> bool:
    if value > 1:
        _not_canonical("a flag that is neither 0 nor 1")
    return value == 1


def _not_canonical(what: str) -> None:
    refusal.refuse("message-not-canonical", f"a message holds {what}")
