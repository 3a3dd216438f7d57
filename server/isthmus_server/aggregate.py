"""The weighted sum of a round's updates, in memory that does not grow with their number.

Updates arrive in any order, and floating-point addition would give another model for each. So the
sum is kept in fixed point: every value is rounded once to a multiple of `2**-fraction_bits` and
added as an integer, which is exact in any order. The bits are shared out before the round, from
the weights the cohort declared, so that no sum can wrap.

>>> import torch
>>> total = WeightedSum(size=2, declared_weight=30)
>>> total.add([(0, torch.tensor([1.0, 2.0]))], weight=10)
>>> total.add([(0, torch.tensor([4.0, 5.0]))], weight=20)
>>> total.mean()
tensor([3., 4.])
"""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isthmus.errors import UpdateError
from isthmus.exchange import Layout

if TYPE_CHECKING:
    from isthmus.contents import Write

MAGNITUDE_BITS = 12
"""Values of an update lie strictly within +-2**12; anything beyond has diverged."""

MOST = float(1 << MAGNITUDE_BITS)

TILE = 1 << 16
"""Elements handled at a time: they stay in the cache from one operation to the next."""


class WeightedSum:
    """Sum of weight x update over a round, and its mean.

    Guarantees:
      * the same updates give the same bytes, in whatever order they are added;
      * the sum cannot wrap: weights beyond twice what was declared are refused.
    """

    def __init__(self, size: int, declared_weight: int) -> None:
        """`size` is N; `declared_weight` the sum of examples the cohort said it has."""
        self.most_weight = 2 * max(declared_weight, 1)
        self.fraction_bits = 63 - MAGNITUDE_BITS - self.most_weight.bit_length()
        self.weight = 0
        self._sum = torch.empty(size, dtype=torch.int64)  # the first update fills it
        self._scaled = torch.empty(TILE)
        self._fixed = torch.empty(TILE, dtype=torch.int64)

    def check_weight(self, weight: int) -> None:
        """Refuse a weight that could not be added.

        Raises:
            UpdateError: not positive, or more than was declared before the round.
        """
        if weight < 1 or self.weight + weight > self.most_weight:
            raise UpdateError(
                f"its weight={weight} does not fit: it must be at least 1, and all weights "
                f"together at most {self.most_weight}, twice the examples declared at the start"
            )

    def add(self, tiles: Iterable[tuple[int, torch.Tensor]], weight: int) -> None:
        """Add `weight * update`, the update given as `(offset, stretch of it)` in any order."""
        for offset, tile in tiles:
            self.add_tile(offset, tile, weight)
        self.weight += weight

    def add_tile(self, offset: int, tile: torch.Tensor, weight: int) -> None:
        """Add a stretch of at most `TILE` elements; its `weight` counts when all of it is in."""
        # Scaling by a power of two and rounding to a whole number are exact in float32 as well.
        scaled = torch.mul(tile, 2.0**self.fraction_bits, out=self._scaled[: len(tile)])
        fixed = self._fixed[: len(tile)].copy_(scaled.round_())
        part = self._sum[offset : offset + len(tile)]
        if self.weight:
            part.add_(fixed, alpha=weight)
        else:
            torch.mul(fixed, weight, out=part)

    def take_back(self, tiles: Iterable[tuple[int, torch.Tensor]], weight: int) -> None:
        """Undo `add_tile` for an update that turned out to be bad further on."""
        if self.weight:  # else the next first update writes over it
            for offset, tile in tiles:
                self.add_tile(offset, tile, -weight)

    def mean(self) -> torch.Tensor:
        """The weighted mean, float32 (N), in the memory of the sum, which is gone with it."""
        assert self.weight > 0
        scale = 2.0**-self.fraction_bits / self.weight
        # Each tile of the mean takes the place of sums that have been read already.
        mean = self._sum.view(torch.float32)[: len(self._sum)]
        for start in range(0, len(mean), TILE):
            part = self._sum[start : start + TILE]
            mean[start : start + TILE] = part.double().mul_(scale)
        return mean


class Spool:
    """One update while it arrives and is checked: in memory if small, else in an unlinked file.

    Many updates can be under way at once without their vectors being in memory at once.
    """

    def __init__(self, directory: Path, in_memory: int = 1 << 20) -> None:
        """`in_memory`: bytes up to which no file is made."""
        self._in_memory = in_memory
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory, dir=str(directory))  # noqa: SIM115 - closed by `close`

    @property
    def write(self) -> Write:
        """Where `Link.fetch` puts the bytes; they come in order."""

        def write(offset: int, data: bytes) -> None:
            assert offset == self._file.tell()
            self._file.write(data)

        return write

    def add_to(self, total: WeightedSum, layout: Layout, weight: int, scale: float = 1.0) -> None:
        """Check the update and add it, times `scale` (of 0 to 1): all of it or nothing.

        Raises:
            UpdateError: another layout, a value that is not finite or out of range, or a weight
                that does not fit.
        """
        total.check_weight(weight)
        self._check_header(layout)
        for count, (offset, tile) in enumerate(self._tiles(layout, scale)):
            if not _in_range(tile):
                reason = _explain(layout, offset, tile)
                total.take_back(itertools.islice(self._tiles(layout, scale), count), weight)
                raise UpdateError(reason)
            total.add_tile(offset, tile, weight)
        total.weight += weight

    def read(self, layout: Layout) -> torch.Tensor:
        """The update, checked: a new float32 vector (N).

        Raises:
            UpdateError: another layout, or a value that is not finite or out of range.
        """
        self._check_header(layout)
        vector = torch.empty(layout.size)
        for offset, tile in self._tiles(layout):
            if not _in_range(tile):
                raise UpdateError(_explain(layout, offset, tile))
            vector[offset : offset + len(tile)] = tile
        return vector

    def _check_header(self, layout: Layout) -> None:
        size = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        if size != layout.nbytes or self._file.read(len(layout.header)) != layout.header:
            raise UpdateError(
                f"it is not an update of this exchange set ({size} bytes came, "
                f"{layout.nbytes} are expected)"
            )

    def _tiles(self, layout: Layout, scale: float = 1.0) -> Iterator[tuple[int, torch.Tensor]]:
        """All of it, stretch by stretch, each in the memory of the one before."""
        self._file.seek(len(layout.header))
        raw = memoryview(bytearray(4 * min(TILE, layout.size)))
        for start in range(0, layout.size, TILE):
            part = raw[: 4 * min(TILE, layout.size - start)]
            self._file.readinto(part)
            tile = torch.frombuffer(part, dtype=torch.float32)
            yield start, tile if scale == 1 else tile.mul_(scale)

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


def _in_range(tile: torch.Tensor) -> bool:
    least, most = (float(value) for value in torch.aminmax(tile))
    return -MOST < least <= most < MOST  # not so for nan


def _explain(layout: Layout, offset: int, tile: torch.Tensor) -> str:
    """Which parameter holds the first bad value of a tile."""
    bad = offset + int((~(tile.abs() < 2**MAGNITUDE_BITS)).nonzero()[0, 0])
    name = next(e.name for e in layout.entries if e.offset <= bad < e.offset + e.count)
    value = float(tile[bad - offset])
    if value - value != 0:  # nan or infinite
        return f"its update of {name!r} is not finite ({value})"
    return f"its update of {name!r} is out of range ({value:g}, allowed is +-{2**MAGNITUDE_BITS})"
