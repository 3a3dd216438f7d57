"""Shamir's secret sharing of 32-byte secrets over GF(2^31 - 1) (Shamir 1979).

A secret is nine limbs of 30 bits; each limb is the constant term of its own random polynomial.
The field is small enough that a product fits an int64, so a share takes a few tensor operations
and many secrets are reconstructed in one batch.

Shape legend: D = secrets in a batch, T = threshold, H = holders, L = 9 limbs.

>>> shares = split([bytes(range(32))], points=[1, 2, 5], threshold=2)
>>> combine([[1, 5]], [[shares[0], shares[2]]])[0] == bytes(range(32))
True
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import torch

P = 2**31 - 1
"""Order of the field, a Mersenne prime."""

LIMBS = 9
LIMB_BITS = 30
SECRET_BYTES = 32
SHARE_BYTES = 4 * LIMBS
_BATCH_ELEMENTS = 30_000
"""Elements of the largest intermediate tensor (D x T x T): it fits the cache, and is below 32768,
from which PyTorch parallelises each of many tiny operations itself."""


def split(
    secrets: Sequence[bytes | bytearray], points: Sequence[int], threshold: int
) -> list[bytes]:
    """Compute one share (36 bytes) of each secret for each point.

    Any `threshold` of its shares give a secret.

    Args:
        secrets: of 32 bytes; each has polynomials of its own.
        points: distinct evaluation points, 1 .. P - 1.
        threshold: 1 .. len(points); fewer shares carry no information about a secret.

    Returns:
        For each point, the shares of all secrets, one after the other.
    """
    width = len(secrets) * LIMBS
    coefficients = torch.empty(threshold, width, dtype=torch.int64)
    coefficients[0] = torch.cat([_limbs(secret) for secret in secrets])
    coefficients[1:] = _uniform((threshold - 1) * width).view(threshold - 1, width)
    values = _matmul(_powers(torch.tensor(points, dtype=torch.int64), threshold), coefficients)
    coefficients.zero_()
    return [_share_bytes(row) for row in values.tolist()]


def combine(
    points: Sequence[Sequence[int]], shares: Sequence[Sequence[bytes | bytearray]]
) -> list[bytes]:
    """Reconstruct secrets in one batch, each from the shares of its own holders.

    Wrong shares give a wrong secret, so the caller checks each against a commitment.

    Args:
        points: (D, T), distinct within a row.
        shares: (D, T), 36 bytes each.
    """
    # Many secrets have the same set of holders: weights are computed once per set.
    rows = {row: i for i, row in enumerate(dict.fromkeys(tuple(row) for row in points))}
    width = max((len(row) for row in rows), default=0)
    step = max(1, _BATCH_ELEMENTS // max(1, width * width))
    distinct = torch.tensor(list(rows), dtype=torch.int64).view(len(rows), width)
    weights = torch.empty_like(distinct)
    for start in range(0, len(rows), step):
        weights[start : start + step] = _lagrange_at_zero(distinct[start : start + step])
    secrets: list[bytes] = []
    for row, row_shares in zip(points, shares, strict=True):
        y = torch.frombuffer(bytearray().join(row_shares), dtype=torch.int32).view(width, LIMBS)
        y = (y.to(torch.int64) & 0xFFFFFFFF) % P
        limbs = _reduced(weights[rows[tuple(row)]].unsqueeze(-1) * y).sum(0) % P
        secrets.append(_secret(limbs.tolist()))
    return secrets


def _limbs(secret: bytes | bytearray) -> torch.Tensor:
    """(L) 30-bit limbs of a secret, lowest first."""
    number = int.from_bytes(secret, "little")
    mask = (1 << LIMB_BITS) - 1
    return torch.tensor([number >> (LIMB_BITS * i) & mask for i in range(LIMBS)])


def _secret(limbs: list[int]) -> bytes:
    """Inverse of `_limbs`; limbs out of range give some other 32 bytes."""
    number = sum((limb & ((1 << LIMB_BITS) - 1)) << (LIMB_BITS * i) for i, limb in enumerate(limbs))
    return (number & ((1 << 256) - 1)).to_bytes(SECRET_BYTES, "little")


def _share_bytes(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def _uniform(count: int) -> torch.Tensor:
    """(count) uniform field elements from the operating system, by rejection."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    drawn = torch.frombuffer(bytearray(os.urandom(4 * count)), dtype=torch.int32)
    values = drawn.to(torch.int64) & P
    while bool((values == P).any()):
        values = torch.where(values == P, _uniform(count), values)
    return values


def _powers(x: torch.Tensor, count: int) -> torch.Tensor:
    """(H, count) x^0 .. x^(count - 1) mod P, doubling the columns at each step."""
    powers = torch.ones(len(x), 1, dtype=torch.int64)
    step = x % P
    while powers.shape[1] < count:
        powers = torch.cat([powers, _reduced(powers * step.unsqueeze(1))], dim=1)
        step = _reduced(step * step)
    return powers[:, :count]


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product mod P. Halves of 16 bits keep each sum of up to 2^16 products within an int64."""
    high = _reduced(torch.matmul(a >> 16, b))
    low = _reduced(torch.matmul(a & 0xFFFF, b))
    return (high * (1 << 16) + low) % P


def _lagrange_at_zero(x: torch.Tensor) -> torch.Tensor:
    """(D, T) weights w with secret = sum of w * share: prod over m != j of x_m / (x_m - x_j)."""
    differences = (x.unsqueeze(1) - x.unsqueeze(2)) % P
    # x_j on the diagonal makes each row's product x_j * prod(x_m - x_j), so one numerator serves.
    differences.diagonal(dim1=1, dim2=2).copy_(x)
    return _reduced(_product(x % P).unsqueeze(1) * _inverse(_product(differences)))


def _reduced(values: torch.Tensor) -> torch.Tensor:
    """Non-negative values below 2^63, to at most P + 1: 2^31 = 1 mod P. Far cheaper than `%`."""
    values = (values & P) + (values >> 31)
    return (values & P) + (values >> 31)


def _product(values: torch.Tensor) -> torch.Tensor:
    """The product over the last dim, mod P."""
    while values.shape[-1] > 1:
        if values.shape[-1] % 2:
            values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)
        half = values.shape[-1] // 2
        values = _reduced(values[..., :half] * values[..., half:])
    return values.squeeze(-1)


def _inverse(values: torch.Tensor) -> torch.Tensor:
    """x^(P - 2) mod P (Fermat)."""
    result = torch.ones_like(values)
    power = values
    exponent = P - 2
    while exponent:
        if exponent & 1:
            result = _reduced(result * power)
        power = _reduced(power * power)
        exponent >>= 1
    return result
