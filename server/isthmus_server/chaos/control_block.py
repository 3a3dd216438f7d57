"""A small file in shared memory by which the injector tells one process which faults it has now."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

NO_FAULT, IO_ERROR, FULL_DISK, TORN_WRITE = range(4)
"""What the process's writes meet."""

_LAYOUT = struct.Struct("<dqq")


class ControlBlock:
    """The faults of one process: an offset of its clock, and a fault of its disk.

    The file is mapped, so that a change applies at the next call, also in processes forked from
    that one, and stays when the process is started again.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    @property
    def clock_offset(self) -> float:
        """Seconds that the process adds to the time."""
        offset: float = _LAYOUT.unpack_from(self._map)[0]
        return offset

    @property
    def disk(self) -> int:
        """`NO_FAULT`, or the fault that every write of the process meets."""
        fault: int = _LAYOUT.unpack_from(self._map)[1]
        return fault

    @property
    def hits(self) -> int:
        """Calls that met a fault."""
        count: int = _LAYOUT.unpack_from(self._map)[2]
        return count

    def set_clock_offset(self, seconds: float) -> None:
        """Set the clock of the process."""
        struct.pack_into("<d", self._map, 0, seconds)

    def set_disk(self, fault: int) -> None:
        """Let writes fail, or succeed again."""
        struct.pack_into("<q", self._map, 8, fault)

    def count_hit(self) -> None:
        """Count a call that met a fault; two threads may count one instead of two."""
        struct.pack_into("<q", self._map, 16, self.hits + 1)
