"""A device's update as integers with noise, and the mean of a sum of such vectors.

See `distributed` for the mechanism. All randomness is drawn from the operating system for each
call: a second attempt with the same update has other noise.

>>> from isthmus_privacy.dp.distributed import DistributedNoise
>>> noise = DistributedNoise.fit(clip=1.0, multiplier=0.01, honest=2, clients=2, size=4, bits=32)
>>> total = torch.zeros(4, dtype=torch.int32)
>>> for update in ([0.5, 0.0, 0.0, -0.5], [30.0, 0.0, 40.0, 0.0]):
...     vector = torch.zeros(4, dtype=torch.int32)
...     encode(noise, torch.tensor(update), seed=bytes(32), out=vector)
...     total += vector
>>> mean = decode(noise, total, seed=bytes(32), clients=2)
>>> float((mean - torch.tensor([0.55, 0.0, 0.4, -0.25])).abs().max()) < 0.1
True
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from isthmus_privacy.crypto.masking import TILE
from isthmus_privacy.dp.clipping import norm_of
from isthmus_privacy.dp.discrete_gaussian import RandomBytes, add_noise
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.dp.rotation import rotate, unrotate

_TRIES = 100
"""Each rounding is within the bound with a probability of at least 1 - exp(-1/2), so all of these
miss it with one of at most 2^-71."""

_DITHER_BITS = 32


def encode(
    noise: DistributedNoise,
    update: torch.Tensor,
    *,
    seed: bytes,
    out: torch.Tensor,
    source: RandomBytes | None = None,
) -> None:
    """Clip, rotate, scale and round an update, and add this device's noise.

    Args:
        noise: the parameters, checked.
        update: (N) finite, any real floating type; not modified.
        seed: 32 bytes of the rotation's signs.
        out: (N) ring elements, which are overwritten.
        source: of random bytes; None for a new key of the operating system.
    """
    source = source or RandomBytes()
    size = len(update)
    rotated = torch.empty(size, dtype=torch.float32)
    # Clipped before the rotation so that it cannot overflow, and exactly after it.
    clipping = _clipping(update, noise.clip)
    for part, target in zip(_tiles(update), _tiles(rotated), strict=True):
        torch.mul(part.double(), clipping, out=target)
    rotate(rotated, seed)
    factor = noise.scale * _clipping(rotated, noise.clip)
    for _ in range(_TRIES):
        if _round(rotated, factor, out, source) <= noise.sensitivity(size) ** 2:
            break
    else:
        # Towards zero, which never increases the norm.
        for part, target in zip(_tiles(rotated), _tiles(out), strict=True):
            target.copy_(part.double().mul_(factor).to(torch.int64))
    add_noise(out, noise.sigma(size), source)


def decode(
    noise: DistributedNoise, total: torch.Tensor, *, seed: bytes, clients: int
) -> torch.Tensor:
    """The mean over all devices of a sum.

    Args:
        noise: the parameters.
        total: (N) ring elements, which are read as numbers around zero.
        seed: 32 bytes of the rotation's signs.
        clients: devices in the sum.

    Returns:
        (N) float32.
    """
    mean = torch.empty(len(total), dtype=torch.float32)
    for part, out in zip(_tiles(total), _tiles(mean), strict=True):
        out.copy_(part.double().div_(noise.scale * clients))
    unrotate(mean, seed)
    return mean


def norm_of_sum(total: torch.Tensor) -> float:
    """The 2-norm of a sum (N) of ring elements, read as numbers around zero."""
    return math.sqrt(math.fsum(float(part.double().square().sum()) for part in _tiles(total)))


def _clipping(vector: torch.Tensor, clip: float) -> float:
    """Factor that reduces the 2-norm of a vector to `clip`, at most 1."""
    norm = norm_of(vector)
    return clip / norm if norm > clip else 1.0


def _round(values: torch.Tensor, factor: float, out: torch.Tensor, source: RandomBytes) -> float:
    """Write values x factor to `out`, rounded at random; returns the square of the 2-norm.

    floor(y + u) with a uniform u has the mean y. The square is exact below 2^53.
    """
    stream = bytearray(4 * min(TILE, len(values)))
    words = torch.frombuffer(stream, dtype=torch.int32)
    scratch = torch.empty(2, len(words), dtype=torch.float64)
    square = 0.0
    for part, target in zip(_tiles(values), _tiles(out), strict=True):
        source.fill(stream)
        y, u = scratch[:, : len(part)]
        y.copy_(part).mul_(factor).add_(0.5)
        # The words are read as signed, hence the half.
        y.add_(u.copy_(words[: len(part)]), alpha=2.0**-_DITHER_BITS).floor_()
        square += float(torch.mul(y, y, out=u).sum())
        target.copy_(y.to(torch.int64) if target.dtype == torch.int16 else y)
    return square


def _tiles(vector: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, len(vector), TILE):
        yield vector[start : start + TILE]
