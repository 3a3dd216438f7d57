"""The file of a device's history: an append-only log, chained by hashes, with a head.

    {directory}/history.log    one line for each entry: hash of the line before and of the entry,
                               then the entry as JSON
    {directory}/history.head   the number of lines, and the hash of the last one

An entry is on disk before a message that depends on it is sent. The head is replaced after each
entry, so that a log that was cut is refused: a device that has forgotten sums would help to unmask
others that reveal single updates. `history_files` begins both, and notices that both are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.errors import UpdateError, UserError
from isthmus.system.private_files import write_private_file
from isthmus_clients.training.history_files import LogEnd, head_of, write_head
from isthmus_privacy.secagg.history import Begun, Entry, Masked, Unmasked, essential

log = logging.getLogger(__name__)

_KINDS: dict[str, type[Entry]] = {"begun": Begun, "masked": Masked, "unmasked": Unmasked}
_HEAD = re.compile(rb"(\d{1,18}) ([0-9a-f]{64})\n")
_MIN_COMPACTED = 64
"""A log with fewer superfluous entries is left as it is."""


class HistoryLog:
    """The history of one device on disk.

    Guarantees:
      * after a crash at any instant it is read with all entries that a message may depend on;
      * any other damage of one of its files is refused with a sentence, never ignored; an older
        copy of both, or of the whole state directory, is not noticed;
      * each entry costs the same, however many there are.
    """

    def __init__(self, path: Path) -> None:
        """Read the log and its head, which `begin_history` has begun.

        Raises:
            UserError: they are missing, cannot be read, or do not belong together.
        """
        self._path = path
        self._head = head_of(path)
        self.entries: list[Entry] = []
        """The entries that were read."""
        self._end = LogEnd()
        self._size = 0
        try:
            self._read()
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise UserError(
                f"{path} records which sums this device was in, and cannot be used ({error}); "
                "restore it and its .head as they were, or begin a new record with `isthmus client "
                "new-history`"
            ) from None
        self._compact()

    def append(self, entry: Entry) -> None:
        """Write an entry durably.

        Raises:
            UpdateError: it cannot be written, so the device must not act on it.
        """
        body = _encode(entry)
        end = self._end.then(body)
        try:
            with self._open() as handle:
                try:
                    _write(handle, end.line(body))
                    write_head(self._path, end)
                except OSError:
                    # The head still names the end before: nothing depends on the new line, and the
                    # next entry must not follow a half-written one.
                    if self._read_head() == [self._end]:
                        os.ftruncate(handle, self._size)
                    raise
        except OSError as error:
            raise UpdateError(
                f"this device cannot record which sums it was in ({error.strerror}), and does "
                "not aggregate without that record"
            ) from None
        self._end = end
        self._size += len(end.line(body))

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> None:
        data = self._path.read_bytes() if self._path.exists() else b""
        heads = self._read_head()
        *lines, tail = data.split(b"\n")
        before = None
        end = LogEnd()
        for line in lines:
            # After 64 hexadecimal digits and a space.
            body = line[65:]
            before = end
            end = end.then(body)
            if end.line(body) != line + b"\n":
                raise ValueError(f"line {end.count} does not follow the one before")
            self.entries.append(_decode(body))
        # The process may have stopped after the last line was written and before the head was.
        one_more = not tail and heads == [before]
        if end not in heads and not one_more:
            raise ValueError(f"it has {len(lines)} complete lines, which is not where it ended")
        self._end = end
        self._size = len(data) - len(tail)
        if tail:  # it stopped while it wrote a line that nothing depends on yet
            os.truncate(self._path, self._size)
        # Brought up to date, so that the same crash a second time is not two entries ahead.
        if one_more or len(heads) > 1:
            write_head(self._path, self._end)

    def _compact(self) -> None:
        """Write the log anew without superfluous entries, if that makes it much shorter."""
        kept = essential(self.entries)
        if len(self.entries) - len(kept) < max(_MIN_COMPACTED, len(kept)):
            return
        end = LogEnd()
        lines = []
        for entry in kept:
            body = _encode(entry)
            end = end.then(body)
            lines.append(end.line(body))
        data = b"".join(lines)
        try:
            write_head(self._path, self._end, end)  # whichever log is there after a crash
            write_private_file(self._path, data)
            self._end = end
            self._size = len(data)
            write_head(self._path, end)
        except OSError as error:
            log.warning("%s stays long: %s", self._path, error.strerror)

    def _read_head(self) -> list[LogEnd]:
        data = self._head.read_bytes()
        lines = list(_HEAD.finditer(data))
        if not 1 <= len(lines) <= 2 or b"".join(line.group() for line in lines) != data:
            raise ValueError(f"{self._head.name} is damaged")
        return [LogEnd(int(line[1]), line[2].decode()) for line in lines]

    # -- writing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # Two processes with one identity would each miss the sums that the other one was in.
            if os.fstat(handle).st_size != self._size:
                raise OSError(0, f"{self._path.name} was changed by another process")
            yield handle
        finally:
            os.close(handle)


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
    # The caller acts on the entry as soon as this returns.
    os.fsync(handle)


def _encode(entry: Entry) -> bytes:
    kind = next(name for name, cls in _KINDS.items() if isinstance(entry, cls))
    values = [
        value.hex() if isinstance(value, bytes) else value for value in dataclasses.astuple(entry)
    ]
    return json.dumps([kind, *values], separators=(",", ":")).encode()


def _decode(body: bytes) -> Entry:
    kind, *values = json.loads(body)
    made: Any = _KINDS[kind]
    entry: Entry = made(
        *(
            bytes.fromhex(value) if field.type == "bytes" else value
            for field, value in zip(dataclasses.fields(made), values, strict=True)
        )
    )
    return entry
