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
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.errors import UpdateError, UserError
from isthmus.system.chained_log import ChainedLog, LogEnd, append_line
from isthmus.system.private_files import write_private_file
from isthmus_clients.training.history_files import EMPTY, head_of, write_head
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
        self._log = ChainedLog(path, before_first=EMPTY.digest)
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
        before = self._log.end
        line, digest = _line(before, _encode(entry))
        try:
            with self._open() as handle:
                append_line(handle, line)
                try:
                    write_head(self._path, LogEnd(before.number + 1, digest))
                except OSError:
                    # If the head still names the end before, nothing depends on the new line. If it
                    # was replaced, and only its directory not synchronised, it names the new one.
                    if self._read_head() == [before]:
                        os.ftruncate(handle, self._log.size)
                    raise
        except OSError as error:
            raise UpdateError(
                f"this device cannot record which sums it was in ({error.strerror}), and does "
                "not aggregate without that record"
            ) from None
        self._log.follow(line, digest)

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> None:
        if self._path.exists():  # it does not before the first entry
            self._log.read(self._take)
        heads = self._read_head()
        after = [self._log.lines_after(head) for head in heads]
        # The process may have stopped after the last line was written and before the head was.
        one_more = not self._log.torn and after == [1]
        if 0 not in after and not one_more:
            raise ValueError(
                f"it has {self._log.end.number} complete lines, which is not where it ended"
            )
        self._log.remove_torn_line(self._path)
        # Brought up to date, so that the same crash a second time is not two entries ahead.
        if one_more or len(heads) > 1:
            write_head(self._path, self._log.end)

    def _take(self, line: bytes, before: LogEnd) -> str:
        # After 64 hexadecimal digits and a space.
        body = line[65:]
        expected, digest = _line(before, body)
        if line != expected:
            raise ValueError(f"line {before.number + 1} does not follow the one before")
        self.entries.append(_decode(body))
        return digest

    def _compact(self) -> None:
        """Write the log anew without superfluous entries, if that makes it much shorter."""
        kept = essential(self.entries)
        if len(self.entries) - len(kept) < max(_MIN_COMPACTED, len(kept)):
            return
        shorter = ChainedLog(self._path, before_first=EMPTY.digest)
        lines = []
        for entry in kept:
            line, digest = _line(shorter.end, _encode(entry))
            shorter.follow(line, digest)
            lines.append(line + b"\n")
        try:
            # Whichever log is there after a crash.
            write_head(self._path, self._log.end, shorter.end)
            write_private_file(self._path, b"".join(lines))
            self._log = shorter
            write_head(self._path, shorter.end)
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
            if os.fstat(handle).st_size != self._log.size:
                raise OSError(0, f"{self._path.name} was changed by another process")
            yield handle
        finally:
            os.close(handle)


def _line(before: LogEnd, body: bytes) -> tuple[bytes, str]:
    """The line of an entry that follows an end of the log, and its hash."""
    digest = hashlib.sha256(before.digest.encode() + b" " + body).hexdigest()
    return digest.encode() + b" " + body, digest


def _encode(entry: Entry) -> bytes:
    kind = next(name for name, cls in _KINDS.items() if isinstance(entry, cls))
    values = [
        value.hex() if isinstance(value, bytes) else value for value in dataclasses.astuple(entry)
    ]
    if isinstance(entry, Unmasked) and not entry.vector:
        del values[4:]  # as the earlier version wrote it
    if isinstance(entry, Masked) and entry.trained is None:
        del values[2:]  # likewise
    return json.dumps([kind, *values], separators=(",", ":")).encode()


def _decode(body: bytes) -> Entry:
    kind, *values = json.loads(body)
    made: Any = _KINDS[kind]
    # Entries of earlier versions end before the fields that have a default.
    fields = dataclasses.fields(made)[: len(values)]
    entry: Entry = made(
        *(
            bytes.fromhex(value) if field.type == "bytes" else value
            for field, value in zip(fields, values, strict=True)
        )
    )
    return entry
