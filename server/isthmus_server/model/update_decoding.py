"""Receive updates: buffer their bytes, decode them to values, check them, and add them to a sum.

`decode_tile` is the single place where the bytes of a plaintext update become values, and
`check_tile` the single place where those values are checked. Another encoding of updates, such as
a compressed one, would be decoded there.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import torch

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.fixed_point_sum import MAGNITUDE_BITS, TILE, WeightedSum

_ELEMENT_BYTES = 4
_MAX_MAGNITUDE = float(1 << MAGNITUDE_BITS)


def decode_tile(encoded: memoryview) -> torch.Tensor:
    """Decode the bytes of a tile to float32 values, as a view of the same memory."""
    return torch.frombuffer(encoded, dtype=torch.float32)


def check_tile(
    layout: TensorLayout, offset: int, tile: torch.Tensor, magnitude: float = _MAX_MAGNITUDE
) -> None:
    """Refuse values that are not finite, or not strictly within +- `magnitude`.

    Raises:
        UpdateError: with the name of the parameter and the first such value.
    """
    smallest, largest = (float(value) for value in torch.aminmax(tile))
    if not -magnitude < smallest <= largest < magnitude:  # also true for nan
        raise UpdateError(_explain_bad_value(layout, offset, tile, magnitude))


class UpdateSpool:
    """The bytes of one arriving update: in memory if small, otherwise in an unlinked file.

    Many updates can arrive at the same time without all their vectors being in memory.
    """

    def __init__(
        self, directory: Path, max_memory_bytes: int = 1 << 20, *, expected_bytes: int = 0
    ) -> None:
        """Create an empty spool.

        Args:
            directory: where the file is created, if one is needed.
            max_memory_bytes: size up to which the update stays in memory.
            expected_bytes: size of the update if known; a file is created at once if it is larger
                than `max_memory_bytes`.
        """
        self._max_memory_bytes = max_memory_bytes
        self._expected_bytes = expected_bytes
        self._whole: memoryview | None = None
        """The bytes in the memory of a participant in this process, instead of the file."""
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by `__exit__`
            max_size=max_memory_bytes, dir=str(directory)
        )
        if expected_bytes > max_memory_bytes:
            self._file.rollover()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Take the next bytes, in the order in which `Link.fetch` passes them.

        Writable memory is that of a participant in this process, which keeps it as it is until the
        update is acknowledged. A whole update is not copied from there.
        """
        view = memoryview(data)
        if not view.readonly and 0 < self._expected_bytes == len(view):
            self._whole = view
            return
        assert offset == self._file.tell()
        self._file.write(data)

    def take(self, file: BinaryIO) -> None:
        """Use a file that has the whole update, instead of bytes that are written.

        The file must not change; the spool closes it.
        """
        self._file.close()
        self._file = file

    def read(self, layout: TensorLayout) -> torch.Tensor:
        """Decode and check the update: a new float32 vector (N).

        Raises:
            UpdateError: another layout, or a value that is not finite or out of range.
        """
        self.check_header(layout)
        vector = torch.empty(layout.size)
        for offset, tile in self.tiles(layout, layout.size):
            check_tile(layout, offset, tile)
            vector[offset : offset + len(tile)] = tile
        return vector

    def check_header(self, layout: TensorLayout) -> None:
        """Check that these are the bytes of an update of a layout.

        Raises:
            UpdateError: of another one.
        """
        if self._whole is not None:
            size = len(self._whole)
            header = bytes(self._whole[: len(layout.header)])
        else:
            size = self._file.seek(0, io.SEEK_END)
            self._file.seek(0)
            header = self._file.read(len(layout.header))
        if size != layout.nbytes or header != layout.header:
            raise UpdateError(
                f"it is not an update of this exchange set ({size} bytes came, "
                f"{layout.nbytes} are expected)"
            )

    def tiles(self, layout: TensorLayout, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Decode the first `end` elements, tile by tile; each may use the memory of the last.

        Yields:
            The tile's first element and its values, float32 (at most `TILE`).
        """
        if self._whole is not None:
            values = decode_tile(self._whole[len(layout.header) :])[:end]
            for start in range(0, end, TILE):
                yield start, values[start : start + TILE]
            return
        self._file.seek(len(layout.header))
        buffer = memoryview(bytearray(_ELEMENT_BYTES * min(TILE, max(end, 1))))
        for start in range(0, end, TILE):
            part = buffer[: _ELEMENT_BYTES * min(TILE, end - start)]
            self._file.readinto(part)  # type: ignore[attr-defined]  # files have it
            yield start, decode_tile(part)

    def tile(self, layout: TensorLayout, start: int, count: int) -> torch.Tensor:
        """Decode `count` elements from `start` on, all of which have been written.

        More can be written afterwards.
        """
        at = len(layout.header) + _ELEMENT_BYTES * start
        nbytes = _ELEMENT_BYTES * count
        if self._whole is not None:
            return decode_tile(self._whole[at : at + nbytes])
        end = self._file.tell()
        tile = memoryview(bytearray(nbytes))
        self._file.seek(at)
        self._file.readinto(tile)  # type: ignore[attr-defined]  # files have it
        self._file.seek(end)
        return decode_tile(tile)

    @contextlib.contextmanager
    def view(self) -> Iterator[memoryview]:
        """All bytes, read-only; a file is mapped and not copied."""
        if self._whole is not None:
            yield self._whole.toreadonly()
            return
        self._file.flush()
        size = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        if size <= self._max_memory_bytes:
            yield memoryview(self._file.read())
            return
        mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ)
        view = memoryview(mapped)
        try:
            yield view
        finally:
            # A reader that failed has left parts of the view in its traceback. The mapping then
            # ends with these: an error here would hide the reader's.
            with contextlib.suppress(BufferError):
                view.release()
                mapped.close()

    def __enter__(self) -> UpdateSpool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._whole = None
        self._file.close()


class StreamingUpdate:
    """An update that is spooled, checked and added to a sum while it arrives.

    Guarantees:
      * after all bytes were written, the sum holds the whole update;
      * after `withdraw`, which may follow any `write`, the sum holds none of it.
    """

    def __init__(
        self,
        spool: UpdateSpool,
        total: WeightedSum,
        layout: TensorLayout,
        weight: int,
        scale: float = 1.0,
    ) -> None:
        """Reserve the update's weight in the sum.

        Args:
            spool: keeps the bytes for a possible withdrawal.
            total: the sum that the update is added to.
            layout: the expected layout.
            weight: of the update in the weighted mean.
            scale: factor from 0 to 1 by which its values are multiplied.

        Raises:
            UpdateError: the weight does not fit.
        """
        total.reserve(weight)
        self._spool = spool
        self._total = total
        self._layout = layout
        self._weight = weight
        self._scale = scale
        self._header_bytes = 0
        """Bytes of the header received so far."""
        self._added = 0
        """Elements added to the sum so far."""
        self._filled = 0
        """Bytes of the next tile received so far. Only the spool has them: in memory, the tiles of
        all updates that arrive at the same time would add up."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Take the next bytes, in the order in which `Link.fetch` passes them.

        Raises:
            UpdateError: another layout, or a value that is not finite or out of range.
        """
        self._spool.write(offset, data)
        remaining = memoryview(data)
        if self._header_bytes < len(self._layout.header):
            expected = self._layout.header[self._header_bytes : self._header_bytes + len(remaining)]
            if remaining[: len(expected)] != expected:
                raise UpdateError("it is not an update of this exchange set: its header differs")
            self._header_bytes += len(expected)
            remaining = remaining[len(expected) :]
        while remaining:
            tile_bytes = _ELEMENT_BYTES * min(TILE, self._layout.size - self._added)
            if not self._filled and len(remaining) >= tile_bytes and not remaining.readonly:
                self._add(decode_tile(remaining[:tile_bytes]))
                remaining = remaining[tile_bytes:]
                continue
            count = min(len(remaining), tile_bytes - self._filled)
            self._filled += count
            remaining = remaining[count:]
            if self._filled == tile_bytes:
                elements = tile_bytes // _ELEMENT_BYTES
                self._add(self._spool.tile(self._layout, self._added, elements))
                self._filled = 0

    def take(self, file: BinaryIO) -> None:
        """Take the whole update from a file, instead of `write`; see `Link.fetch`.

        Raises:
            UpdateError: as for `write`.
        """
        self._spool.take(file)
        self._spool.check_header(self._layout)
        for _, tile in self._spool.tiles(self._layout, self._layout.size):
            self._add(tile)

    def withdraw(self) -> None:
        """Remove from the sum what was added of the update, and its weight."""
        tiles = self._spool.tiles(self._layout, self._added)
        scaled = ((offset, self._scaled(tile)) for offset, tile in tiles)
        self._total.withdraw(scaled, self._weight)

    @property
    def complete(self) -> bool:
        """Whether the sum holds the whole update."""
        return self._added == self._layout.size

    def _add(self, tile: torch.Tensor) -> None:
        check_tile(self._layout, self._added, tile, self._total.magnitude)
        self._total.add(self._added, self._scaled(tile), self._weight)
        self._added += tile.numel()

    def _scaled(self, tile: torch.Tensor) -> torch.Tensor:
        return tile if self._scale == 1 else tile * self._scale


def _explain_bad_value(
    layout: TensorLayout, offset: int, tile: torch.Tensor, magnitude: float
) -> str:
    """Describe the first bad value of a tile and name its parameter."""
    bad = offset + int((~(tile.abs() < magnitude)).nonzero()[0, 0])
    name = next(e.name for e in layout.entries if e.offset <= bad < e.offset + e.count)
    value = float(tile[bad - offset])
    if value - value != 0:  # nan or infinite
        return f"its update of {name!r} is not finite ({value})"
    return (
        f"its update of {name!r} is out of range ({value:g}, allowed is +-{magnitude:.7g}): "
        "training diverged, or the data are not scaled; lower the learning rate, or scale them"
    )
