"""Large memory that can be given back for a while, and is cheap to get.

>>> pages = MmapBuffer(1000)
>>> pages.view[:3] = b"abc"
>>> bytes(pages.view[:3]), len(pages.view)
(b'abc', 1000)
"""

from __future__ import annotations

import mmap

import torch

LARGE_BYTES = 512 << 20
"""Memory from which on it is worth the time to give it back and to get it again."""

_HUGE_PAGES_FROM = 64 << 20


class MmapBuffer:
    """Zeroed memory of this process alone.

    Where the kernel has huge pages to give, it is asked for those: a fresh page of the usual size
    costs more time than what is written into it.
    """

    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, max(size, 1), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE_PAGES_FROM:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)[:size]
        """All of it, to read and to write."""

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as a vector."""
        if not len(self.view):
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.view, dtype=dtype)

    def give_back(self, start: int = 0) -> None:
        """Let go of what lies from byte `start` on; what it holds after that is anything."""
        start += -start % mmap.PAGESIZE
        if len(self.view) - start > LARGE_BYTES // 2:
            self._map.madvise(mmap.MADV_DONTNEED, start)
