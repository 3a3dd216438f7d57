"""A small file in shared memory that tells a process which faults it has, and counts its steps."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

NO_FAULT, IO_ERROR, FULL_DISK, TORN_WRITE = range(4)
"""What the process's writes meet."""

_LAYOUT = struct.Struct("<dqqqq")
_CLOCK, _DISK, _HITS, _STEPS, _CRASH = range(0, _LAYOUT.size, 8)
NEVER = 0
"""No crash is planned."""


class ControlBlock:
    """The faults of one process: an offset of its clock, and a fault of its disk.

    The file is mapped, so that a change applies at the next call, also in processes forked from
    that one, and stays when the process is started again.
    """

    def __init__(self, path: Path) -> None:
        self._crash_note = path.with_suffix(".crash")
        if not path.exists():
            path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    @property
    def clock_offset(self) -> float:
        """Seconds that the process adds to the time."""
        offset: float = struct.unpack_from("<d", self._map, _CLOCK)[0]
        return offset

    @clock_offset.setter
    def clock_offset(self, seconds: float) -> None:
        struct.pack_into("<d", self._map, _CLOCK, seconds)

    @property
    def disk(self) -> int:
        """`NO_FAULT`, or the fault that every write of the process meets."""
        return self._get(_DISK)

    @disk.setter
    def disk(self, fault: int) -> None:
        self._set(_DISK, fault)

    @property
    def hits(self) -> int:
        """Calls that met a fault."""
        return self._get(_HITS)

    def count_hit(self) -> None:
        """Count a call that met a fault; two threads may count one instead of two."""
        self._set(_HITS, self.hits + 1)

    @property
    def steps(self) -> int:
        """Durable steps that the process and those forked from it have made."""
        return self._get(_STEPS)

    @property
    def crash_at(self) -> int:
        """Twice the step at which the process kills itself, plus one for after it; or `NEVER`."""
        return self._get(_CRASH)

    @crash_at.setter
    def crash_at(self, moment: int) -> None:
        self._set(_CRASH, moment)

    def reach(self, moment: int) -> bool:
        """Whether the process has to kill itself at a moment; it does so once."""
        if moment % 2 == 0:
            self._set(_STEPS, moment // 2)
        if self.crash_at != moment:
            return False
        self.crash_at = NEVER
        return True

    def note_crash(self, about: str) -> None:
        """Write down the step at which the process crashes."""
        self._crash_note.write_text(about)

    def take_crash(self) -> str:
        """The step at which the process crashed since the last call; empty if it did not."""
        about = self._crash_note.read_text() if self._crash_note.exists() else ""
        self._crash_note.unlink(missing_ok=True)
        return about

    def _get(self, at: int) -> int:
        value: int = struct.unpack_from("<q", self._map, at)[0]
        return value

    def _set(self, at: int, value: int) -> None:
        struct.pack_into("<q", self._map, at, value)
