"""The largest elements of a datacenter's update, in two bits each (SparseLoCo, Sarfi et al. 2025).

An update is divided into blocks of `BLOCK` neighbouring elements. Of each block only the elements
of largest magnitude are sent: their positions in the block, their signs, and whether they are among
the larger or the smaller of them, which have one magnitude each. What is not sent, and what
rounding took away, is for the datacenter to add to its next update (error feedback): that takes the
place of momentum in the server's step (https://arxiv.org/abs/2508.15706).

>>> codec = BlockTopK(size=5, trained=4, keep=2048)
>>> update = torch.tensor([0.0, 4.0, -1.0, 0.5, 7.0])
>>> payload = codec.encode(update)
>>> codec.decode(payload).tolist(), update.tolist()
([0.0, 4.0, -1.0, 0.0, 7.0], [0.0, 0.0, 0.0, 0.5, 0.0])
"""

from __future__ import annotations

import dataclasses

import torch

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.compression.packing import pack, unpack

BLOCK = 4096
"""Elements of a block; the last one may have fewer."""
_INDEX_BITS = 12
_CODE_BITS = 2
_TILE = 64
"""Blocks that are compared at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTopK:
    """Encodes the updates of one model.

    A message has the two magnitudes of each block, the smaller ones first (float32), the positions
    of the elements that are sent (12 bits), their codes (2 bits), and the running statistics
    (float32), which are sent whole. Its number of bytes follows from the model alone.

    Shape legend: N elements of an update, T of them of parameters, B blocks, K elements sent.
    """

    size: int
    """N."""
    trained: int
    """T: the elements after them are running statistics."""
    keep: int
    """Elements of a whole block that are sent; of the last one the same part, rounded up."""

    @classmethod
    def of(cls, layout: TensorLayout, keep: int) -> BlockTopK:
        """The codec of an exchange set."""
        return cls(size=layout.size, trained=layout.trained_size, keep=keep)

    @property
    def nbytes(self) -> int:
        """Bytes of a message."""
        return self._statistics_at + 4 * (self.size - self.trained)

    def encode(self, update: torch.Tensor) -> bytearray:
        """A message about an update, which is replaced by what the message lacks of it.

        Args:
            update: (N) float32, changed in place.

        Raises:
            UpdateError: it is not finite.
        """
        scales, indices, codes = [], [], []
        for start in range(0, self.trained, _TILE * BLOCK):
            for blocks, keep in self._parts(update, start):
                if not bool(torch.isfinite(blocks).all()):
                    raise UpdateError("the update is not finite, so that it cannot be compressed")
                at = _largest(blocks, keep)
                values = blocks.gather(1, at)
                two, code = _quantized(values)
                blocks.scatter_(1, at, values - _values(two, code))
                scales.append(two)
                indices.append(at.reshape(-1))
                codes.append(code.reshape(-1))
        payload = bytearray(self.nbytes)
        payload[: self._indices_at] = _bytes(torch.cat(scales).T)
        words = torch.cat(indices).to(torch.int16)
        payload[self._indices_at : self._codes_at] = pack(words, _INDEX_BITS)
        words = torch.cat(codes).to(torch.int8)
        payload[self._codes_at : self._statistics_at] = pack(words, _CODE_BITS)
        payload[self._statistics_at :] = _bytes(update[self.trained :])
        update[self.trained :] = 0
        return payload

    def decode(self, payload: bytes | bytearray | memoryview) -> torch.Tensor:
        """The update that a message is about, float32 (N).

        Raises:
            UpdateError: the message is none of this codec; one sentence.
        """
        self.check_size(len(payload))
        scales = _floats(payload[: self._indices_at]).view(2, -1)
        if not bool(torch.isfinite(scales).all()):
            raise UpdateError("a magnitude in its compressed update is not finite")
        if not bool(((scales >= 0) & (scales <= scales[1])).all()):
            raise UpdateError("the magnitudes in its compressed update are not in order")
        statistics = _floats(payload[self._statistics_at :])
        if not bool(torch.isfinite(statistics).all()):
            raise UpdateError("a running statistic in its compressed update is not finite")
        at = unpack(payload[self._indices_at : self._codes_at], self._kept, _INDEX_BITS)
        codes = unpack(payload[self._codes_at : self._statistics_at], self._kept, _CODE_BITS)
        update, sent, block = torch.zeros(self.size), 0, 0
        for start in range(0, self.trained, _TILE * BLOCK):
            for blocks, keep in self._parts(update, start):
                count = len(blocks)
                here = slice(sent, sent + count * keep)
                positions = at[here].to(torch.int64).view(count, keep)
                if not bool((positions.diff(dim=1) > 0).all()):
                    raise UpdateError("positions in its compressed update are not increasing")
                if not bool((positions < blocks.shape[1]).all()):
                    raise UpdateError("a position in its compressed update is outside of its block")
                two, code = scales[:, block : block + count].T, codes[here].view(count, keep)
                blocks.scatter_(1, positions, _values(two, code))
                sent, block = here.stop, block + count
        update[self.trained :] = statistics
        return update

    def check_size(self, nbytes: int) -> None:
        """Refuse a message of another number of bytes, before there is memory for it.

        Raises:
            UpdateError: with both numbers.
        """
        if nbytes != self.nbytes:
            raise UpdateError(
                f"its compressed update has {nbytes} bytes where this exchange set takes "
                f"{self.nbytes}"
            )

    # -- blocks ------------------------------------------------------------------------------------

    def _parts(self, vector: torch.Tensor, start: int) -> list[tuple[torch.Tensor, int]]:
        """Views of a tile's whole blocks, and of a shorter last block; elements sent of each."""
        tile = vector[start : min(start + _TILE * BLOCK, self.trained)]
        whole = len(tile) // BLOCK * BLOCK
        parts = []
        if whole:
            parts.append((tile[:whole].view(-1, BLOCK), self.keep))
        if whole < len(tile):
            parts.append((tile[whole:].view(1, -1), self._kept_of(len(tile) - whole)))
        return parts

    def _kept_of(self, elements: int) -> int:
        return -(-elements * self.keep // BLOCK)

    @property
    def _kept(self) -> int:
        """K."""
        whole, rest = divmod(self.trained, BLOCK)
        return whole * self.keep + self._kept_of(rest)

    @property
    def _indices_at(self) -> int:
        return 2 * 4 * -(-self.trained // BLOCK)

    @property
    def _codes_at(self) -> int:
        return self._indices_at + -(-self._kept * _INDEX_BITS // 8)

    @property
    def _statistics_at(self) -> int:
        return self._codes_at + -(-self._kept * _CODE_BITS // 8)


def _largest(blocks: torch.Tensor, keep: int) -> torch.Tensor:
    """Positions (B, keep) of the largest magnitudes of each block, increasing.

    Of equal ones the first are taken, so that the result does not depend on how PyTorch selects.
    """
    sizes = blocks.abs()
    least = sizes.topk(keep, dim=1).values[:, -1:]
    chosen, equal = sizes > least, sizes == least
    room = keep - chosen.sum(1, keepdim=True)
    chosen |= equal & (equal.cumsum(1) <= room)
    return chosen.nonzero()[:, 1].view(len(blocks), keep)


def _quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two magnitudes of each block (B, 2), the smaller first, and the values' codes (B, K).

    A code has the sign in its first bit, 1 for negative ones, and in its second one whether the
    magnitude is the larger. The magnitudes are the means of those above the block's mean, and of
    the others.
    """
    sizes = values.abs().double()
    large = sizes > sizes.mean(1, keepdim=True)
    sums = (sizes * large).sum(1), (sizes * ~large).sum(1)
    counts = large.sum(1), (~large).sum(1)
    low = (sums[1] / counts[1].clamp(min=1)).float()
    high = (sums[0] / counts[0].clamp(min=1)).float().maximum(low)
    return torch.stack([low, high], 1), (values < 0).to(torch.int64) | (large.to(torch.int64) << 1)


def _values(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The values (B, K) of codes (B, K) with two magnitudes for each block (B, 2)."""
    sizes = scales.gather(1, (codes.to(torch.int64) >> 1) & 1)
    return torch.where((codes & 1).bool(), -sizes, sizes)


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


def _floats(payload: bytes | bytearray | memoryview) -> torch.Tensor:
    """The float32 elements of bytes, which may be read-only."""
    if not payload:
        return torch.empty(0)
    return torch.frombuffer(bytearray(payload), dtype=torch.float32)
