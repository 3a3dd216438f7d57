"""Rotate a vector at random, so that all its elements have about the same size.

The signs of the elements are drawn from a public seed, then each block is multiplied by a
Hadamard matrix (Kairouz, Liu, Steinke 2021, section 4.2). A block is a power of two, so elements
may be left at the end: the last block, which overlaps the one before it, is then rotated once more
in the same way, with other signs. No element is added.

All steps are orthonormal: norms and sums do not change, and `unrotate` inverts them. If the 2-norm
of the vector is at most c, each rotated element is sub-Gaussian with variance c^2 / B for blocks of
B elements: what its last block was multiplied by is independent of that block's signs.

>>> vector = torch.tensor([3.0, 0.0, 0.0, 4.0, 0.0])
>>> rotate(vector, bytes(32))
>>> round(float(vector.norm()), 5), round(float(vector.abs().max()), 2)
(5.0, 3.5)
>>> unrotate(vector, bytes(32))
>>> [abs(round(x, 5)) for x in vector.tolist()]
[3.0, 0.0, 0.0, 4.0, 0.0]
"""

from __future__ import annotations

import math

import torch

from isthmus_privacy.crypto.masking import TILE, cipher

LARGEST_BLOCK = 1 << 20

_TILE = 1 << 14
"""Elements that are transformed in the cache: below 32768, from which PyTorch uses threads, which
wait for each other by spinning. Products of matrices would use them too."""

_SECOND = 1 << 64
"""Where the keystream begins from which the signs of the last block are drawn."""


def block_size(size: int) -> int:
    """Elements of a block for a vector of `size` elements: a power of two, up to 2^20.

    >>> [block_size(n) for n in (1, 3, 650, 1_000_000, 10_000_000)]
    [1, 2, 512, 524288, 1048576]
    """
    return min(1 << (size.bit_length() - 1), LARGEST_BLOCK)


def rotate(vector: torch.Tensor, seed: bytes) -> None:
    """Rotate in place; scratch memory is two tiles.

    Args:
        vector: (N) float32.
        seed: 32 bytes that all devices of a sum have, and that no vector depends on.
    """
    whole, last = _blocks(vector)
    _flip(whole, seed)
    _transform(whole, len(last))
    if len(whole) < len(vector):
        _flip(last, seed, _SECOND)
        _transform(last, len(last))


def unrotate(vector: torch.Tensor, seed: bytes) -> None:
    """Invert `rotate`, in place."""
    whole, last = _blocks(vector)
    if len(whole) < len(vector):
        _transform(last, len(last))
        _flip(last, seed, _SECOND)
    _transform(whole, len(last))
    _flip(whole, seed)


def _blocks(vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part that whole blocks cover, and the last block."""
    block = block_size(len(vector))
    return vector[: len(vector) // block * block], vector[-block:]


def _flip(vector: torch.Tensor, seed: bytes, first: int = 0) -> None:
    """Multiply by signs, one bit of the keystream's byte for each element."""
    stream = bytearray(min(TILE, len(vector)))
    blank = memoryview(bytes(len(stream)))
    words = torch.frombuffer(stream, dtype=torch.int8)
    keystream = cipher(seed, first)
    for start in range(0, len(vector), TILE):
        part = vector[start : start + TILE]
        keystream.update_into(blank[: len(part)], stream)
        part.mul_((words[: len(part)] & 2) - 1)


def _transform(vector: torch.Tensor, block: int) -> None:
    """Multiply each block by the orthonormal Hadamard matrix, in place; its own inverse."""
    tile = min(block, _TILE)
    scratch = torch.empty(2, tile, dtype=torch.float32)
    for start in range(0, len(vector), tile):
        _transform_tile(vector[start : start + tile], scratch, 1 / math.sqrt(block))
    distance = tile
    while distance < block:
        for start in range(0, len(vector), tile):
            if start & distance == 0:
                low, high = (vector[i : i + tile] for i in (start, start + distance))
                torch.sub(low, high, out=scratch[0])
                low.add_(high)
                high.copy_(scratch[0])
        distance *= 2


def _transform_tile(part: torch.Tensor, scratch: torch.Tensor, scale: float) -> None:
    """Multiply by Sylvester's Hadamard matrix and a number: columns of a matrix, then its rows."""
    rows = 1 << (len(part).bit_length() // 2)
    x, y = scratch
    torch.mul(part, scale, out=x)
    x, y = _butterflies(x, y, rows)
    y.view(-1, rows).copy_(x.view(rows, -1).t())
    x, y = _butterflies(y, x, len(part) // rows)
    part.view(rows, -1).copy_(x.view(-1, rows).t())


def _butterflies(x: torch.Tensor, y: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Transform the columns of x, a matrix of so many rows; returns the result and the other."""
    inner = len(x) // rows
    while inner < len(x):
        pairs = x.view(-1, 2, inner)
        out = y.view(-1, 2, inner)
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        x, y = y, x
        inner *= 2
    return x, y
