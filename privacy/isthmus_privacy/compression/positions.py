"""Positions of the elements that are sent of each block, in a fixed number of bits.

The low bits of each position are written as they are. The others never fall from one position to
the next: for each of their values there are as many ones as positions with it, and then a zero.
For 144 positions of 4,096 that takes 6.7 bits for each, where no code of all such sets takes fewer
than 6.2 on average. The code is that of Elias and Fano.

>>> positions = Positions(count=1, length=16, keep=3)
>>> payload = positions.encode(torch.tensor([[2, 3, 15]]))
>>> len(payload), positions.decode(payload).tolist()
(2, [[2, 3, 15]])
"""

from __future__ import annotations

import dataclasses

import torch

from isthmus.errors import UpdateError
from isthmus_privacy.compression.packing import pack, unpack


@dataclasses.dataclass(frozen=True)
class Positions:
    """Encodes the positions in B blocks, (B, K).

    A message has the low bits of all positions, and then as many ones and zeros for each block,
    without the last zero. Its number of bytes does not depend on the positions.
    """

    count: int
    """B."""
    length: int
    """Elements of a block."""
    keep: int
    """K, at least 1 and at most `length`."""

    @property
    def nbytes(self) -> int:
        """Bytes of a message."""
        return self._low_bytes + -(-self.count * self._marks(self._low_bits) // 8)

    def encode(self, positions: torch.Tensor) -> bytearray:
        """A message of increasing positions, int64 (B, K)."""
        low_bits = self._low_bits
        payload = pack((positions & ((1 << low_bits) - 1)).reshape(-1), low_bits)
        marks = torch.zeros(self.count, self._marks(low_bits), dtype=torch.int8)
        marks.scatter_(1, (positions >> low_bits) + torch.arange(self.keep), 1)
        return payload + pack(marks.reshape(-1), 1)

    def decode(self, payload: bytes | bytearray | memoryview) -> torch.Tensor:
        """The positions of a message of `nbytes`, int64 (B, K).

        Raises:
            UpdateError: it is not one of `encode`.
        """
        low_bits = self._low_bits
        low = torch.zeros((), dtype=torch.int64)
        marks = unpack(payload[self._low_bytes :], self.count * self._marks(low_bits), 1)
        marks = marks.view(self.count, -1)
        if not bool((marks.sum(1) == self.keep).all()):
            raise UpdateError(
                f"a block of its compressed update has not {self.keep} positions as it should"
            )
        high = marks.nonzero()[:, 1].view(self.count, self.keep) - torch.arange(self.keep)
        if low_bits:
            low = unpack(payload[: self._low_bytes], self.count * self.keep, low_bits)
            low = low.to(torch.int64).view(self.count, self.keep) & ((1 << low_bits) - 1)
        positions = (high << low_bits) | low
        if not bool((positions.diff(dim=1) > 0).all()):
            raise UpdateError("positions in its compressed update are not increasing")
        if not bool((positions < self.length).all()):
            raise UpdateError("a position in its compressed update is outside of its block")
        return positions

    @property
    def _low_bits(self) -> int:
        """Number of low bits with which a message is smallest."""
        widths = range(self.length.bit_length())
        return min(widths, key=lambda bits: self.keep * bits + self._marks(bits))

    def _marks(self, low_bits: int) -> int:
        """Ones and zeros of a block."""
        return self.keep + ((self.length - 1) >> low_bits)

    @property
    def _low_bytes(self) -> int:
        return -(-self.count * self.keep * self._low_bits // 8)
