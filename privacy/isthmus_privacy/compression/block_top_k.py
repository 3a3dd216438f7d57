"""The largest elements of a datacenter's update, in two bits each (SparseLoCo, Sarfi et al. 2025).

An update is divided into blocks of `BLOCK` neighbouring elements. Of each block only the elements
of largest magnitude are sent: their positions in the block, their signs, and whether they are among
the larger or the smaller of them, which have one magnitude each. What is not sent, and what
rounding took away, is for the datacenter to train on from and to send later (error feedback): that
takes the place of momentum in the server's step (https://arxiv.org/abs/2508.15706).

>>> codec = BlockTopK(size=5, trained=4, keep=2048)
>>> update = torch.tensor([0.0, 4.0, -1.0, 0.5, 7.0])
>>> payload = codec.encode(update)
>>> codec.decode(payload).tolist(), update.tolist()
([0.0, 4.0, -1.0, 0.0, 7.0], [0.0, 0.0, 0.0, 0.5, 0.0])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_privacy.compression.packing import pack, unpack
from isthmus_privacy.compression.positions import Positions

BLOCK = 4096
"""Elements of a block; the last one may have fewer."""
_CODE_BITS = 2
_TILE = 64
"""Blocks that are compared at a time."""
_LARGEST = torch.finfo(torch.bfloat16).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTopK:
    """Encodes the updates of one model.

    A message has for each `_TILE` blocks the two magnitudes of every block, the smaller one first
    (bfloat16), the positions of the elements that are sent, and their codes (2 bits); after all
    blocks the running statistics (float32), which are sent whole. Its number of bytes follows from
    the model alone.

    Shape legend: N elements of an update, T of them of parameters, B blocks, K elements sent of
    each.
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
        tiles, rest = divmod(self.trained, _TILE * BLOCK)
        whole = _Blocks(_TILE, BLOCK, self.keep).nbytes
        parts = sum(blocks.nbytes for _, blocks in self._parts(0, rest))
        return tiles * whole + parts + 4 * (self.size - self.trained)

    def encode(self, update: torch.Tensor) -> bytearray:
        """A message about an update, which is replaced by what the message lacks of it.

        Args:
            update: (N) float32, changed in place.

        Raises:
            UpdateError: it is not finite.
        """
        payload = bytearray(self.nbytes)
        at = 0
        for start, blocks in self._parts(0, self.trained):
            elements = update[start : start + blocks.elements]
            if not bool(torch.isfinite(elements).all()):
                raise UpdateError("the update is not finite, so that it cannot be compressed")
            payload[at : at + blocks.nbytes] = blocks.encode(elements)
            at += blocks.nbytes
        statistics = update[self.trained :]
        payload[at:] = statistics.contiguous().numpy().tobytes()
        statistics.zero_()
        return payload

    def decode(self, payload: bytes | bytearray | memoryview) -> torch.Tensor:
        """The update that a message is about, float32 (N).

        Raises:
            UpdateError: the message is none of this codec; one sentence.
        """
        self.check_size(len(payload))
        update = torch.zeros(self.size)
        at = 0
        for start, blocks in self._parts(0, self.trained):
            part = memoryview(payload)[at : at + blocks.nbytes]
            blocks.decode(part, update[start : start + blocks.elements])
            at += blocks.nbytes
        statistics = _elements(memoryview(payload)[at:], torch.float32)
        if not bool(torch.isfinite(statistics).all()):
            raise UpdateError("a running statistic in its compressed update is not finite")
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

    def _parts(self, start: int, until: int) -> Iterator[tuple[int, _Blocks]]:
        """The tiles of whole blocks, and a shorter last block, each with its first element."""
        while until - start >= BLOCK:
            count = min(_TILE, (until - start) // BLOCK)
            yield start, _Blocks(count, BLOCK, self.keep)
            start += count * BLOCK
        if length := until - start:
            yield start, _Blocks(1, length, -(-length * self.keep // BLOCK))


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """A part of the message: blocks (B, length) of which as many elements (B, K) are sent."""

    count: int
    """B."""
    length: int
    keep: int
    """K."""

    @property
    def elements(self) -> int:
        return self.count * self.length

    @property
    def nbytes(self) -> int:
        return self._codes_at + -(-self.count * self.keep * _CODE_BITS // 8)

    def encode(self, elements: torch.Tensor) -> bytearray:
        """The message of these blocks; the elements are replaced by what it lacks of them."""
        blocks = elements.view(self.count, self.length)
        at = _largest(blocks, self.keep)
        values = blocks.gather(1, at)
        scales, codes = _quantized(values)
        blocks.scatter_(1, at, values - _values(scales, codes))
        payload = bytearray(scales.view(torch.uint8).numpy().tobytes())
        payload += self._positions.encode(at)
        payload += pack(codes.reshape(-1).to(torch.int8), _CODE_BITS)
        return payload

    def decode(self, payload: memoryview, out: torch.Tensor) -> None:
        """Write the elements that were sent.

        Raises:
            UpdateError: the part is not one that `encode` returns.
        """
        scales = _elements(payload[: self._positions_at], torch.bfloat16).view(self.count, 2)
        if not bool(torch.isfinite(scales).all()):
            raise UpdateError("a magnitude in its compressed update is not finite")
        if not bool(((scales >= 0) & (scales <= scales[:, 1:])).all()):
            raise UpdateError("the magnitudes in its compressed update are not in order")
        at = self._positions.decode(payload[self._positions_at : self._codes_at])
        codes = unpack(payload[self._codes_at :], self.count * self.keep, _CODE_BITS)
        values = _values(scales, codes.view(self.count, self.keep))
        out.view(self.count, self.length).scatter_(1, at, values)

    @property
    def _positions(self) -> Positions:
        return Positions(self.count, self.length, self.keep)

    @property
    def _positions_at(self) -> int:
        return self.count * 2 * 2

    @property
    def _codes_at(self) -> int:
        return self._positions_at + self._positions.nbytes


def _largest(blocks: torch.Tensor, keep: int) -> torch.Tensor:
    """Positions (B, keep) of the largest magnitudes of each block, increasing.

    Of equal ones the first are taken, so that the result does not depend on how PyTorch selects.
    """
    sizes = blocks.abs()
    least = sizes.topk(keep, dim=1).values[:, -1:]
    chosen = sizes > least
    equal = sizes == least
    room = keep - chosen.sum(1, keepdim=True)
    chosen |= equal & (equal.cumsum(1) <= room)
    return chosen.nonzero()[:, 1].view(len(blocks), keep)


def _quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two magnitudes of each block, bfloat16 (B, 2), the smaller first; the values' codes (B, K).

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
    scales = torch.stack([low, high], 1).clamp(max=_LARGEST).to(torch.bfloat16)
    return scales, (values < 0).to(torch.int64) | (large.to(torch.int64) << 1)


def _values(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The values, float32 (B, K), of codes (B, K) with two magnitudes for each block (B, 2)."""
    sizes = scales.float().gather(1, (codes.to(torch.int64) >> 1) & 1)
    return torch.where((codes & 1).bool(), -sizes, sizes)


def _elements(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The elements of bytes, which may be read-only."""
    if not payload:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype)
