"""Whom to invite.

>>> select(["a", "b", "c", "d"], cohort=2, over_selection=1.5, seed=7, round_=1)
['a', 'c', 'd']
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable


def select(
    ready: Iterable[str], *, cohort: int, over_selection: float, seed: int, round_: int
) -> list[str]:
    """A uniform sample of `ceil(cohort * over_selection)` names, or all if there are fewer.

    The same names, seed and round give the same sample in every attempt and after every resume.
    """
    names = sorted(ready)
    wanted = min(len(names), math.ceil(cohort * over_selection))
    draw = random.Random(f"isthmus/cohort/{seed}/{round_}")  # noqa: S311 - chosen, not secret
    return sorted(draw.sample(names, wanted))
