"""Searches for the number at which a monotone condition changes.

>>> largest(lambda rounds: rounds**2 <= 50, most=1000), least(lambda n: n**2 > 50, most=1000)
(7, 8)
>>> largest(lambda rounds: False, most=1000), least(lambda n: False, most=1000)
(0, None)
"""

from __future__ import annotations

import math
from collections.abc import Callable

_FIRST_STEP = 16
"""The first step away from a start is this part of it: a start within a few per cent is then worth
most of the evaluations of a search from 1."""


def largest(fits: Callable[[int], bool], *, most: int, start: int = 1) -> int:
    """The largest number that fits, if all smaller ones fit too.

    Where the condition is not monotone, a number that fits before one that does not.

    Args:
        fits: the condition, of 1 .. `most`.
        most: largest number that is looked at.
        start: where to begin; the closer to the result, the fewer evaluations.

    Returns:
        1 .. `most`; 0 if not even 1 fits.
    """
    low = 0
    high = most + 1
    at = min(max(start, 1), most)
    step = max(1, at // _FIRST_STEP)
    while low < at < high:
        if fits(at):
            low = at
            at += step
        else:
            high = at
            at -= step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def least(fits: Callable[[int], bool], *, most: int, start: int = 1) -> int | None:
    """The least number that fits, if all larger ones fit too; None if `most` does not.

    See `largest` for the arguments.
    """
    found = largest(lambda number: not fits(number), most=most, start=start) + 1
    return found if found <= most else None


def least_between(
    low: float, high: float, precision: float, fits: Callable[[float], bool]
) -> float:
    """The least real number that fits, by a factor of at most `precision` above it.

    Args:
        low: above 0, and not looked at.
        high: fits.
        precision: above 1.
        fits: holds for all larger numbers too.
    """
    while high / low > precision:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
