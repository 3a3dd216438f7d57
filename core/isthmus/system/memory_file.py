"""Memory that several processes share: a file without a name, of a fixed size.

Another process maps it by its descriptor, which it gets over a `channel.Channel`, or opens it as
`/proc/PID/fd/N` (`isthmus.transport.shared_memory`).

>>> memory = MemoryFile(5)
>>> memory[:] = b"hello"
>>> copy = bytearray(3)
>>> memory.copy(2, memoryview(copy))
>>> bytes(copy)
b'llo'
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref


class MemoryFile(mmap.mmap):
    """Zeroed memory of a fixed size (memfd_create(2)).

    Guarantees:
      * no process that has it can make it shorter, so that no access to it fails (its size is
        sealed);
      * processes that have opened or mapped it keep the memory when this object is gone.
    """

    handle: int
    """Descriptor of the file."""

    def __new__(cls, size: int) -> MemoryFile:
        """Allocate `size` bytes, at least one; pages are taken when they are written.

        Raises:
            OSError: there is no room.
        """
        handle = os.memfd_create("isthmus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(handle, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
            self = super().__new__(cls, handle, size)
        except BaseException:
            os.close(handle)
            raise
        self.handle = handle
        weakref.finalize(self, os.close, handle).atexit = False
        return self

    def copy(self, start: int, out: memoryview) -> None:
        """Read `len(out)` bytes from `start` into private memory, which no process changes then."""
        done = 0
        while done < len(out):
            done += os.preadv(self.handle, [out[done:]], start + done)


def mapped(handle: int, *, filled: bool = False) -> mmap.mmap:
    """The memory of another process's `MemoryFile`; closes the descriptor.

    Args:
        handle: the file's descriptor in this process.
        filled: whether all of it will be used, so that its pages are found at once.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if filled else 0)
    try:
        return mmap.mmap(handle, 0, flags)
    finally:
        os.close(handle)
