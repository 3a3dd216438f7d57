"""The weighted sum of a round's updates, in memory that does not grow with their number.

Updates arrive in any order, and floating-point addition would give another model for each. So the
sum is kept in fixed point: every value is rounded once to a multiple of `2**-fraction_bits` and
added as an integer, which is exact in any order. The bits are shared out before the round, from
the weights the cohort declared, so that no sum can wrap.

>>> import torch
>>> total = WeightedSum(size=2, declared_weight=30)
>>> total.hold(10)
>>> total.add(0, torch.tensor([1.0, 2.0]), weight=10)
>>> total.hold(20)
>>> total.add(0, torch.tensor([4.0, 5.0]), weight=20)
>>> total.mean()
tensor([3., 4.])

An update is added while it arrives, so that nothing is left to be done when the last one is here;
one that does not come to count is subtracted again, which is exact too.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.mmap_buffer import MmapBuffer

if TYPE_CHECKING:
    from isthmus.transport.blobs import Write

MAGNITUDE_BITS = 12
"""Values of an update lie strictly within +-2**12; anything beyond has diverged."""

MOST = float(1 << MAGNITUDE_BITS)

SUM_BYTES = 8
"""Of memory that an element of a sum takes."""

TILE = 1 << 16
"""Elements handled at a time: they stay in the cache from one operation to the next."""


class WeightedSum:
    """Sum of weight x update over a round, and its mean.

    Guarantees:
      * the same updates give the same bytes, in whatever order they are added;
      * the sum cannot wrap: weights beyond twice what was declared are refused.
    """

    def __init__(self, size: int, declared_weight: int, memory: MmapBuffer | None = None) -> None:
        """`size` is N; `declared_weight` the sum of examples the cohort said it has.

        `memory`, of `SUM_BYTES` for each element, is what the sum is kept in, whatever it holds.
        """
        self.max_weight = 2 * max(declared_weight, 1)
        self.fraction_bits = 63 - MAGNITUDE_BITS - self.max_weight.bit_length()
        self.weight = 0
        self._memory = memory or MmapBuffer(SUM_BYTES * size)
        self._sum = self._memory.tensor(torch.int64)
        self._begun = bytearray(-(-size // TILE))
        """Which tiles hold a sum: the first update writes over what is there."""
        self._scaled = torch.empty(TILE)
        self._fixed = torch.empty(TILE, dtype=torch.int64)
        self._adding = threading.Lock()
        self._leaving = 0
        """Updates that are being taken back."""

    def hold(self, weight: int) -> None:
        """Count a weight whose update is about to be added.

        Raises:
            UpdateError: not positive, or more than was declared before the round.
        """
        with self._adding:
            if weight < 1 or self.weight + weight > self.max_weight:
                raise UpdateError(
                    f"its weight={weight} does not fit: it must be at least 1, and all weights "
                    f"together at most {self.max_weight}, twice the examples declared at the start"
                )
            self.weight += weight

    def add(self, offset: int, tile: torch.Tensor, weight: int) -> None:
        """Add `weight` times a tile of an update, from any thread.

        `offset` is a multiple of `TILE`, and all but the last tile have `TILE` elements.
        """
        with self._adding:
            # Scaling by a power of two and rounding to a whole number are exact in float32 as well.
            scaled = torch.mul(tile, 2.0**self.fraction_bits, out=self._scaled[: len(tile)])
            fixed = self._fixed[: len(tile)].copy_(scaled.round_())
            part = self._sum[offset : offset + len(tile)]
            if self._begun[offset // TILE]:
                part.add_(fixed, alpha=weight)
            else:
                torch.mul(fixed, weight, out=part)
                self._begun[offset // TILE] = True

    def take_back(self, tiles: Iterable[tuple[int, torch.Tensor]], weight: int) -> None:
        """Undo `hold`, and `add` of these stretches; until it ends well there is no mean."""
        with self._adding:
            self._leaving += 1
        for offset, tile in tiles:
            self.add(offset, tile, -weight)
        with self._adding:
            self._leaving -= 1
            self.weight -= weight

    def mean(self) -> torch.Tensor:
        """The weighted mean, float32 (N), in the memory of the sum, which is gone with it.

        The half of it that the mean does not need is given back until there is another sum.

        Raises:
            OSError: an update that was to be taken back could not be read any more.
        """
        assert self.weight > 0
        if self._leaving:
            raise OSError("an update that does not count could not be taken out of the sum")
        scale = 2.0**-self.fraction_bits / self.weight
        # Each tile of the mean takes the place of sums that have been read already.
        mean = self._sum.view(torch.float32)[: len(self._sum)]
        for start in range(0, len(mean), TILE):
            part = self._sum[start : start + TILE]
            mean[start : start + TILE] = part.double().mul_(scale)
        self._memory.give_back(4 * len(mean))
        return mean


class Spool:
    """One update while it arrives and is checked: in memory if small, else in an unlinked file.

    Many updates can be under way at once without their vectors being in memory at once.
    """

    def __init__(self, directory: Path, in_memory: int = 1 << 20, *, expected: int = 0) -> None:
        """`in_memory`: bytes up to which no file is made; one is at once if more are `expected`."""
        self._in_memory = in_memory
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory, dir=str(directory))  # noqa: SIM115 - closed by `close`
        if expected > in_memory:
            self._file.rollover()

    @property
    def write(self) -> Write:
        """Where `Link.fetch` puts the bytes; they come in order."""

        def write(offset: int, data: bytes | memoryview) -> None:
            assert offset == self._file.tell()
            self._file.write(data)

        return write

    def read(self, layout: TensorLayout) -> torch.Tensor:
        """The update, checked: a new float32 vector (N).

        Raises:
            UpdateError: another layout, or a value that is not finite or out of range.
        """
        self._check_header(layout)
        vector = torch.empty(layout.size)
        for offset, tile in self.tiles(layout, layout.size):
            _check(layout, offset, tile)
            vector[offset : offset + len(tile)] = tile
        return vector

    def _check_header(self, layout: TensorLayout) -> None:
        size = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        if size != layout.nbytes or self._file.read(len(layout.header)) != layout.header:
            raise UpdateError(
                f"it is not an update of this exchange set ({size} bytes came, "
                f"{layout.nbytes} are expected)"
            )

    def tiles(self, layout: TensorLayout, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The first `end` elements, stretch by stretch, each in the memory of the one before."""
        self._file.seek(len(layout.header))
        raw = memoryview(bytearray(4 * min(TILE, max(end, 1))))
        for start in range(0, end, TILE):
            part = raw[: 4 * min(TILE, end - start)]
            self._file.readinto(part)
            yield start, torch.frombuffer(part, dtype=torch.float32)

    @contextlib.contextmanager
    def view(self) -> Iterator[memoryview]:
        """All bytes, read-only, without a copy in memory where they are in a file."""
        self._file.flush()
        size = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        if size <= self._in_memory:
            yield memoryview(self._file.read())
            return
        with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                yield view
            finally:
                view.release()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


class StreamingUpdate:
    """An update that is spooled, checked and added while it arrives.

    Guarantees:
      * it is in the sum, all of it, when all its bytes were written, and out of it after
        `take_back`, which may be called at any time after a write.
    """

    def __init__(
        self,
        spool: Spool,
        total: WeightedSum,
        layout: TensorLayout,
        weight: int,
        scale: float = 1.0,
    ) -> None:
        """`scale`, of 0 to 1, is what it is multiplied with.

        Raises:
            UpdateError: its weight does not fit.
        """
        total.hold(weight)
        self._spool = spool
        self._total = total
        self._layout = layout
        self._weight = weight
        self._scale = scale
        self._header = 0
        """Bytes of it that have come."""
        self._added = 0
        """Elements."""
        self._tile = memoryview(bytearray(4 * min(TILE, max(layout.size, 1))))
        self._filled = 0
        """Bytes of the next tile that have come."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Take the next bytes: where `Link.fetch` puts them, in order.

        Raises:
            UpdateError: another layout, or a value that is not finite or out of range.
        """
        self._spool.write(offset, data)
        left = memoryview(data)
        if self._header < len(self._layout.header):
            expected = self._layout.header[self._header : self._header + len(left)]
            if left[: len(expected)] != expected:
                raise UpdateError("it is not an update of this exchange set: its header differs")
            self._header += len(expected)
            left = left[len(expected) :]
        while left:
            wanted = 4 * min(TILE, self._layout.size - self._added)
            part = left[: wanted - self._filled]
            self._tile[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            left = left[len(part) :]
            if self._filled == wanted:
                self._add(torch.frombuffer(self._tile[:wanted], dtype=torch.float32))
                self._filled = 0

    def take_back(self) -> None:
        """Have it not count, what was added of it and its weight."""
        tiles = self._spool.tiles(self._layout, self._added)
        scaled = ((offset, self._scaled(tile)) for offset, tile in tiles)
        self._total.take_back(scaled, self._weight)

    @property
    def whole(self) -> bool:
        """All of it is in the sum."""
        return self._added == self._layout.size

    def _add(self, tile: torch.Tensor) -> None:
        _check(self._layout, self._added, tile)
        self._total.add(self._added, self._scaled(tile), self._weight)
        self._added += len(tile)

    def _scaled(self, tile: torch.Tensor) -> torch.Tensor:
        return tile if self._scale == 1 else tile.mul_(self._scale)


def _check(layout: TensorLayout, offset: int, tile: torch.Tensor) -> None:
    least, most = (float(value) for value in torch.aminmax(tile))
    if not -MOST < least <= most < MOST:  # nor is nan
        raise UpdateError(_explain(layout, offset, tile))


def _explain(layout: TensorLayout, offset: int, tile: torch.Tensor) -> str:
    """Which parameter holds the first bad value of a tile."""
    bad = offset + int((~(tile.abs() < 2**MAGNITUDE_BITS)).nonzero()[0, 0])
    name = next(e.name for e in layout.entries if e.offset <= bad < e.offset + e.count)
    value = float(tile[bad - offset])
    if value - value != 0:  # nan or infinite
        return f"its update of {name!r} is not finite ({value})"
    return f"its update of {name!r} is out of range ({value:g}, allowed is +-{2**MAGNITUDE_BITS})"
