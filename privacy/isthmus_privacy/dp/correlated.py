"""Noise that is correlated over rounds, so that less of it is left in the model.

A model is the sum of its updates. Independent noise in each update adds up; noise of which the next
rounds take a part back does not. In round t the noise is

    sum over j < bands of d_j z(t - j),    d = 1, -1/2, -1/8, -1/16, ...

with independent Gaussian z: the first coefficients of (1 - x)^(1/2), the *banded inverse square
root* of Kalinin, McKenna, Upadhyay and Lampert (2025), https://arxiv.org/abs/2505.12128. The z of
earlier rounds are drawn again from the same keys, so nothing is kept between rounds.

All rounds together are one Gaussian mechanism on (C U), with U the updates by round and C the
inverse of the banded matrix: its sensitivity for a device that takes part in at most k rounds, any
two of them at least b rounds apart, decides the noise.

>>> plan = CorrelatedNoise.best(rows=1000, separation=100, participations=10)
>>> plan.bands, round(plan.sensitivity, 2), round(plan.gain, 1)
(64, 5.78, 5.7)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from isthmus.job.privacy import MAX_CORRELATED_ROUNDS

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class CorrelatedNoise:
    """The noise of all rounds of a run.

    Guarantees:
      * the sensitivity is exact for devices that take part in at most `participations` rounds,
        any two at least `separation` apart, and whose updates have a 2-norm of at most 1;
      * with one band the noise is independent in each round.
    """

    rows: int
    """Rounds."""
    separation: int
    """Fewest rounds from one participation of a device to its next; 1: it may be in each."""
    participations: int
    """Most rounds of one device."""
    bands: int
    """Rounds whose draws are in the noise of one."""

    @classmethod
    def best(cls, *, rows: int, separation: int, participations: int | None = None) -> Self:
        """The number of bands, a power of two, that leaves the least noise in the models.

        Args:
            rows: rounds, 1 or more.
            separation: see the class.
            participations: see the class; None: as many as the separation allows.

        Raises:
            ValueError: a number is not in its range.
        """
        if not 1 <= rows <= MAX_CORRELATED_ROUNDS or separation < 1:
            raise ValueError(
                f"{rows} rounds with a separation of {separation} are not possible: use 1 to "
                f"{MAX_CORRELATED_ROUNDS} rounds and a separation of at least 1"
            )
        most = math.ceil(rows / separation)
        taken = most if participations is None else min(participations, most)
        if taken < 1:
            raise ValueError(f"a device with {participations} participations takes part in nothing")
        bands = [1 << power for power in range(rows.bit_length()) if 1 << power <= rows]
        return max((cls(rows, separation, taken, each) for each in bands), key=lambda m: m.gain)

    @functools.cached_property
    def coefficients(self) -> Sequence[float]:
        """d_0 .. d_(bands - 1)."""
        return tuple(
            itertools.accumulate(
                range(1, self.bands), lambda d, k: d * (2 * k - 3) / (2 * k), initial=1.0
            )
        )

    @functools.cached_property
    def sensitivity(self) -> float:
        """The largest 2-norm of one device's part of C U, if its updates have norm 1.

        The coefficients of C are positive and decrease, so a device that takes part in rounds 0,
        b, 2b, ... changes most (Kalinin and Lampert 2024, https://arxiv.org/abs/2405.13763).
        """
        import numpy as np

        inverse = np.zeros(self.rows)
        inverse[0] = 1.0
        tail = -np.array(self.coefficients[:0:-1])
        for row in range(1, self.rows):
            known = inverse[max(0, row - len(tail)) : row]
            inverse[row] = tail[len(tail) - len(known) :] @ known if len(known) else 0.0
        assert (np.diff(inverse) <= 1e-12).all()
        assert inverse[-1] >= 0
        changed = np.zeros(self.rows)
        for start in itertools.islice(range(0, self.rows, self.separation), self.participations):
            changed[start:] += inverse[: self.rows - start]
        return float(np.linalg.norm(changed))

    @property
    def gain(self) -> float:
        """How many times more noise independent draws of equal privacy leave in the models.

        The root mean square over the models of all rounds.
        """
        prefix = 0.0
        squares = 0.0
        total = 0.0
        for row in range(self.rows):
            prefix += self.coefficients[row] if row < self.bands else 0.0
            squares += prefix * prefix
            total += squares
        left = math.sqrt(total / self.rows) * self.sensitivity
        independent = math.sqrt((self.rows + 1) / 2 * self.participations)
        return independent / left

    def noise(self, row: int, draw: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The noise of a round.

        Args:
            row: 0 .. rows - 1.
            draw: gives z of a row, (N) with independent entries, always the same for a row.

        Returns:
            (N); in units of the standard deviation of `draw`.
        """
        assert 0 <= row < self.rows
        total = draw(row)
        for back, coefficient in enumerate(self.coefficients[1 : row + 1], start=1):
            total.add_(draw(row - back), alpha=coefficient)
        return total
