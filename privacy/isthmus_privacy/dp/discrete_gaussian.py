"""Noise of the discrete Gaussian distribution: P(x) is proportional to exp(-x^2 / (2 sigma^2)).

Samples are exact up to a statistical distance of 2^-100 each: probabilities are integers, and no
floating-point number decides anything but sigma, which is met to 1e-15 of itself.

*Small standard deviations*, up to 170: Walker's alias method on a table of 4096 columns, whose
probabilities are integers in units of 2^-160. A word of 32 random bits selects the column by 12
and decides between its two values by 20; if these 20 are equal to those of the threshold, a
further 128 decide. What is beyond 2047, 12 standard deviations, is cut off: 2^-108.

*Large standard deviations*: x = x1 + k x2 with independent x1 and x2 of the deviations s1 = 2k and
s2, where s1^2 + k^2 s2^2 = sigma^2 (as in Micciancio and Walter 2017). Completing the square,

    P(x) ~ exp(-x^2 / (2 sigma^2)) sum_j exp(-(j - c x)^2 / (2 v)),   1 / v = k^2 / s1^2 + 1 / s2^2

and by Poisson's summation formula the sum over j differs from a constant by a factor of at most
1 +- 2.01 exp(-2 pi^2 v), that is 2^-112 for v > 3.99.

>>> noise = torch.zeros(100_000, dtype=torch.int32)
>>> add_noise(noise, 1000.0)
>>> 980 < float(noise.double().std()) < 1020
True
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from decimal import Decimal, localcontext

import torch

from isthmus_privacy.crypto.masking import TILE, cipher

SIGMA_MIN = 1.0
SIGMA_MAX = float(1 << 26)
"""Range of the standard deviation; above it, a sample may not fit 32 bits."""

_SELECT_BITS = 12
_COLUMNS = 1 << _SELECT_BITS
_CENTRE = _COLUMNS // 2
_FIRST_BITS = 32 - _SELECT_BITS
_FURTHER_BYTES = 16
_THRESHOLD_BITS = _FIRST_BITS + 8 * _FURTHER_BYTES
_WHOLE_COLUMN = 1 << _THRESHOLD_BITS

_LARGEST_TABLE = 170.0
_LARGEST_FACTOR = 80

_FIXED_BITS = 320
_DIGITS = 120
"""Precision of the probabilities, far above that of the thresholds."""


class RandomBytes:
    """AES-256-CTR keystream of a key from the operating system, or of a fixed key for tests."""

    def __init__(self, key: bytes | None = None) -> None:
        self._stream = cipher(os.urandom(32) if key is None else key)
        self._zeros = b""

    def fill(self, buffer: bytearray) -> None:
        """Overwrite a buffer with random bytes."""
        if len(self._zeros) != len(buffer):
            self._zeros = bytes(len(buffer))
        self._stream.update_into(self._zeros, buffer)

    def number(self, size: int) -> int:
        """A uniform number of `size` bytes."""
        buffer = bytearray(size)
        self.fill(buffer)
        return int.from_bytes(buffer, "little")


@dataclasses.dataclass(frozen=True)
class _Table:
    """Columns of Walker's alias method; column i stands for the value i - 2048."""

    thresholds: torch.Tensor
    """(4096) int32: the first 20 bits, less 2^19."""
    alias: torch.Tensor
    """(4096) int32: the other value's column."""
    remainders: tuple[int, ...]
    """The further 128 bits of the thresholds."""


def add_noise(vector: torch.Tensor, sigma: float, source: RandomBytes | None = None) -> None:
    """Add independent samples to each element, in place; scratch memory is a few tiles.

    Args:
        vector: (N) int16, int32 or int64; sums wrap around.
        sigma: parameter of the distribution, `SIGMA_MIN` to `SIGMA_MAX`; from 1 on the standard
            deviation differs from it by less than 1e-6.
        source: of random bytes; None for a new key of the operating system.
    """
    if not SIGMA_MIN <= sigma <= SIGMA_MAX:
        raise ValueError(f"sigma={sigma} is not in {SIGMA_MIN} .. {SIGMA_MAX:.0f}")
    source = source or RandomBytes()
    terms = [(factor, _table(part)) for factor, part in _decompose(sigma)]
    tile = min(TILE, len(vector))
    stream = bytearray(4 * tile)
    words = torch.frombuffer(stream, dtype=torch.int32) if tile else torch.empty(0)
    for start in range(0, len(vector), TILE):
        part = vector[start : start + TILE]
        for factor, table in terms:
            source.fill(stream)
            columns = _columns(table, words[: len(part)], source)
            part.add_(columns.sub_(_CENTRE).mul_(factor))
    stream[:] = bytes(len(stream))


def _columns(table: _Table, words: torch.Tensor, source: RandomBytes) -> torch.Tensor:
    """(M) int32 columns that are drawn by M random words."""
    selected = words & (_COLUMNS - 1)
    drawn = words >> _SELECT_BITS
    thresholds = table.thresholds.index_select(0, selected)
    alias = table.alias.index_select(0, selected)
    columns = torch.where(drawn < thresholds, selected, alias)
    equal = drawn == thresholds
    if bool(equal.any()):
        for i in equal.nonzero().flatten().tolist():
            column = int(selected[i])
            if source.number(_FURTHER_BYTES) < table.remainders[column]:
                columns[i] = column
    return columns


def _decompose(sigma: float) -> list[tuple[int, float]]:
    """Factors, and deviations for tables, of the samples whose weighted sum has this deviation.

    >>> _decompose(100.0), _decompose(5.0 * 170)
    ([(1, 100.0)], [(1, 10.0), (5, 169.9882...)])
    """
    terms: list[tuple[int, float]] = []
    factor = 1
    while sigma > _LARGEST_TABLE:
        k = min(math.ceil(sigma / _LARGEST_TABLE), _LARGEST_FACTOR)
        terms.append((factor, 2.0 * k))
        factor *= k
        sigma = math.sqrt((sigma / k) ** 2 - 4.0)
    return [*terms, (factor, sigma)]


@functools.lru_cache(maxsize=32)
def _table(sigma: float) -> _Table:
    """Walker's table, by Vose's construction on integers."""
    masses = _masses(sigma)
    thresholds = [_WHOLE_COLUMN] * _COLUMNS
    alias = list(range(_COLUMNS))
    small = [i for i, mass in enumerate(masses) if mass < _WHOLE_COLUMN]
    large = [i for i, mass in enumerate(masses) if mass >= _WHOLE_COLUMN]
    while small and large:
        i = small.pop()
        j = large.pop()
        thresholds[i], alias[i] = masses[i], j
        masses[j] -= _WHOLE_COLUMN - masses[i]
        (small if masses[j] < _WHOLE_COLUMN else large).append(j)
    assert not small
    further = 8 * _FURTHER_BYTES
    # A whole column is its own alias, so that its threshold does not matter.
    thresholds = [t % _WHOLE_COLUMN for t in thresholds]
    return _Table(
        torch.tensor([(t >> further) - (1 << (_FIRST_BITS - 1)) for t in thresholds]).int(),
        torch.tensor(alias).int(),
        tuple(t % (1 << further) for t in thresholds),
    )


def _masses(sigma: float) -> list[int]:
    """Probabilities of -2048 .. 2047 as integers whose sum is that of all columns.

    The next of exp(-x^2 / (2 sigma^2)) is its q^(2x + 1) with q = exp(-1 / (2 sigma^2)).
    """
    with localcontext() as context:
        context.prec = _DIGITS
        q = int((-1 / (2 * Decimal(sigma) ** 2)).exp() * (1 << _FIXED_BITS))
    weight = 1 << _FIXED_BITS
    ratio = q
    square = q * q >> _FIXED_BITS
    weights = [0] * _COLUMNS
    for x in range(_CENTRE):
        weights[_CENTRE + x] = weights[_CENTRE - x] = weight
        weight = weight * ratio >> _FIXED_BITS
        ratio = ratio * square >> _FIXED_BITS
    total = sum(weights)
    masses = [weight * _COLUMNS * _WHOLE_COLUMN // total for weight in weights]
    masses[_CENTRE] += _COLUMNS * _WHOLE_COLUMN - sum(masses)
    return masses
