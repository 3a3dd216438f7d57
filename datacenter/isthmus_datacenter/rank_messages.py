"""Messages between ranks: JSON of a known form, bounded and signed, in tensors over a group.

PyTorch's collectives of objects (`all_gather_object`, and those of `torch.distributed.checkpoint`)
unpickle what arrives, and a pickle executes code. gloo authenticates nobody: a program that
connects to a rank before another rank does is taken for that one. So ranks exchange nothing but
tensors and these messages. Each is followed by a code (HMAC-SHA-256, RFC 2104) under a key of this
start of the ranks, over what it is about, its group, its number there, its sender and its content;
it is read only if the code is right. Sizes are exchanged first, and checked before anything is
allocated.

Messages are for groups whose tensors on the processor go through gloo.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from isthmus.errors import IsthmusError

KEY_BYTES = 32
MESSAGE_BYTES = 1 << 18
"""Most bytes of a message unless its kind has another limit."""
TEXT_CHARACTERS = 1 << 14
"""Longer texts are cut by who sends them: as JSON they then fit into a message."""
_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size

T = TypeVar("T")


class RankMessageError(IsthmusError):
    """A message that no rank of this group has sent, or that is too long."""


class _Key:
    """The key of this process's ranks, and the number of messages so far in each group."""

    value: ClassVar[bytes | None] = None
    counts: ClassVar[collections.Counter[str]] = collections.Counter()


def set_key(key: bytes) -> None:
    """Sign the messages of this process from now on; all ranks of a group have the same key."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    _Key.value = key
    _Key.counts.clear()


def derived_key(secret: bytes, about: str) -> bytes:
    """A key for messages, from a secret that signs other things, too.

    >>> derived_key(bytes(32), "1.0") == derived_key(bytes(32), "1.1")
    False
    """
    return hmac.digest(secret, f"messages between ranks {about}".encode(), _DIGEST)


class RankMessages(Generic[T]):
    """One kind of message.

    All ranks of a group call a method together; groups of one rank exchange nothing. What others
    have sent is new, of the given form: tuples and sets are made of JSON's lists.

    Methods raise `RankMessageError` for a message that is too long, on all ranks, and for one that
    is not signed, is about something else, or is not of the form.
    """

    def __init__(self, about: str, form: Any, most: int = MESSAGE_BYTES) -> None:
        """Describe the messages.

        Args:
            about: names the kind, in messages and errors.
            form: a type that pydantic can check, such as a dataclass of numbers and texts.
            most: bytes of a message.
        """
        self._about = about
        self._form: TypeAdapter[T] = TypeAdapter(form)
        self._most = most

    def all_gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Send a value to all ranks of a group; returns those of all, by rank."""
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return [value]
        place = _Place.next(self._about, group)
        own = self._encoded(value, place)
        sizes = self._gathered_sizes(len(own), place)
        # As long as the longest, which the collective needs.
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return [
            self._decoded(part[:size], place, sender)
            for sender, (part, size) in enumerate(zip(parts, sizes, strict=True))
        ]

    def broadcast(self, value: T, group: dist.ProcessGroup | None = None) -> T:
        """Send the first rank's value to all ranks of a group; that of others is not used."""
        if dist.get_world_size(group) == 1:
            return value
        place = _Place.next(self._about, group)
        content = self._encoded(value, place) if place.rank == 0 else None
        size = torch.tensor([0 if content is None else len(content)])
        dist.broadcast(size, group=group, group_src=0)
        (count,) = self._checked([int(size)])
        if content is None:
            content = torch.empty(count, dtype=torch.uint8)
        dist.broadcast(content, group=group, group_src=0)
        return self._decoded(content, place, 0)

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
        """Send a value to the first rank of a group; returns those of all there, by rank."""
        if dist.get_world_size(group) == 1:
            return [value]
        place = _Place.next(self._about, group)
        own = self._encoded(value, place)
        sizes = self._gathered_sizes(len(own), place)
        if place.rank:
            dist.send(own, group=group, group_dst=0)
            return None
        # Not padded: there may be a thousand ranks, and one message much longer than others.
        parts = [own, *(torch.empty(size, dtype=torch.uint8) for size in sizes[1:])]
        for sender, part in enumerate(parts):
            if sender:
                dist.recv(part, group=group, group_src=sender)
        return [self._decoded(part, place, sender) for sender, part in enumerate(parts)]

    def scatter(self, values: Sequence[T] | None, group: dist.ProcessGroup | None = None) -> T:
        """Send a value to each rank of a group from the first one, which has those of all."""
        ranks = dist.get_world_size(group)
        if ranks == 1:
            assert values is not None
            return values[0]
        place = _Place.next(self._about, group)
        if place.rank:
            sizes = torch.zeros(ranks, dtype=torch.int64)
            dist.broadcast(sizes, group=group, group_src=0)
            size = self._checked(sizes.tolist())[place.rank]
            content = torch.empty(size, dtype=torch.uint8)
            dist.recv(content, group=group, group_src=0)
            return self._decoded(content, place, 0, receiver=place.rank)
        assert values is not None
        parts = [
            self._encoded(value, place, receiver=receiver) for receiver, value in enumerate(values)
        ]
        sizes = torch.tensor([len(part) for part in parts])
        dist.broadcast(sizes, group=group, group_src=0)
        self._checked(sizes.tolist())
        for receiver, part in enumerate(parts):
            if receiver:
                dist.send(part, group=group, group_dst=receiver)
        return values[0]

    def send(self, value: T, to: int, group: dist.ProcessGroup | None = None) -> None:
        """Send a value to one rank of a group, which calls `receive`; others do not take part."""
        place = _Place.between(self._about, group, to=to)
        own = self._encoded(value, place, receiver=to)
        self._checked([len(own)], place.rank)
        dist.send(torch.tensor([len(own)]), group=group, group_dst=to)
        dist.send(own, group=group, group_dst=to)

    def receive(self, source: int, group: dist.ProcessGroup | None = None) -> T:
        """The value that one rank of a group sends to this one."""
        place = _Place.between(self._about, group, source=source)
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group=group, group_src=source)
        (count,) = self._checked([int(size)], source)
        content = torch.empty(count, dtype=torch.uint8)
        dist.recv(content, group=group, group_src=source)
        return self._decoded(content, place, source, receiver=place.rank)

    def _gathered_sizes(self, own: int, place: _Place) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(place.ranks)]
        dist.all_gather(sizes, torch.tensor([own]), group=place.group)
        return self._checked([int(size) for size in sizes])

    def _checked(self, sizes: list[int], first: int = 0) -> list[int]:
        """Refuse sizes, the first of rank `first`, before memory is allocated for them."""
        for sender, size in enumerate(sizes, first):
            if not _DIGEST_BYTES < size <= self._most:
                raise RankMessageError(
                    f"rank {sender} of a group announced {size} bytes about {self._about!r}; the "
                    f"maximum is {self._most}"
                )
        return sizes

    def _encoded(self, value: T, place: _Place, receiver: int | None = None) -> torch.Tensor:
        content = json.dumps(value, default=_plain, separators=(",", ":")).encode()
        code = place.code(place.rank, receiver, content)
        return torch.frombuffer(bytearray(content + code), dtype=torch.uint8)

    def _decoded(
        self, received: torch.Tensor, place: _Place, sender: int, receiver: int | None = None
    ) -> T:
        message = received.numpy().tobytes()
        content = message[:-_DIGEST_BYTES]
        code = place.code(sender, receiver, content)
        if not hmac.compare_digest(message[-_DIGEST_BYTES:], code):
            raise RankMessageError(
                f"a message about {self._about!r} is not signed by rank {sender} of the group: "
                "another program has taken that rank's place, or the ranks are not at the same "
                "point"
            )
        try:
            return self._form.validate_python(json.loads(content))
        except (ValidationError, ValueError, RecursionError):
            raise RankMessageError(
                f"a message about {self._about!r} of rank {sender} of the group has another form"
            ) from None


@dataclasses.dataclass(frozen=True)
class _Place:
    """One exchange of messages within a group."""

    about: str
    group: dist.ProcessGroup | None
    name: str
    """Name of the group, and of the two ranks of it that exchange something alone."""
    number: int
    """Number of the exchange, among all of the group, or all from one of its ranks to another."""
    rank: int
    ranks: int

    @classmethod
    def next(cls, about: str, group: dist.ProcessGroup | None) -> _Place:
        """The next one."""
        return cls._of(about, group, "")

    @classmethod
    def between(
        cls,
        about: str,
        group: dist.ProcessGroup | None,
        *,
        source: int | None = None,
        to: int | None = None,
    ) -> _Place:
        """The next one from one rank to another; the one that is None is this rank."""
        own = dist.get_rank(group)
        pair = f" from {own if source is None else source} to {own if to is None else to}"
        return cls._of(about, group, pair)

    @classmethod
    def _of(cls, about: str, group: dist.ProcessGroup | None, pair: str) -> _Place:
        used = dist.group.WORLD if group is None else group
        assert used is not None
        name = used.group_name + pair
        _Key.counts[name] += 1
        return cls(about, group, name, _Key.counts[name], used.rank(), used.size())

    def code(self, sender: int, receiver: int | None, content: bytes) -> bytes:
        """The signature of a message; without a receiver it is for the whole group."""
        if _Key.value is None:
            raise RuntimeError("this process has no key for messages to other ranks")
        head = json.dumps([self.about, self.name, self.number, sender, receiver]).encode()
        # The length keeps the two apart: no other head and content are the same bytes.
        signed = len(head).to_bytes(8, "big") + head + content
        return hmac.digest(_Key.value, signed, _DIGEST)


def _plain(value: object) -> object:
    """What JSON has no form for: dataclasses, sets, and other sequences and mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, AbstractSet):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a message cannot have a {type(value).__name__}")
