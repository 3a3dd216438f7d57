"""The ring elements that a client sends in a round, and sums of them.

Without a codec they are one vector. With one, the elements of the update have a ring of few bits,
and the weight and the figures a ring of `FIGURE_BITS`, with masks of their own: divided into
elements of few bits, the server would learn the sum of each part, which says more than their sum.

>>> import torch
>>> vector = RoundVector(length=3, bits=5, figures=1)
>>> vector.elements.copy_(torch.tensor([1, 2, 31])), vector.figures.fill_(7)
(tensor([ 1,  2, 31], dtype=torch.int8), tensor([7], dtype=torch.int32))
>>> vector.mask([bytes(32)], [])
>>> total = RoundVector(length=3, bits=5, figures=1)
>>> total.add(vector.payload()), total.mask([], [bytes(32)])
(None, None)
>>> (total.elements & 31).tolist(), total.figures.tolist()
([1, 2, 31], [7])
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus_privacy.compression.packing import packed, unpacked_tiles
from isthmus_privacy.crypto.canonical import tagged_hash
from isthmus_privacy.crypto.masking import add_masks, add_payload, ring_vector, word_bits

FIGURE_BITS = 32
"""The ring of the weight and the figures that go with a compressed update."""

_FIGURE_BYTES = FIGURE_BITS // 8


class RoundVector:
    """Elements in a ring of any number of bits, and figures in one of `FIGURE_BITS`."""

    def __init__(self, *, length: int, bits: int, figures: int) -> None:
        """Zeros.

        Args:
            length: number of elements.
            bits: of the elements' ring, see `isthmus_privacy.crypto.masking.RING`.
            figures: number of figures.
        """
        self._bits = bits
        self._words = bytearray(length * word_bits(bits) // 8)
        self._figure_words = bytearray(figures * _FIGURE_BYTES)
        self.elements = ring_vector(self._words, word_bits(bits))
        """(length) words, of which the low `bits` bits count."""
        self.figures = ring_vector(self._figure_words, FIGURE_BITS)
        """(figures) int32."""

    @staticmethod
    def payload_bytes(*, length: int, bits: int, figures: int) -> int:
        """Size of the payload of such a vector, which is not allocated for that."""
        return -(-length * bits // 8) + figures * _FIGURE_BYTES

    def payload(self) -> bytearray:
        """What is sent, which may be this vector's memory: elements without gaps, then figures."""
        elements = packed(self._words, self._bits)
        return elements + self._figure_words if self._figure_words else elements

    def add(self, payload: bytes | bytearray | memoryview) -> None:
        """Add what `payload` of a vector of the same form returned, in place."""
        self._add(memoryview(payload), 1)

    def subtract(self, payload: bytes | bytearray | memoryview) -> None:
        """Undo `add` of the same payload; memory is that of a tile, so that it is to be had."""
        self._add(memoryview(payload), -1)

    def _add(self, view: memoryview, sign: int) -> None:
        end = len(view) - len(self._figure_words)
        elements = view[:end]
        figures = view[end:]
        if self.elements.element_size() * 8 != self._bits:
            for start, tile in unpacked_tiles(elements, len(self.elements), self._bits):
                self.elements[start : start + len(tile)].add_(tile, alpha=sign)
        elif view.readonly:
            add_payload(self.elements, elements, sign=sign)
        else:
            self.elements.add_(ring_vector(elements, self._bits), alpha=sign)
        add_payload(self.figures, figures, sign=sign)

    def mask(
        self,
        plus: Sequence[bytes | bytearray],
        minus: Sequence[bytes | bytearray],
        *,
        threads: int | None = None,
    ) -> None:
        """Add and subtract the masks of keys, in place; see `add_masks`."""
        add_masks(self.elements, plus, minus, threads=threads)
        if len(self.figures):
            add_masks(
                self.figures,
                [_figures_key(key) for key in plus],
                [_figures_key(key) for key in minus],
                threads=1,
            )


def _figures_key(key: bytes | bytearray) -> bytes:
    """The key of the figures' mask."""
    return tagged_hash("mask-of-figures", bytes(key))
