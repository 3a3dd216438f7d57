"""A clipping bound that follows a quantile of the updates' norms.

Devices say whether their update is within the bound. The server adds noise to how many are, and
moves the bound (Andrew, Thakkar, McMahan and Ramaswamy 2021, "Differentially Private Learning with
Adaptive Clipping", https://arxiv.org/abs/1905.03871, algorithm 1):

    bound x exp(-0.2 (share within - quantile))

A device adds 1 to that count if its update is within, else 0. Zeros in place of an update that is
not within change the count by 1, where they change the sum by at most the bound (the authors add or
remove a device, which changes their count by 1/2). With the noise multipliers z_u for the updates
over the bound, and z_c for the count, both together cost as much as one sum with
1 / z^2 = 1 / z_u^2 + 1 / z_c^2; `COUNT_SHARE` is the part of the count.

>>> bound = AdaptiveBound(quantile=0.5, multiplier=1.0, bound=1.0, first=1.0)
>>> round(bound.update_multiplier, 4), round(bound.count_deviation, 3)
(1.0102, 7.071)
>>> bound.moved(share=0.9).bound < 1 < bound.moved(share=0.1).bound
True
"""

from __future__ import annotations

import dataclasses
import math

COUNT_SHARE = 0.02
"""The updates get 1 % more noise for it."""

RATE = 0.2
"""Learning rate of the logarithm of the bound, the one that the authors use."""

_RANGE = 2.0**20
"""The bound stays within this factor of the first one."""


@dataclasses.dataclass(frozen=True)
class AdaptiveBound:
    """The bound of one round, and the noise that it needs."""

    quantile: float
    """Quantile of the norms that the bound moves towards; 0.5 is the median."""
    multiplier: float
    """z: noise multiplier of a round as a whole."""
    bound: float
    first: float
    """The bound of the first round."""

    @property
    def update_multiplier(self) -> float:
        """Deviation of the noise in the sum of the updates, over the bound."""
        return self.multiplier / math.sqrt(1 - COUNT_SHARE)

    @property
    def count_deviation(self) -> float:
        """Standard deviation of the noise in the number of devices within the bound."""
        return self.multiplier / math.sqrt(COUNT_SHARE)

    def moved(self, share: float) -> AdaptiveBound:
        """The bound of the next round.

        Args:
            share: of the devices that were within the bound, with noise.
        """
        # Noise can make the share anything, and one round must not move the bound far.
        share = min(max(share, 0.0), 1.0)
        bound = self.bound * math.exp(-RATE * (share - self.quantile))
        bound = min(max(bound, self.first / _RANGE), self.first * _RANGE)
        return dataclasses.replace(self, bound=bound)
