"""Pack ring elements of any number of bits into bytes without gaps.

>>> payload = pack(torch.tensor([1, 2, 31], dtype=torch.int8), 5)
>>> len(payload), unpack(payload, 3, 5).tolist()
(2, [1, 2, 31])
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isthmus_privacy.crypto.masking import RING, TILE, ring_vector, word_bits

_BYTE = 8


def pack(vector: torch.Tensor, bits: int) -> bytearray:
    """The low bits of each element, one element after the other, least significant bit first.

    Args:
        vector: (N) words of `word_bits(bits)` bits, on the CPU.
        bits: of an element.
    """
    payload = bytearray(-(-len(vector) * bits // _BYTE))
    if not payload:
        return payload
    out = torch.frombuffer(payload, dtype=torch.uint8)
    shifts = torch.arange(bits)
    for start in range(0, len(vector), TILE):
        words = vector[start : start + TILE].to(torch.int64)
        at = start * bits // _BYTE  # a whole number: a tile is a multiple of 8 elements
        if bits <= _BYTE:
            octets = _octets_of_eight(words, bits)
        else:
            kept = ((words.unsqueeze(1) >> shifts) & 1).reshape(-1)
            missing = -len(kept) % _BYTE
            each = torch.nn.functional.pad(kept, (0, missing)).reshape(-1, _BYTE)
            octets = (each << torch.arange(_BYTE)).sum(1)
        out[at : at + len(octets)] = octets[: len(out) - at]
    return payload


def _octets_of_eight(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes, uint8, of elements of at most 8 bits: eight of them fit into one word."""
    eight = torch.nn.functional.pad(words & ((1 << bits) - 1), (0, -len(words) % _BYTE))
    joined = (eight.reshape(-1, _BYTE) << bits * torch.arange(_BYTE)).sum(1)
    return joined.view(torch.uint8).reshape(-1, _BYTE)[:, :bits].reshape(-1)


def _eight_of_octets(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """The elements, int64, of the bytes that `_octets_of_eight` returned."""
    padded = torch.nn.functional.pad(octets, (0, -len(octets) % bits)).reshape(-1, bits)
    joined = torch.nn.functional.pad(padded, (0, _BYTE - bits)).view(torch.int64)
    return ((joined >> bits * torch.arange(_BYTE)) & ((1 << bits) - 1)).reshape(-1)


def packed(words: bytearray, bits: int) -> bytearray:
    """The words of a ring vector as they are sent: themselves if they have no bits to spare."""
    width = word_bits(bits)
    return words if width == bits else pack(ring_vector(words, width), bits)


def unpack(payload: bytes | bytearray | memoryview, count: int, bits: int) -> torch.Tensor:
    """The elements (count) that `pack` was given, without their other bits.

    Raises:
        ValueError: the number of bytes is not that of `count` elements.
    """
    vector = torch.empty(count, dtype=RING[word_bits(bits)])
    for start, tile in unpacked_tiles(payload, count, bits):
        vector[start : start + len(tile)] = tile
    return vector


def unpacked_tiles(
    payload: bytes | bytearray | memoryview, count: int, bits: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Unpack tile by tile; each uses the memory of the one before.

    Yields:
        The number of the tile's first element, and its elements (at most `TILE`).

    Raises:
        ValueError: before the first tile, if these are not the bytes of `count` elements.
    """
    if len(payload) != -(-count * bits // _BYTE):
        raise ValueError(f"{len(payload)} bytes are not {count} elements of {bits} bits")
    tile = torch.empty(min(TILE, count), dtype=RING[word_bits(bits)])
    shifts = torch.arange(bits)
    for start in range(0, count, TILE):
        out = tile[: min(TILE, count - start)]
        at = start * bits // _BYTE
        size = -(-len(out) * bits // _BYTE)
        # Received bytes are read-only, and a tensor cannot view them.
        octets = torch.frombuffer(bytearray(payload[at : at + size]), dtype=torch.uint8)
        if bits <= _BYTE:
            out.copy_(_eight_of_octets(octets, bits)[: len(out)])
        else:
            flat = (octets.to(torch.int64).unsqueeze(1) >> torch.arange(_BYTE)) & 1
            kept = flat.reshape(-1)[: len(out) * bits].reshape(-1, bits)
            out.copy_((kept << shifts).sum(1))
        yield start, out
