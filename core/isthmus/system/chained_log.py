"""Append-only files of lines, each bound by a hash to the line before it.

A chain shows that a line was changed, removed, inserted or moved. What it cannot show is that the
last lines are missing: for that, an end of the log is kept in another file, its head.

The order of a durable entry is: the line, `fsync`, the head, and only then what depends on the
entry. So a crash leaves a log that is ahead of its head, or a last line without its end, on which
nothing depends; a head that is ahead of its log is a loss.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "names.log"
>>> def take(line: bytes, before: LogEnd) -> str:
...     previous = line.partition(b" ")[0].decode()
...     if previous != before.digest:
...         raise ValueError(f"line {before.number + 1} does not follow the one before")
...     return line_digest(line)
>>> names = ChainedLog(path)
>>> for name in ("Ada", "Grace"):
...     line = f"{names.end.digest} {name}".encode()
...     with path.open("ab", buffering=0) as file:
...         append_line(file.fileno(), line)
...     names.follow(line, line_digest(line))
>>> again = ChainedLog(path)
>>> again.read(take)
>>> again.end == names.end
True
>>> _ = path.write_bytes(path.read_bytes().replace(b"Ada", b"Eve"))
>>> ChainedLog(path).read(take)
Traceback (most recent call last):
    ...
ValueError: line 2 does not follow the one before
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

NO_LINE = "0" * 64
"""Stands for the hash of the line before the first one, where lines are hashed as they are."""


@dataclasses.dataclass(frozen=True)
class LogEnd:
    """A line of a chained log that was the last one when it was noted."""

    number: int
    """Number of the line, from 1; 0 for the empty log."""
    digest: str
    """Hash of the line, in hexadecimal."""


class LineTooLong(ValueError):
    """A line has more bytes than any that was written."""


class ChainedLog:
    """The chain of one file: where it ends, and the hashes of its lines.

    Guarantees:
      * `read` calls its owner with each complete line in order, and no line is skipped;
      * a remembered end is found at the cost of one comparison.

    What a line holds, how it names the line before it, and the sentences for users are the owner's.
    """

    def __init__(
        self, path: Path, *, before_first: str = NO_LINE, max_line: int | None = None
    ) -> None:
        """Set up the chain of an empty log; nothing is read yet.

        Args:
            path: of the file.
            before_first: stands for the hash of the line before the first one.
            max_line: bytes of a line without its end; None for any number.
        """
        self.path = path
        self.size = 0
        """Bytes of the complete lines."""
        self.torn = b""
        """What `read` found after them: a line that a crash cut short, or nothing."""
        self._max_line = max_line
        self._digests = [before_first]

    @property
    def end(self) -> LogEnd:
        """The last line."""
        return LogEnd(len(self._digests) - 1, self._digests[-1])

    def read(self, take: Callable[[bytes, LogEnd], str]) -> None:
        """Read the file, which another process may be appending to.

        Args:
            take: is called with each complete line and the end of the log before it; returns the
                hash of the line, and raises if the line does not follow that end.

        Raises:
            LineTooLong: a line is longer than any that was written.
            OSError: the file cannot be read; `FileNotFoundError` if there is none.
        """
        # One byte more for the end of the line, and one by which a longer line is noticed.
        limit = -1 if self._max_line is None else self._max_line + 2
        with self.path.open("rb") as file:
            while data := file.readline(limit):
                if limit == len(data):
                    raise LineTooLong
                if not data.endswith(b"\n"):
                    self.torn = data
                    break
                line = data[:-1]
                self.follow(line, take(line, self.end))

    def follow(self, line: bytes, digest: str) -> None:
        """Note a line that is on disk, with its hash."""
        self._digests.append(digest)
        self.size += len(line) + 1

    def remove_torn_line(self, file: int | Path) -> None:
        """Cut off what `read` found after the last complete line; only where nobody else writes.

        Nobody has used such a line, because what depends on an entry waits until it is on disk. It
        is removed before the next one is written, which it would become a part of.
        """
        if self.torn:
            os.truncate(file, self.size)
            self.torn = b""

    def lines_after(self, known: LogEnd) -> int | None:
        """How many lines follow one that somebody remembers; None if it is not in the log.

        After a crash there may be more than none. None means that lines were removed, or that it
        is another log.
        """
        if known.number > self.end.number or self._digests[known.number] != known.digest:
            return None
        return self.end.number - known.number


def line_digest(line: bytes) -> str:
    """The SHA-256 of a line without its end, in hexadecimal."""
    return hashlib.sha256(line).hexdigest()


def append_line(file: int, line: bytes) -> None:
    """Append a line and its end to a file that is open to append; it is on disk on return.

    Nobody else may append at the same time: if the line cannot be written, what was written of it
    is removed, so that the next one does not follow half a line.

    Args:
        file: a descriptor, opened with `O_APPEND`.
        line: without its end.

    Raises:
        OSError: it cannot be written; the file is as it was, unless it cannot be cut either.
    """
    size = os.fstat(file).st_size
    try:
        view = memoryview(line + b"\n")
        while view:
            view = view[os.write(file, view) :]
        # The caller acts on the line, or writes the head that names it, as soon as this returns.
        os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise
