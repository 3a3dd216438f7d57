"""Large zeroed buffers whose memory can be released to the kernel and used again.

>>> buffer = MmapBuffer(1000)
>>> buffer.view[:3] = b"abc"
>>> bytes(buffer.view[:3]), len(buffer.view)
(b'abc', 1000)
"""

from __future__ import annotations

import mmap

import torch

from isthmus.system.memory_file import MemoryFile

LARGE_BYTES = 512 << 20
"""Size from which it is worth the time to release memory and to allocate it again."""

_MIN_HUGE_PAGE_BYTES = 64 << 20


class MmapBuffer:
    """Zeroed memory of this process, in huge pages where the kernel provides them.

    Huge pages matter because the first access to a page of the usual size takes longer than
    writing the data into it.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        """Allocate `size` bytes; other processes of the user can open `shared` memory."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = MemoryFile(max(size, 1)) if shared else mmap.mmap(-1, max(size, 1), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= _MIN_HUGE_PAGE_BYTES:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)[:size]
        """All bytes, readable and writable."""

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All elements as a vector that shares the memory."""
        if not len(self.view):
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype)

    def release(self, start: int = 0) -> None:
        """Release the memory from byte `start` on, if it is large; its contents are undefined then.

        The buffer can be written again at any time.
        """
        start += -start % mmap.PAGESIZE
        if len(self.view) - start > LARGE_BYTES // 2:
            is_shared = isinstance(self._map, MemoryFile)
            self._map.madvise(mmap.MADV_REMOVE if is_shared else mmap.MADV_DONTNEED, start)
