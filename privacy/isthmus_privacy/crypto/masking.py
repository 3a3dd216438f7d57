"""Add AES-256-CTR masks to a ring vector tile by tile.

A mask is the AES-256-CTR keystream of a 32-byte key from counter 0 (SP 800-38A, section 6.5),
read as little-endian words of the ring Z/2^bits. Addition wraps around, so masks cancel exactly.
No mask is materialised: memory is one tile of keystream per thread.

The vector is traversed once per group of keys. All masks of a group are added to one tile before
the next, so that the tile stays in cache. `cryptography` releases the GIL and the counter can start
anywhere, so each thread handles a contiguous range of tiles without locks.

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

RING = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Ring bits to the dtype whose wrapping addition is that of the ring; signs have no meaning."""

TILE = 32_704
"""Elements of a tile: below 32768, from which PyTorch parallelises each addition itself, and a
multiple of the 16-byte block in every ring. 128 KiB in the ring of 32 bits."""

_KEYS_PER_GROUP = 64
"""Ciphers that are open at the same time."""

_BLOCK_BYTES = 16
_MIN_ELEMENTS_PER_THREAD = 1 << 20
"""Below this, starting a thread costs more than it saves."""


def word_bits(bits: int) -> int:
    """Bits of the smallest words that hold elements of a ring.

    The low bits of a uniform word are uniform, so that masks of whole words mask them too.
    """
    return next(width for width in RING if bits <= width)


def ring_vector(buffer: bytearray | memoryview, bits: int) -> torch.Tensor:
    """View a writable buffer of little-endian words as a 1-D tensor that shares its memory.

    Raises:
        UserError: this machine is big-endian.
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
    """Add the masks of the keys in `plus` and subtract those of `minus`, in place.

    Args:
        vector: (N) a contiguous ring vector.
        plus: 32-byte keys.
        minus: 32-byte keys.
        threads: maximum number; None for the number of cores.
    """
    signed_keys = [(key, True) for key in plus] + [(key, False) for key in minus]
    tiles = -(-len(vector) // TILE)
    workers = _workers(len(vector)) if threads is None else threads
    workers = max(1, min(workers, tiles))
    bounds = [tiles * i // workers for i in range(workers + 1)]
    ranges = list(itertools.pairwise(bounds))
    if workers == 1:
        _mask_tiles(vector, signed_keys, 0, tiles)
        return
    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(_mask_tiles, vector, signed_keys, *bound) for bound in ranges]:
            future.result()


def add_payload(vector: torch.Tensor, payload: memoryview, *, sign: int = 1) -> None:
    """Add received words to a ring vector of the same length, in place; `sign` -1 subtracts them.

    Each tile is copied first: a tensor cannot view received bytes, which are read-only.
    """
    width = vector.element_size()
    words = bytearray(TILE * width)
    tile = ring_vector(words, 8 * width)
    for start in range(0, len(vector), TILE):
        part = vector[start : start + TILE]
        count = len(part)
        words[: count * width] = payload[start * width : (start + count) * width]
        part.add_(tile[:count], alpha=sign)


def cipher(key: bytes | bytearray, block: int = 0) -> CipherContext:
    """Open a keystream at a 16-byte block; encrypting zeros reads it."""
    counter = block.to_bytes(_BLOCK_BYTES, "big")
    return Cipher(algorithms.AES(bytes(key)), modes.CTR(counter)).encryptor()


def _workers(elements: int) -> int:
    return max(1, min(_cores(), elements // _MIN_ELEMENTS_PER_THREAD, 16))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(
    signed_keys: Sequence[tuple[bytes | bytearray, bool]],
) -> Iterator[Sequence[tuple[bytes | bytearray, bool]]]:
    for start in range(0, len(signed_keys), _KEYS_PER_GROUP):
        yield signed_keys[start : start + _KEYS_PER_GROUP]


def _mask_tiles(
    vector: torch.Tensor,
    signed_keys: Sequence[tuple[bytes | bytearray, bool]],
    first: int,
    last: int,
) -> None:
    """Apply all masks to the tiles `first` .. `last - 1`."""
    width = vector.element_size()
    zeros = memoryview(bytes(TILE * width))
    stream = bytearray(TILE * width)
    tile = torch.frombuffer(stream, dtype=vector.dtype)
    for group in _groups(signed_keys):
        block = first * TILE * width // _BLOCK_BYTES
        ciphers = [(cipher(key, block), plus) for key, plus in group]
        for start in range(first * TILE, min(last * TILE, len(vector)), TILE):
            part = vector[start : start + TILE]
            count = len(part)
            blank = zeros[: count * width]
            mask = tile[:count]
            for context, plus in ciphers:
                context.update_into(blank, stream)
                if plus:
                    part.add_(mask)
                else:
                    part.sub_(mask)
    stream[:] = zeros
