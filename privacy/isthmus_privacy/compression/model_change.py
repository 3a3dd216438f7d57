"""The change of the model from one round to the next, with few bits for each parameter.

A device that has the model of an earlier round needs only what changed since. The server rounds the
change of each round to few levels *before* it commits the new model, so that the model that all
participants compute is the committed one, bit for bit. What rounding took away stays on the server
and is added to the next change (error feedback: Seide et al. 2014, Karimireddy et al. 2019).

An encoded change has, for N elements of which T are trained:

  * a step for each block of `BLOCK` trained elements, float32;
  * T levels of `bits` bits: multiples of the block's step, from -(2**(bits-1) - 1) upwards;
  * the other N - T elements, running statistics, whole: float32. A rounded variance could become
    negative.

>>> codec = ChangeCodec(size=4, trained=3, bits=2)
>>> before, after = torch.zeros(4), torch.tensor([0.5, -0.5, 0.0, 7.0])
>>> payload = codec.encode(before, after)
>>> len(payload) == codec.nbytes == 4 + 1 + 4
True
>>> codec.apply(before, payload)
>>> [round(value, 2) for value in before.tolist()]  # the last one is a running statistic
[0.49, -0.49, 0.0, 7.0]
"""

from __future__ import annotations

import dataclasses

import torch

from isthmus_privacy.compression.packing import pack, unpack

BLOCK = 1024
"""Neighbouring elements that share a step: its 32 bits are then 1/32 of a bit for each."""

MAX_BITS = 8

_TILE = 32 * BLOCK
"""Elements processed at a time; they stay in the CPU cache."""

_CLIP = {2: 1.2, 3: 1.8, 4: 2.4, 5: 3.0, 6: 3.6, 7: 4.2, 8: 4.8}
"""Largest level by bits, in root mean squares of a block: near the optimum of uniform levels for a
normal distribution (Max 1960). What is clipped is part of the next change."""


@dataclasses.dataclass(frozen=True)
class ChangeCodec:
    """Encodes and applies changes of one layout of models."""

    size: int
    """N: elements of a model."""
    trained: int
    """T: the first elements, which are rounded."""
    bits: int
    """Bits of a level, 2 to `MAX_BITS`."""

    @property
    def blocks(self) -> int:
        """Number of steps in a change."""
        return -(-self.trained // BLOCK)

    @property
    def nbytes(self) -> int:
        """Bytes of an encoded change."""
        levels = -(-self.trained * self.bits // 8)
        return 4 * self.blocks + levels + 4 * (self.size - self.trained)

    @property
    def _half(self) -> int:
        return (1 << self.bits - 1) - 1

    def encode(self, before: torch.Tensor, after: torch.Tensor) -> bytearray:
        """Encode the change from one model to another, finite float32 (N) both."""
        steps = torch.zeros(self.blocks)
        levels = torch.empty(self.trained, dtype=torch.uint8)
        for start in range(0, self.trained, _TILE):
            end = min(start + _TILE, self.trained)
            change = after[start:end] - before[start:end]
            blocks = torch.nn.functional.pad(change, (0, -len(change) % BLOCK)).reshape(-1, BLOCK)
            part = slice(start // BLOCK, start // BLOCK + len(blocks))
            steps[part] = self._steps(blocks, len(change))
            # A step of zero has no other values than zero.
            divisors = torch.where(steps[part] > 0, steps[part], torch.ones(()))
            rounded = (blocks / divisors.unsqueeze(1)).round_().clamp_(-self._half, self._half)
            levels[start:end] = (rounded + self._half).reshape(-1)[: len(change)].to(torch.uint8)
        statistics = after[self.trained :].contiguous()
        return bytearray(_bytes(steps) + bytes(pack(levels, self.bits)) + _bytes(statistics))

    def _steps(self, blocks: torch.Tensor, count: int) -> torch.Tensor:
        """The step of each block (B x `BLOCK`) of `count` elements, float32 (B)."""
        elements = torch.full((len(blocks),), BLOCK)
        elements[-1] -= len(blocks) * BLOCK - count
        root_mean_square = (blocks.double().square().sum(1) / elements).sqrt()
        largest = blocks.abs().amax(1).double()
        return (torch.minimum(largest, _CLIP[self.bits] * root_mean_square) / self._half).float()

    def apply(self, vector: torch.Tensor, payload: bytes | bytearray | memoryview) -> None:
        """Replace a model before a change, float32 (N), by the one after it, in place.

        Products and sums are rounded one after the other, so that every processor gets the same
        bits.

        Raises:
            ValueError: another number of bytes.
        """
        if len(payload) != self.nbytes:
            raise ValueError(f"a change of {len(payload)} bytes came; it has {self.nbytes}")
        view = memoryview(payload)
        first, last = 4 * self.blocks, len(view) - 4 * (self.size - self.trained)
        steps = _floats(view[:first])
        levels = unpack(view[first:last], self.trained, self.bits).view(torch.uint8)
        for start in range(0, self.trained, _TILE):
            part = levels[start : min(start + _TILE, self.trained)].float() - self._half
            blocks = torch.nn.functional.pad(part, (0, -len(part) % BLOCK)).reshape(-1, BLOCK)
            of = slice(start // BLOCK, start // BLOCK + len(blocks))
            blocks.mul_(steps[of].unsqueeze(1))
            vector[start : start + len(part)].add_(blocks.reshape(-1)[: len(part)])
        vector[self.trained :] = _floats(view[last:])


def _bytes(vector: torch.Tensor) -> bytes:
    return vector.numpy().tobytes()


def _floats(view: memoryview) -> torch.Tensor:
    # Received bytes may be read-only, and a tensor cannot view them.
    return torch.frombuffer(bytearray(view), dtype=torch.float32) if len(view) else torch.empty(0)
