"""The head file of a database: its seal as of the last important commit.

A round has two such commits, and each waits until its head is on disk. So a head is written in
place: the file has two places, and the older one is overwritten and flushed, which is a seventh of
the time that a new file, its name and its directory take. A place is in one block of the disk,
which is written whole or not at all; after a crash in between, the other place has the head before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from pathlib import Path

from isthmus.errors import DamagedError
from isthmus.system.file_lock import is_in_place
from isthmus.system.private_files import write_private_file
from isthmus.system.sealed_files import sealed_json, unsealed_json

PLACE = 4096
"""Bytes of each place: no block of a disk has a part of both."""
_READS = 3
"""Reads until a head counts as damaged: one may fall into a write of another process."""


@dataclasses.dataclass(frozen=True)
class Seal:
    """The state of a database."""

    changes: int
    """Rows that were inserted, updated or deleted since it was created."""
    total: bytes
    """Sum of the SHA-256 of its rows modulo 2^256, 32 bytes."""


class HeadFile:
    """The head of one database."""

    def __init__(self, path: Path) -> None:
        """`path`: of the file, which need not exist."""
        self.path = path

    def read(self) -> Seal | None:
        """The newest head; None if there is no file.

        Raises:
            DamagedError: it is not what was written.
            OSError: it cannot be read.
        """
        places = self._places()
        return max(places, key=lambda seal: seal.changes) if places else None

    def write(self, seal: Seal) -> None:
        """Write a head that is on disk when this returns, unless there is a newer one.

        A damaged file is replaced. Of several processes one writes at a time.

        Raises:
            OSError: it cannot be written.
        """
        while not self._written(seal):
            pass  # another process has put a new file there

    def _written(self, seal: Seal) -> bool:
        """Write a head; returns whether the file was still there when it was locked."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return self._written_first(seal)
        try:
            # Another process would overwrite the place that this one has written meanwhile.
            fcntl.flock(file, fcntl.LOCK_EX)
            if not is_in_place(file, self.path):
                return False
            self._write_to(file, seal)
        finally:
            os.close(file)
        return True

    def _written_first(self, seal: Seal) -> bool:
        """Write the first head; returns whether there still was none when it could be written."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # There is no file to lock yet. NFS has no locks of folders.
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            if self.path.exists():
                return False
            write_private_file(self.path, _encoded(seal) * 2)
        finally:
            os.close(folder)
        return True

    def _write_to(self, file: int, seal: Seal) -> None:
        try:
            places = self._places()
        except DamagedError:
            places = ()
        newest = max(places, key=lambda place: place.changes, default=seal)
        if len(places) < 2:
            latest = max((newest, seal), key=lambda each: each.changes)
            write_private_file(self.path, _encoded(latest) * 2)
            return
        place = 0 if places[0].changes < places[1].changes else 1
        if newest.changes >= seal.changes:
            # It may be in memory only: of a process that was killed, or whose disk failed.
            seal = newest
            place = places.index(newest)
        os.pwrite(file, _encoded(seal), place * PLACE)
        os.fdatasync(file)

    def _places(self) -> tuple[Seal, ...]:
        """What both places have; one head in a file of earlier versions, none without a file."""
        for _ in range(_READS):
            try:
                with self.path.open("rb") as file:
                    data = file.read(2 * PLACE + 1)
            except FileNotFoundError:
                return ()
            if len(data) == 2 * PLACE:
                seals = (_decoded(data[:PLACE]), _decoded(data[PLACE:]))
                if seals[0] is not None and seals[1] is not None:
                    return seals[0], seals[1]
            elif not data.endswith(b" ") and (earlier := _decoded(data)) is not None:
                return (earlier,)
        raise DamagedError(f"{self.path} is damaged: it is not what was written")


def _encoded(seal: Seal) -> bytes:
    return sealed_json({"changes": seal.changes, "total": seal.total.hex()}).ljust(PLACE)


def _decoded(content: bytes) -> Seal | None:
    """The seal in a place, or in a file of earlier versions; None if it is damaged."""
    values = unsealed_json(content.rstrip(b" "))
    if values is None:
        return None
    return Seal(int(values["changes"]), bytes.fromhex(values["total"]))
