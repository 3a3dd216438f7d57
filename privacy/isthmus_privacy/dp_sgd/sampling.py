"""The examples of a step: every one independently, with the same probability (Poisson sampling).

>>> sample = poisson_sample(range(1, 1000, 2), 0.1, key=bytes(32))
>>> len(sample), sample[:3]
(52, [3, 17, 37])
"""

from __future__ import annotations

import os

from isthmus_privacy.crypto.masking import TILE, cipher, ring_vector

_KEY_BYTES = 32
_BITS = 53
"""Random bits of a uniform number; a float64 has as many."""


def poisson_sample(examples: range, probability: float, key: bytes | None = None) -> list[int]:
    """Choose each example independently with a probability, to 2^-53.

    Args:
        examples: to choose among.
        probability: above 0, at most 1.
        key: 32 random bytes, to be used once; None for new ones.
    """
    stream = cipher(key or os.urandom(_KEY_BYTES))
    limit = int(probability * 2**_BITS)
    chosen = []
    for start in range(0, len(examples), TILE):
        part = examples[start : start + TILE]
        words = bytearray(stream.update(bytes(8 * len(part))))
        uniform = ring_vector(words, 64) & ((1 << _BITS) - 1)
        chosen += [part[index] for index in (uniform < limit).nonzero().flatten().tolist()]
    return chosen
