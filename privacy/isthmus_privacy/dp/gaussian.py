"""Gaussian noise of a server that is trusted to add it, from a secret key.

The same key and row always give the same numbers, so that noise of earlier rounds need not be kept.
The randomness is the AES-256-CTR keystream of a key derived for the row (HKDF), which nobody
without the key can tell from random bits. The numbers are float64 by the method of Box and Muller
(1958), so they are rounded: the guarantee is for exact normal numbers, as with all published
implementations of noise in floating point (Mironov 2012 shows what rounding can reveal of a single
released value).

>>> draws = GaussianDraws(bytes(32), size=3)
>>> bool((draws.row(5) == draws.row(5)).all()), bool((draws.row(5) == draws.row(6)).any())
(True, False)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isthmus_privacy.crypto import keys
from isthmus_privacy.crypto.canonical import NUMBER

if TYPE_CHECKING:
    import torch

KEY_BYTES = 32

_BITS = 53
"""Random bits of a uniform number; a float64 has as many."""


class GaussianDraws:
    """Rows of independent standard normal numbers."""

    def __init__(self, key: bytes, size: int) -> None:
        """`key` is secret, 32 random bytes; `size` is N, the length of a row."""
        assert len(key) == KEY_BYTES
        self._key = key
        self._size = size

    def row(self, number: int) -> torch.Tensor:
        """Row `number`, from 0: (N) float64."""
        import torch

        from isthmus_privacy.crypto.masking import TILE, cipher, ring_vector

        seed = keys.derive(self._key, b"", "gaussian-row", NUMBER.write(number))
        stream = cipher(seed)
        out = torch.empty(self._size, dtype=torch.float64)
        for start in range(0, self._size, TILE):
            part = out[start : start + TILE]
            pairs = -(-len(part) // 2)
            words = bytearray(stream.update(bytes(16 * pairs)))
            bits = ring_vector(words, 64).view(2, pairs) & ((1 << _BITS) - 1)
            uniform = (bits + 1).double().mul_(2.0**-_BITS)  # in (0, 1]: its logarithm is finite
            length = uniform[0].log_().mul_(-2).sqrt_()
            angle = uniform[1].mul_(2 * math.pi)
            both = torch.stack([length * angle.cos(), length * angle.sin()]).flatten()
            part.copy_(both[: len(part)])
        return out
