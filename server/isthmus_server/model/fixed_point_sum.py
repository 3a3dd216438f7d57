"""The weighted sum of a round's updates, in memory independent of their number.

Updates arrive in any order, and floating-point addition would give a different model for each
order. The sum is therefore kept in fixed point: weight x value is rounded once to a multiple of
`2**-fraction_bits` and added as an integer, which is exact in any order. The bits are allocated
before the round, from the weights that the cohort declared, so that no sum can wrap. Because the
product is rounded, and not the value, the error of the mean does not grow with the weights: with n
updates it is below n x 2**(MAGNITUDE_BITS - 61), at most 2.3e-12 for ten. It does grow if devices
with most of the declared weight are lost: a mean that is then mostly rounding is refused.

>>> import torch
>>> total = WeightedSum(size=2, declared_weight=30)
>>> total.reserve(10)
>>> total.add(0, torch.tensor([1.0, 2.0]), weight=10)
>>> total.reserve(20)
>>> total.add(0, torch.tensor([4.0, 5.0]), weight=20)
>>> total.mean()
tensor([3., 4.])

Updates are added while they arrive, so that no work remains after the last one. An update that
turns out not to count is subtracted again, which is exact too.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable

import torch

from isthmus.errors import RoundFailed, UpdateError
from isthmus_server.model.mmap_buffer import MmapBuffer

MAGNITUDE_BITS = 20
"""Values of an update lie strictly within +-2**20, about a million; larger ones are refused. With a
clipping bound they lie within the next power of two."""

SUM_BYTES = 8
"""Bytes of memory per element of a sum."""

TILE = 1 << 16
"""Elements processed at a time; they stay in the CPU cache from one operation to the next."""

_SMALL_SHARE = 8
"""Binary digits by which a weight is below the declared ones from which on rounding is looked at.
With more than that share of them a mean of 1e-6 keeps its precision."""

_LOST = 1e-4
"""Error of a mean, as a part of it, with which it is lost in rounding."""

_TILE_LOCKS = 16
"""Locks of the sum's tiles, so that several threads can add to different ones."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The sum of some updates, as another process has added them."""

    elements: bytes | bytearray | memoryview
    """int64 in fixed point, `SUM_BYTES` for each element."""
    weight: int
    """Weight of its updates together."""
    updates: int
    has_small: bool
    """Whether an update of a small weight is not zero."""


class WeightedSum:
    """Sum of weight x update over a round, and its mean.

    Guarantees:
      * the same updates give the same bytes, in whatever order they are added;
      * the sum cannot wrap: weights above twice the declared total are refused;
      * rounding changes a mean by less than a ten-thousandth of its length, or it is refused; but
        for updates below 1e-6.
    """

    def __init__(
        self,
        size: int,
        declared_weight: int,
        memory: MmapBuffer | None = None,
        clip: float | None = None,
    ) -> None:
        """Allocate the sum, or place it in existing memory.

        Args:
            size: number of elements N.
            declared_weight: total of the examples that the cohort declared.
            memory: a buffer of `SUM_BYTES` per element, whose contents are overwritten; a new one
                by default.
            clip: bound on the 2-norm of each update, of which the sum gets noise: then rounding is
                less than 2^-40 of it in each element, and no mean is refused for it, as only what
                has noise may decide what happens; None for no bound.
        """
        self._clip = clip
        self.max_weight = 2 * max(declared_weight, 1)
        bits = MAGNITUDE_BITS if clip is None else math.frexp(clip)[1]
        self.magnitude = 2.0**bits
        """Values of an update lie strictly within +- this; larger ones are refused."""
        self.fraction_bits = 63 - bits - self.max_weight.bit_length()
        self.weight = 0
        self._updates = 0
        self._has_small = False
        """Whether an update of a small weight is not zero."""
        self._memory = memory or MmapBuffer(SUM_BYTES * size)
        self._sum = self._memory.tensor(torch.int64)
        self._initialized = bytearray(-(-size // TILE))
        """Which tiles hold a sum; the first update overwrites what a tile held before."""
        self._lock = threading.Lock()
        """Protects the weights."""
        self._tile_locks = [threading.Lock() for _ in range(_TILE_LOCKS)]
        self._scratch = threading.local()
        """Memory in which a thread converts a tile."""
        self._pending_withdrawals = 0
        """Updates that are being subtracted, or whose subtraction failed."""

    def reserve(self, weight: int) -> None:
        """Count the weight of an update that is about to be added.

        Raises:
            UpdateError: the weight is not positive, or above what was declared before the round.
        """
        with self._lock:
            if weight < 1 or self.weight + weight > self.max_weight:
                raise UpdateError(
                    f"its weight={weight} does not fit: it must be at least 1, and all weights "
                    f"together at most {self.max_weight}, twice the examples declared at the start"
                )
            self.weight += weight
            self._updates += 1

    def add(self, offset: int, tile: torch.Tensor, weight: int) -> None:
        """Add `weight` times a tile of an update. Thread-safe.

        Args:
            offset: the tile's first element, a multiple of `TILE`.
            tile: float32 (`TILE`); the last tile may be shorter.
            weight: of the update; negative to subtract it.
        """
        fixed = self._converted(tile, weight)
        part = self._sum[offset : offset + tile.numel()]
        number = offset // TILE
        with self._tile_locks[number % _TILE_LOCKS]:
            if self._initialized[number]:
                part.add_(fixed)
            else:
                part.copy_(fixed)
                self._initialized[number] = True

    def _converted(self, tile: torch.Tensor, weight: int) -> torch.Tensor:
        """`weight` times a tile in fixed point, int64; valid until the thread's next call."""
        scratch = self._scratch
        if not hasattr(scratch, "scaled"):
            scratch.scaled = torch.empty(TILE, dtype=torch.float64)
            scratch.fixed = torch.empty(TILE, dtype=torch.int64)
        count = tile.numel()  # much faster than len()
        scaled: torch.Tensor = scratch.scaled[:count]
        scaled.copy_(tile).mul_(weight * 2.0**self.fraction_bits)
        if self._is_small(abs(weight)) and not self._has_small:
            self._has_small = bool(scaled.any())
        fixed: torch.Tensor = scratch.fixed[:count]
        return fixed.copy_(scaled.round_())  # half to even, so that a negative weight undoes it

    def withdraw(self, tiles: Iterable[tuple[int, torch.Tensor]], weight: int) -> None:
        """Undo `reserve` and the `add` of these tiles.

        If reading the tiles fails, the sum is unusable and `mean` raises OSError.
        """
        with self._lock:
            self._pending_withdrawals += 1
        for offset, tile in tiles:
            self.add(offset, tile, -weight)
        with self._lock:
            self._pending_withdrawals -= 1
            self.weight -= weight
            self._updates -= 1

    def _is_small(self, weight: int) -> bool:
        return weight << _SMALL_SHARE < self.max_weight

    def part(self) -> Part:
        """What was added so far, to be merged into the sum of another process.

        Raises:
            OSError: an update that had to be withdrawn could not be read any more.
        """
        if self._pending_withdrawals:
            raise OSError("a rejected update could not be subtracted from the sum")
        for number, initialized in enumerate(self._initialized):
            if not initialized:
                self._sum[number * TILE : (number + 1) * TILE] = 0
        return Part(self._memory.view, self.weight, self._updates, self._has_small)

    def merge(self, part: Part) -> None:
        """Add a part of the same size, `declared_weight` and `clip`.

        Raises:
            UpdateError: it is no such part: nothing was added.
        """
        values = torch.frombuffer(part.elements, dtype=torch.int64)
        # What a sum of this weight can be: values beyond it would wrap.
        bound = math.ceil(part.weight * self.magnitude * 2.0**self.fraction_bits)
        tiles = [values[start : start + TILE] for start in range(0, len(values), TILE)]
        for tile in tiles:
            least, most = (int(value) for value in torch.aminmax(tile))
            if not -bound <= least <= most <= bound:
                raise UpdateError("a part of the sum is larger than its updates can be")
        with self._lock:
            if part.weight < 1 or self.weight + part.weight > self.max_weight:
                raise UpdateError(
                    f"a part of the sum has weight={part.weight}, and all weights together are at "
                    f"most {self.max_weight}, twice the examples declared at the start"
                )
            self.weight += part.weight
            self._updates += part.updates
            self._has_small = self._has_small or part.has_small
        for number, tile in enumerate(tiles):
            place = self._sum[number * TILE : number * TILE + len(tile)]
            with self._tile_locks[number % _TILE_LOCKS]:
                if self._initialized[number]:
                    place.add_(tile)
                else:
                    place.copy_(tile)
                    self._initialized[number] = True

    def mean(self) -> torch.Tensor:
        """Return the weighted mean, float32 (N), in the memory of the sum, which it overwrites.

        The unused half of that memory is released until the next sum needs it.

        Raises:
            OSError: an update that had to be withdrawn could not be read any more.
            RoundFailed: the updates that came have so little of the declared weight that their mean
                is lost in rounding.
        """
        assert self.weight > 0
        if self._pending_withdrawals:
            raise OSError("a rejected update could not be subtracted from the sum")
        scale = 2.0**-self.fraction_bits / self.weight
        # Each tile of the mean overwrites sums that have been read already.
        mean = self._sum.view(torch.float32)[: len(self._sum)]
        looked_at = self._clip is None and self._has_small and self._is_small(self.weight)
        squares = 0.0
        for start in range(0, len(mean), TILE):
            part = self._sum[start : start + TILE].double().mul_(scale)
            if looked_at:
                squares += float(part.square().sum())
            mean[start : start + TILE] = part
        self._memory.release(4 * len(mean))
        # Each product is off by up to half a step, evenly.
        rounding = scale * math.sqrt(self._updates / 12)
        if looked_at and rounding > _LOST * math.sqrt(squares / len(mean)):
            raise RoundFailed(
                f"the updates that came count as {self.weight} examples, of up to "
                f"{self.max_weight // 2} that the invited devices declared, and their mean is lost "
                "in the rounding that these need: the devices with most examples were lost; leave "
                'out those with so many more than the others, or set federated.weights = "equal"'
            )
        return mean
