"""The change of the model from one round to the next, with few bits for each parameter.

A device that has the model of an earlier round needs only what changed since. The server rounds the
change of each round to few levels *before* it commits the new model, so that the model that all
participants compute is the committed one, bit for bit. What rounding took away stays on the server
and is added to the next change (error feedback: Seide et al. 2014, Karimireddy et al. 2019).

An encoded change has, for N elements of which T are trained and M of those change:

  * M, 8 bytes;
  * if M < T, a bit for each trained element: whether it changes;
  * a step for each `BLOCK` elements that change, float32;
  * M levels: multiples of the block's step, from -(2**(bits-1) - 1) upwards. If few elements
    change, as after a round of compressed updates, these have the bits that the others save;
  * the other N - T elements, running statistics, whole: float32. A rounded variance could become
    negative.

>>> codec = ChangeCodec(size=4, trained=3, bits=2)
>>> before, after = torch.zeros(4), torch.tensor([0.5, -0.5, 0.0, 7.0])
>>> payload = codec.encode(before, after)
>>> len(payload) == codec.nbytes == 8 + 4 + 1 + 4
True
>>> codec.apply(before, payload)
17
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
"""Most bits of a level, if all elements change."""

_FEW_BITS = 16
"""Most bits of a level, if few elements change."""

_TILE = 32 * BLOCK
"""Elements processed at a time; they stay in the CPU cache."""

_CLIP = {2: 1.2, 3: 1.8, 4: 2.4, 5: 3.0, 6: 3.6, 7: 4.2, 8: 4.8}
"""Largest level by bits, in root mean squares of a block: near the optimum of uniform levels for a
normal distribution (Max 1960). What is clipped is part of the next change. With more bits it is the
largest element."""

_COUNT_BYTES = 8


@dataclasses.dataclass(frozen=True)
class ChangeCodec:
    """Encodes and applies changes of one layout of models."""

    size: int
    """N: elements of a model."""
    trained: int
    """T: the first elements, which are rounded."""
    bits: int
    """Bits of a level if all elements change, 2 to `MAX_BITS`."""

    @property
    def nbytes(self) -> int:
        """Most bytes of an encoded change."""
        return self._nbytes(self.trained)

    def _nbytes(self, changing: int) -> int:
        """Bytes of a change of some trained elements."""
        places = -(-self.trained // 8) if changing < self.trained else 0
        levels = -(-changing * self._bits(changing) // 8)
        statistics = 4 * (self.size - self.trained)
        return _COUNT_BYTES + places + 4 * _blocks(changing) + levels + statistics

    def _bits(self, changing: int) -> int:
        """Bits of a level: all fit into as many bytes as if all trained elements changed.

        0 if that many elements have to be encoded with the ones that do not change.
        """
        if changing == self.trained:
            return self.bits
        whole = 4 * _blocks(self.trained) + -(-self.trained * self.bits // 8)
        left = whole - -(-self.trained // 8) - 4 * _blocks(changing)
        bits = min(8 * left // max(changing, 1), _FEW_BITS)
        return bits if bits > self.bits else 0

    def encode(
        self, before: torch.Tensor, after: torch.Tensor, changing: torch.Tensor | None = None
    ) -> bytearray:
        """Encode the change from one model to another, finite float32 (N) both.

        Args:
            before: the earlier model.
            after: the later one.
            changing: (T) bool, the elements that are to change; None for all. If they are many,
                all change.
        """
        count = self.trained if changing is None else int(changing.sum())
        if changing is None or count == self.trained or not self._bits(count):
            count = self.trained
            places = bytearray()
        else:
            places = pack(changing.to(torch.uint8), 1)
        bits = self._bits(count)
        steps = torch.zeros(_blocks(count))
        levels = torch.empty(count, dtype=torch.int32)
        change = after[: self.trained] - before[: self.trained]
        if places:
            change = change[changing]
        for start in range(0, count, _TILE):
            part = change[start : start + _TILE]
            blocks = _in_blocks(part)
            of = slice(start // BLOCK, start // BLOCK + len(blocks))
            steps[of] = _steps(blocks, len(part), bits)
            # A step of zero has no other values than zero.
            divisors = torch.where(steps[of] > 0, steps[of], torch.ones(()))
            half = _half(bits)
            rounded = (blocks / divisors.unsqueeze(1)).round_().clamp_(-half, half)
            levels[start : start + _TILE] = (rounded + half).reshape(-1)[: len(part)].int()
        statistics = after[self.trained :].contiguous()
        first = count.to_bytes(_COUNT_BYTES, "little") + bytes(places)
        return bytearray(first + _bytes(steps) + bytes(pack(levels, bits)) + _bytes(statistics))

    def apply(self, vector: torch.Tensor, payload: bytes | bytearray | memoryview) -> int:
        """Replace a model before a change, float32 (N), by the one after it, in place.

        Products and sums are rounded one after the other, so that every processor gets the same
        bits.

        Args:
            vector: the model.
            payload: begins with a change.

        Returns:
            The number of bytes of the change.

        Raises:
            ValueError: another number of bytes, or other elements than are announced.
        """
        view = memoryview(payload)
        count = int.from_bytes(view[:_COUNT_BYTES], "little")
        bits = self._bits(count) if count <= self.trained else 0
        if len(view) < _COUNT_BYTES or not bits or len(view) < self._nbytes(count):
            raise ValueError(f"a change of {len(view)} bytes came; it has {self.nbytes} or fewer")
        view = view[_COUNT_BYTES : self._nbytes(count)]
        rest = 4 * (self.size - self.trained)
        changing = None
        if count < self.trained:
            at = -(-self.trained // 8)
            changing = unpack(view[:at], self.trained, 1).bool()
            view = view[at:]
            if int(changing.sum()) != count:
                raise ValueError(f"a change of {count} elements names {int(changing.sum())}")
        first = 4 * _blocks(count)
        last = len(view) - rest
        steps = _floats(view[:first])
        levels = unpack(view[first:last], count, bits)
        values = vector[: self.trained] if changing is None else vector[: self.trained][changing]
        for start in range(0, count, _TILE):
            words = levels[start : start + _TILE].int() & ((1 << bits) - 1)
            blocks = _in_blocks(words.float() - _half(bits))
            of = slice(start // BLOCK, start // BLOCK + len(blocks))
            blocks.mul_(steps[of].unsqueeze(1))
            values[start : start + _TILE].add_(blocks.reshape(-1)[: len(words)])
        if changing is not None:
            vector[: self.trained][changing] = values
        vector[self.trained :] = _floats(view[last:])
        return self._nbytes(count)


def _blocks(elements: int) -> int:
    """Number of steps of some elements."""
    return -(-elements // BLOCK)


def _in_blocks(elements: torch.Tensor) -> torch.Tensor:
    """Elements, and zeros up to a multiple of `BLOCK`: (B x `BLOCK`)."""
    return torch.nn.functional.pad(elements, (0, -len(elements) % BLOCK)).reshape(-1, BLOCK)


def _half(bits: int) -> int:
    """The largest level."""
    return (1 << bits - 1) - 1


def _steps(blocks: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """The step of each block (B x `BLOCK`) of `count` elements, float32 (B)."""
    largest = blocks.abs().amax(1).double()
    if bits in _CLIP:
        elements = torch.full((len(blocks),), BLOCK)
        elements[-1] -= len(blocks) * BLOCK - count
        root_mean_square = (blocks.double().square().sum(1) / elements).sqrt()
        largest = torch.minimum(largest, _CLIP[bits] * root_mean_square)
    return (largest / _half(bits)).float()


def _bytes(vector: torch.Tensor) -> bytes:
    return vector.numpy().tobytes()


def _floats(view: memoryview) -> torch.Tensor:
    # Received bytes may be read-only, and a tensor cannot view them.
    return torch.frombuffer(bytearray(view), dtype=torch.float32) if len(view) else torch.empty(0)
