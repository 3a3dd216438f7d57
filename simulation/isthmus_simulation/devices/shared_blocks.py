"""Memory that a process shares with its forks, in blocks of one size."""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections.abc import Sequence

from isthmus.system.memory_file import MemoryFile, mapped
from isthmus.transport.blobs import Buffer

_ALIGNED = 64  # bytes
_BLOCKS = 64  # of the first mapping


class _Block(ctypes.Array[ctypes.c_ubyte]):
    """The bytes of a block; exists as long as anything refers to them."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    number: int

    @classmethod
    @functools.cache
    def of_size(cls, size: int) -> type[_Block]:
        return type(cls.__name__, (cls,), {"_length_": size})


class SharedBlocks:
    """Blocks of one size, which this process hands out and its forks find by their numbers.

    A block is handed out again once nothing refers to it in this process. Its pages take memory
    when they are used for the first time, and keep it until this object and all blocks are gone.

    >>> blocks = SharedBlocks(100)
    >>> one, other = blocks.new(100), blocks.new(5)
    >>> one[0] = 7
    >>> SharedBlocks.number(one), SharedBlocks.number(other), blocks.find(0, 100)[0]
    (0, 1, 7)
    >>> del one
    >>> SharedBlocks.number(blocks.new(3))
    0
    """

    def __init__(self, block_bytes: int) -> None:
        """Allocate nothing yet; `block_bytes` is the size of the largest block."""
        self.block_bytes = block_bytes
        self._stride = -(-block_bytes // _ALIGNED) * _ALIGNED
        self._mappings: list[mmap.mmap] = []
        """Each of twice as many blocks as the one before, so that a million need few files."""
        self._free: list[int] = []

    def new(self, size: int) -> memoryview:
        """A block that nothing refers to, with any contents."""
        if not self._free:
            count = _BLOCKS << len(self._mappings)
            first = count - _BLOCKS
            self._mappings.append(MemoryFile(count * self._stride))
            self._free.extend(range(first + count - 1, first - 1, -1))  # blocks know this list
        number = self._free.pop()
        block = self._mapped(number, size)
        block.number = number
        # Called when the last view is gone, on whatever thread.
        weakref.finalize(block, self._free.append, number).atexit = False
        return memoryview(block).cast("B")

    @staticmethod
    def number(view: Buffer) -> int:
        """The number of the block that a view is of; the view is of `new`."""
        block = memoryview(view).obj
        assert isinstance(block, _Block)
        return block.number

    def handles(self, first: int) -> list[int]:
        """Descriptors of the memory from the mapping with this number on, for a fork."""
        files = self._mappings[first:]
        return [each.handle for each in files if isinstance(each, MemoryFile)]

    def add(self, handles: Sequence[int]) -> None:
        """Map memory that the process of the blocks has passed, in a fork, which has its own."""
        self._mappings.extend(map(mapped, handles))

    def find(self, number: int, size: int) -> memoryview:
        """The first bytes of a block; in a fork valid until the block is free."""
        return memoryview(self._mapped(number, size)).cast("B")

    def _mapped(self, number: int, size: int) -> _Block:
        assert size <= self.block_bytes
        mapping = ((number + _BLOCKS) // _BLOCKS).bit_length() - 1
        place = number + _BLOCKS - (_BLOCKS << mapping)
        return _Block.of_size(size).from_buffer(self._mappings[mapping], place * self._stride)
