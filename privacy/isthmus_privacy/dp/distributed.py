"""The distributed discrete Gaussian mechanism: parameters, and what they guarantee.

Every device of a secure sum adds a share of the noise to its own vector (Kairouz, Liu, Steinke
2021, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation"), so that nobody ever has a sum without noise. A device clips its update to the 2-norm
`clip`, rotates it, multiplies it by `scale`, rounds it at random to integers whose 2-norm is at
most the `sensitivity`, adds noise of the deviation `sigma` and sends the result modulo 2^bits; see
`noisy_vector`.

The shares of the `honest` devices alone have the deviation `multiplier` x `sensitivity`, so the
others of the sum, and devices that drop out, never reduce it below that.

    sensitivity^2 = min(c^2 + d / 4 + c + sqrt(d) / 2, (c + sqrt(d))^2),     c = clip x scale
    sigma = multiplier x sensitivity / sqrt(honest)

The first is their proposition 22 for beta = exp(-1/2), that is sqrt(2 log(1 / beta)) = 1, with d
the number of elements. The sum over any set of devices with at least `honest` honest ones is
`zcdp_rho`-concentrated differentially private, where a neighbouring set has zeros in place of one
device's update. Devices that send nothing but noise are in the sum too: whose update was unusable
is not to be seen.

>>> noise = DistributedNoise.fit(
...     clip=1.0, multiplier=1.0, honest=80, clients=100, size=1_000_000, bits=32)
>>> noise.scale, round(noise.sigma(1_000_000), 1)
(32000.0, 3578.2)
>>> round(noise.inflation(1_000_000), 5), round(noise.zcdp_rho(1_000_000, clients=100), 9)
(1.00014, 0.5)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Self

from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import NUMBER, REAL, Message
from isthmus_privacy.dp.discrete_gaussian import SIGMA_MAX
from isthmus_privacy.dp.rotation import block_size

WRAP = 2.0**-40
"""Largest probability that an element of a sum wraps around."""

SIGMA_MIN = 3.0
"""Least deviation of one device's noise: from it on, a sum of discrete Gaussians is one too."""

NORM_MAX = float(1 << 26)
"""Largest norm of the integers: the sum of their squares is exact in float64."""

_FINE = 32.0
"""`fit` makes the norm at most this multiple of sqrt(d): rounding then adds 0.02 % to it."""

_INFLATION = 1.05
"""What rounding may add to the noise for an element to take half of the bytes."""

_COARSEST = 2.0**-20
_STEP = 2.0**-0.125
_FIT_WRAP = 0.99 * WRAP
"""A device that computes a bound with other rounding must not refuse what the server has chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedNoise(Message):
    """Noise that the devices of one secure sum add; part of the configuration that they sign."""

    TAG = "distributed-noise"
    FIELDS = {"clip": REAL, "multiplier": REAL, "honest": NUMBER, "scale": REAL}

    clip: float
    """Bound on the 2-norm of one device's update."""
    multiplier: float
    """Deviation of the noise in the smallest sum, over the norm of one device's integers."""
    honest: int
    """Devices whose noise is counted on; `RoundConfig.honest_survivors` at most."""
    scale: float
    """Integers per unit of the update."""

    @classmethod
    def fit(
        cls, *, clip: float, multiplier: float, honest: int, clients: int, size: int, bits: int
    ) -> Self:
        """Choose the finest scale with which no sum wraps and beyond which nothing is gained.

        Args:
            clip: bound on the 2-norm of one device's update.
            multiplier: noise multiplier.
            honest: devices whose noise is counted on.
            clients: most devices in the sum.
            size: N, elements of the update.
            bits: of the ring.

        Raises:
            ValueError: an argument is not positive, or no scale fits the ring.
        """
        if min(clip, multiplier, honest, clients, size) <= 0:
            raise ValueError("clip, noise, devices and elements must be above 0")
        norm = max(_FINE * math.sqrt(size), 8 * math.sqrt(honest) / multiplier)
        while norm > _COARSEST:
            noise = cls(clip=clip, multiplier=multiplier, honest=honest, scale=norm / clip)
            if noise._malformed(size) is None and (
                noise.wrap_probability(size, clients=clients, bits=bits) <= _FIT_WRAP
            ):
                return noise
            norm *= _STEP
        raise ValueError(
            f"noise of {multiplier} times the clipping bound over {clients} devices does not fit "
            f"a ring of {bits} bits"
        )

    def sensitivity(self, size: int) -> float:
        """Largest 2-norm of one device's integers without noise."""
        norm = self.clip * self.scale
        root = math.sqrt(size)
        likely = norm**2 + root**2 / 4 + norm + root / 2
        return math.sqrt(min(likely, (norm + root) ** 2))

    def inflation(self, size: int) -> float:
        """The sensitivity over what it would be without rounding."""
        return self.sensitivity(size) / (self.clip * self.scale)

    def sigma(self, size: int) -> float:
        """Standard deviation of one device's noise, in integers."""
        return self.multiplier * self.sensitivity(size) / math.sqrt(self.honest)

    def noise_of_mean(self, size: int, clients: int) -> float:
        """Standard deviation of the noise of an element of the mean over `clients` devices."""
        return self.sigma(size) / (self.scale * math.sqrt(clients))

    def largest_sum(self, size: int, clients: int) -> float:
        """The 2-norm of a sum of integers that honest devices exceed with a chance below 2^-40.

        Their updates together have a norm of at most `clients` x `sensitivity`. One device that
        adds anything is seen as soon as it adds more than this and the noise allow.

        Args:
            size: N, elements of the update.
            clients: devices in the sum.
        """
        deviation = math.sqrt(clients) * self.sigma(size)
        return largest_norm(clients * self.sensitivity(size), deviation, size)

    def zcdp_rho(self, size: int, *, clients: int) -> float:
        """Rho of zero-concentrated differential privacy of one sum, for one device's update.

        Kairouz et al. 2021, theorem 1: rho = (D + tau sqrt(d))^2 / 2, with D the sensitivity over
        the deviation of the honest noise, and tau the distance of a sum of discrete Gaussians from
        one. What tau contributes is below 1e-30 for `SIGMA_MIN`. The distance of the samples from
        their distribution, 2^-100 for each, adds 2^-100 x d x `clients` to delta.

        Args:
            size: N, elements of the update.
            clients: most devices in the sum.
        """
        sigma = self.sigma(size)
        tau = 10 * sum(
            math.exp(-2 * (math.pi * sigma) ** 2 * k / (k + 1)) for k in range(1, clients)
        )
        ratio = self.sensitivity(size) / (sigma * math.sqrt(self.honest))
        return (ratio + tau * math.sqrt(size)) ** 2 / 2

    def wrap_probability(self, size: int, *, clients: int, bits: int) -> float:
        """Bound on the probability that one element of a sum wraps around.

        Over the signs of the rotation and the noise, an element is sub-Gaussian: n vectors of the
        norm c in a block of B elements contribute a variance of (n c)^2 / B, and the noise
        n sigma^2. Rounding moves it by at most n.

        Args:
            size: N, elements of the update.
            clients: n, most devices in the sum.
            bits: of the ring.
        """
        room = 2.0 ** (bits - 1) - clients
        if room <= 0:
            return 1.0
        signal = (clients * self.clip * self.scale) ** 2 / block_size(size)
        variance = signal + clients * self.sigma(size) ** 2
        return min(1.0, 2 * math.exp(-(room**2) / (2 * variance)))

    def check(self, size: int, *, clients: int, honest: int, bits: int, alone: bool) -> None:
        """Refuse parameters that do not protect the updates of a sum, or that lose it.

        Args:
            size: N, elements of the update.
            clients: most devices in the sum.
            honest: fewest devices in the sum that do not collude with the server.
            bits: of the ring.
            alone: whether the vector has the update and nothing else.

        Raises:
            PeerMisbehaved: with the reason.
        """
        if (invalid := self._malformed(size)) is not None:
            refusal.refuse("noise-malformed", f"{invalid} is not valid for the noise of a sum")
        if not alone:
            refusal.refuse(
                "noise-with-figures",
                "noise is for updates of weight 1: it does not cover whole numbers, weights or "
                "the figures of slots",
            )
        if self.honest > honest:
            refusal.refuse(
                "noise-counts-on-too-many",
                f"the noise of honest={self.honest} devices is counted on, and the smallest sum "
                f"has {honest} that do not collude with the server",
            )
        wraps = self.wrap_probability(size, clients=clients, bits=bits)
        if wraps > WRAP:
            refusal.refuse(
                "noise-may-wrap",
                f"an element of the sum wraps around {bits} bits with a probability of up to "
                f"{wraps:.1g}; at most {WRAP:.1g} is accepted",
            )

    def _malformed(self, size: int) -> str | None:
        """The first invalid value for an update of `size` elements as `name=value`, or None."""
        values = {"clip": self.clip, "multiplier": self.multiplier, "scale": self.scale}
        for name, value in values.items():
            if not (math.isfinite(value) and 2.0**-64 <= value <= 2.0**64):
                return f"{name}={value}"
        if size < 1:
            return f"size={size}"
        if self.honest < 1:
            return f"honest={self.honest}"
        if (norm := self.clip * self.scale) > NORM_MAX:
            return f"clip x scale={norm:.3g}"
        if not SIGMA_MIN <= (sigma := self.sigma(size)) <= SIGMA_MAX:
            return f"sigma={sigma:.3g}"
        return None


def largest_norm(signal: float, deviation: float, size: int) -> float:
    """What the 2-norm of a vector with noise exceeds with a chance below 2^-40.

    For a vector a of a norm of at most A, and noise z with in each element at most the tails of a
    Gaussian with the variance V, with x = 41 ln 2,

        |a + z|^2 <= A^2 + 2 A sqrt(2 x V) + V (N + 2 sqrt(N x) + 2 x)

    Hsu, Kakade, Zhang 2012 ("A tail inequality for quadratic forms of subgaussian random vectors"),
    theorem 1, for the last term; each of the two fails with at most exp(-x).

    Args:
        signal: A.
        deviation: the root of V.
        size: N.
    """
    x = -math.log(WRAP / 2)
    noise = deviation**2 * (size + 2 * math.sqrt(size * x) + 2 * x)
    return math.sqrt(signal**2 + 2 * signal * math.sqrt(2 * x) * deviation + noise)


def fit_ring(
    *, clip: float, multiplier: float, honest: int, clients: int, size: int
) -> tuple[DistributedNoise, int]:
    """Parameters, and the bits of the ring: 16 if rounding then adds at most 5 %, else 32.

    See `DistributedNoise.fit`.

    Raises:
        ValueError: an argument is not positive, or no ring is large enough.
    """
    with contextlib.suppress(ValueError):
        noise = DistributedNoise.fit(
            clip=clip, multiplier=multiplier, honest=honest, clients=clients, size=size, bits=16
        )
        if noise.inflation(size) <= _INFLATION:
            return noise, 16
    noise = DistributedNoise.fit(
        clip=clip, multiplier=multiplier, honest=honest, clients=clients, size=size, bits=32
    )
    return noise, 32
