"""What tells one file or directory from each copy of it, also one that has its inode number.

An inode number is used again: `ext4` gives that of a deleted file to the next one, and the first
files of two new volumes have the same numbers. So the generation of the inode, a random number that
most Linux file systems give to each use of it, and the time at which it was made belong to the
identity. The number of the device does not: it changes when a machine starts again.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> identity = FileIdentity.of(folder)
>>> identity == FileIdentity.of(folder), identity.accepts(FileIdentity.of(folder.parent))
(True, False)
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import fcntl
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_GET_GENERATION = (2 << 30) | (struct.calcsize("l") << 16) | (ord("v") << 8) | 1
"""`FS_IOC_GETVERSION`, as most processors encode it (ioctl_iflags(2)); others answer an error."""
_EMPTY_PATH = 0x1000
_BORN = 0x800
_STATX_BYTES = 256
_BORN_AT = 80
"""Offset of `stx_btime` in `struct statx` (statx(2)): int64 seconds, uint32 nanoseconds."""


@dataclasses.dataclass(frozen=True)
class FileIdentity:
    """Identity of one file or directory; what its file system does not have is None."""

    inode: int
    generation: int | None = None
    """Generation number of the inode, 32 bits."""
    born: int | None = None
    """When it was made, in Unix nanoseconds."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """The identity of a file or directory.

        Raises:
            OSError: it cannot be opened.
        """
        handle = os.open(path, os.O_RDONLY)
        try:
            return cls.of_open(handle)
        finally:
            os.close(handle)

    @classmethod
    def of_open(cls, handle: int) -> Self:
        """The identity of an open file or directory, by its descriptor."""
        return cls(os.fstat(handle).st_ino, _generation(handle), _born(handle))

    @classmethod
    def read(cls, values: Mapping[str, int | None]) -> Self:
        """The inverse of `dataclasses.asdict`; what is missing was not recorded."""
        inode = values["inode"]
        assert inode is not None
        return cls(inode, values.get("generation"), values.get("born"))

    def accepts(self, found: FileIdentity) -> bool:
        """Whether what was found is what this was recorded of, by all that was recorded."""
        return (
            self.inode == found.inode
            and self.generation in (None, found.generation)
            and self.born in (None, found.born)
        )


def _generation(handle: int) -> int | None:
    answer = array.array("l", [0])
    try:
        fcntl.ioctl(handle, _GET_GENERATION, answer)
    except OSError:
        return None
    # 32 bits are written. File systems that have none, and the first directory of a volume, say 0.
    return int(struct.unpack_from("I", answer)[0]) or None


def _born(handle: int) -> int | None:
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)  # Linux, since 2018
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(handle, b"", _EMPTY_PATH, _BORN, buffer) != 0:
        return None
    if not struct.unpack_from("I", buffer)[0] & _BORN:
        return None
    seconds, nanoseconds = struct.unpack_from("qI", buffer, _BORN_AT)
    return (int(seconds) * 1_000_000_000 + int(nanoseconds)) or None
