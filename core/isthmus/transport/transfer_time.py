"""How long blobs have moved over a link, and at which rate."""

from __future__ import annotations

import math

_SECONDS = 1.0
_BYTES = 1 << 18
"""Time and bytes from which on they tell a rate: buffers on the way take the first ones at once."""

_LEAST_CHUNK = 64 << 10
_CHUNK_SECONDS = 2.0
"""Longest time that a chunk should take."""


class TransferTime:
    """How long blobs have moved to or from a participant, and how many bytes.

    Pauses in which nothing moved are no part of that time. Times are monotonic seconds.

    >>> moved = TransferTime()
    >>> moved.begin(0.0)
    >>> moved.add(300_000, 3.0)
    >>> moved.add(300_000, 5.0)
    >>> moved.seconds, moved.rate
    (5.0, 120000.0)
    """

    LONGEST_PAUSE = 30.0
    """Seconds between two chunks that belong to one transfer: one may be on its way for so long."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        """Bytes that have moved."""
        self.advanced = 0
        """Bytes among them that had not moved before: a transfer can only advance to its end, and
        be repeated for ever."""
        self.moved_at = -math.inf
        """When bytes moved last, or a transfer began."""
        self.has_broken = False
        """Whether the last stream with a transfer broke before what was sent was acknowledged."""

    def begin(self, now: float) -> None:
        """A transfer begins: what was before is no part of it."""
        self.moved_at = now

    def add(self, count: int, now: float, *, again: int = 0) -> None:
        """A chunk of a blob has moved; `again`: how many of its bytes had moved before."""
        if (pause := now - self.moved_at) <= self.LONGEST_PAUSE:
            self.seconds += pause
        self.count += count
        self.advanced += count - again
        self.moved_at = now

    def chunk_bytes(self, usual: int, *, again: bool) -> int:
        """Size of the chunks of the next transfer, at most `usual` bytes.

        A chunk counts as heard from only when all of it is there: one that takes longer than a
        lease ends the stream, and would do so again. So a slow link, and one on which the same
        transfer has broken (`again`), has small ones.

        >>> moved = TransferTime()
        >>> moved.chunk_bytes(1 << 20, again=False), moved.chunk_bytes(1 << 20, again=True)
        (1048576, 65536)
        """
        if again:
            return min(usual, _LEAST_CHUNK)
        if self.rate is None:
            return usual
        return min(usual, max(_LEAST_CHUNK, 1 << int(self.rate * _CHUNK_SECONDS).bit_length() - 1))

    @property
    def rate(self) -> float | None:
        """Bytes per second; None as long as too few have moved to tell."""
        if self.seconds < _SECONDS or self.count < _BYTES:
            return None
        return self.count / self.seconds
