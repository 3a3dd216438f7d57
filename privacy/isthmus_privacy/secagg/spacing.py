"""Hide on which numbers the elements of an update lie, before they are weighted and summed.

An update is a difference of float32 numbers, so each element is a whole multiple k of the spacing
of such numbers at the model's element. A sum of weight x update that is precise enough is a whole
multiple of it too. If the weights of all clients but one have a common factor g, as those of equal
shares of a data set, its remainder modulo g is that of the last one's weight x k: a server that
follows the protocol would know k where it is below g / 2, and else its last digits. Factors of the
updates of single clients, by their steps or by a bound on their norm, are such weights too.

So a client adds to each element a secret number that is uniform over one spacing, in float64. Any
one client that does it makes the remainder uniform. The error is that of one more step of float32
arithmetic. Elements that training has not changed stay 0, so that those that no client changes do.

Where gradients are computed in half precision, updates lie on fewer numbers than float32 has: those
of parameters that were 0 have 8 or 11 digits. What hides them is as large as the rounding of such a
gradient.

Shape legend: N = elements of an update.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from isthmus_privacy.crypto.masking import TILE

_DIGITS = 24
"""Binary digits of a float32 number."""
DIGITS_OF = {"fp32": _DIGITS, "bf16": 8, "fp16": 11}
"""Binary digits of a gradient, by the precision that a job has it computed in."""
LEAST = -126
"""The exponent of an element that is 0, and the least of one."""


@dataclasses.dataclass(frozen=True)
class Spacing:
    """The spacing of float32 numbers at the elements of a model."""

    exponents: torch.Tensor
    """(N) int8: those of the model's elements."""
    digits: int = _DIGITS
    """Binary digits of the gradients that the differences were computed from."""
    factors: Sequence[tuple[int, float]] = ()
    """What the differences were multiplied by, in parts of neighbours: the number of elements up to
    the last one of each, and the factor. 1 after the last part."""

    def around(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """The spacing at each of a tile of an update's values, float64; 0 at 0.

        Args:
            values: float64, the elements from `start` on.
            start: of the tile.
        """
        own = self.exponents[start : start + len(values)].double()
        low = 0
        for end, factor in self.factors:
            high = max(low, end - start)
            own[low:high] += math.log2(factor)
            low = high
        # A difference that is no float32 number was rounded to one, or is one of fewer digits.
        rounded = torch.frexp(values).exponent + (_DIGITS - self.digits)
        exponents = torch.maximum(own, rounded)
        return torch.exp2(exponents.sub_(_DIGITS)).mul_(values != 0)


def exponents_of(model: torch.Tensor) -> torch.Tensor:
    """The exponents of a model's elements (N), int8; a byte for each."""
    exponents = torch.empty(len(model), dtype=torch.int8)
    for start in range(0, len(model), TILE):
        part = model[start : start + TILE]
        own = torch.frexp(part).exponent
        own[part == 0] = LEAST
        exponents[start : start + TILE] = own.clamp_(LEAST, -LEAST)
    return exponents
