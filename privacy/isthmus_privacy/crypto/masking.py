"""Masks: keystream of AES-256-CTR, added to a vector in its ring, tile by tile.

A mask is the AES-256-CTR keystream of a 32-byte key from counter 0 (SP 800-38A, section 6.5),
read as little-endian words of the ring Z/2^bits. Adding wraps around, which is what makes masks
cancel exactly. No mask is ever held whole: one tile of keystream per thread is all there is.

The vector is walked once per group of keys, all masks of a group on one tile before the next, so
that the tile stays in cache. `cryptography` lets other threads run while it works, and the
counter can start anywhere, so threads take stretches of the vector and need no lock.

>>> vector = ring_vector(bytearray(8), 32)
>>> add_masks(vector, plus=[bytes(32)], minus=[])
>>> add_masks(vector, plus=[], minus=[bytes(32)])
>>> vector.tolist()
[0, 0]
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from isthmus.errors import UserError

RING = {16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Ring bits to the dtype whose wrapping addition is the ring's; signs mean nothing here."""

TILE = 32_704
"""Elements in a tile: below the 32768 at which PyTorch would wake its own threads for each add, and
a multiple of the 16-byte block in every ring. 128 KiB in the ring of 32 bits."""

_GROUP = 64
"""Keys whose ciphers are kept open at the same time."""

_BLOCK_BYTES = 16
_WORTH_A_THREAD = 1 << 20
"""Elements below which starting threads costs more than it saves."""


def ring_vector(buffer: bytearray | memoryview, bits: int) -> torch.Tensor:
    """The 1-D tensor over `buffer` (writable, little-endian words); they share their memory.

    Raises:
        UserError: this machine has the bytes of a word in the other order.
    """
    if sys.byteorder != "little":
        raise UserError(
            "secure aggregation needs a little-endian machine, as x86-64 and aarch64 are; "
            "this one is big-endian"
        )
    if len(buffer) == 0:
        return torch.empty(0, dtype=RING[bits])
    return torch.frombuffer(buffer, dtype=RING[bits])


def add_masks(
    vector: torch.Tensor,
    plus: Sequence[bytes | bytearray],
    minus: Sequence[bytes | bytearray],
    *,
    threads: int | None = None,
) -> None:
    """Add the masks of the keys in `plus` to the vector, and take away those of `minus`, in place.

    Args:
        vector: (N) a contiguous ring vector.
        plus: 32-byte keys.
        minus: 32-byte keys.
        threads: at most so many; None for the cores there are.
    """
    signed = [(key, True) for key in plus] + [(key, False) for key in minus]
    tiles = -(-len(vector) // TILE)
    workers = _workers(len(vector)) if threads is None else threads
    workers = max(1, min(workers, tiles))
    bounds = [tiles * i // workers for i in range(workers + 1)]
    stretches = list(itertools.pairwise(bounds))
    if workers == 1:
        _mask_tiles(vector, signed, 0, tiles)
        return
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(_mask_tiles, vector, signed, *ends) for ends in stretches]:
            done.result()


def add_payload(vector: torch.Tensor, payload: memoryview) -> None:
    """Add received words to a ring vector of as many, in place.

    Tile by tile, by way of a copy: a tensor cannot lie over received bytes, which are not writable.
    """
    width = vector.element_size()
    words = bytearray(TILE * width)
    tile = ring_vector(words, 8 * width)
    for start in range(0, len(vector), TILE):
        part = vector[start : start + TILE]
        count = len(part)
        words[: count * width] = payload[start * width : (start + count) * width]
        part.add_(tile[:count])


def cipher(key: bytes | bytearray, block: int = 0) -> CipherContext:
    """A keystream that begins at a 16-byte block; it is read by encrypting zeros."""
    counter = block.to_bytes(_BLOCK_BYTES, "big")
    return Cipher(algorithms.AES(bytes(key)), modes.CTR(counter)).encryptor()


def _workers(elements: int) -> int:
    return max(1, min(_cores(), elements // _WORTH_A_THREAD, 16))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(
    signed: Sequence[tuple[bytes | bytearray, bool]],
) -> Iterator[Sequence[tuple[bytes | bytearray, bool]]]:
    for start in range(0, len(signed), _GROUP):
        yield signed[start : start + _GROUP]


def _mask_tiles(
    vector: torch.Tensor, signed: Sequence[tuple[bytes | bytearray, bool]], first: int, last: int
) -> None:
    """All masks on the tiles `first` .. `last - 1`."""
    width = vector.element_size()
    zeros = memoryview(bytes(TILE * width))
    stream = bytearray(TILE * width)
    tile = torch.frombuffer(stream, dtype=vector.dtype)
    for group in _groups(signed):
        block = first * TILE * width // _BLOCK_BYTES
        ciphers = [(cipher(key, block), plus) for key, plus in group]
        for start in range(first * TILE, min(last * TILE, len(vector)), TILE):
            part = vector[start : start + TILE]
            count = len(part)
            blank, mask = zeros[: count * width], tile[:count]
            for context, plus in ciphers:
                context.update_into(blank, stream)
                if plus:
                    part.add_(mask)
                else:
                    part.sub_(mask)
    stream[:] = zeros
