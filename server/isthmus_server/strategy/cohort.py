"""Whom to invite.

>>> select(["a", "b", "c", "d"], wanted=3, seed=7, round_=1)
['a', 'c', 'd']
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from isthmus.job.federated import Utility
from isthmus_server.strategy import utility
from isthmus_server.strategy.attendance import Record


def select(
    able: Iterable[str],
    *,
    wanted: int,
    seed: int,
    round_: int,
    records: Mapping[str, Record] | None = None,
    guided: Utility | None = None,
) -> list[str]:
    """So many of those who may be asked, or all: uniform, or guided by what is known of them.

    The same names, records, seed and round give the same sample in every attempt and after every
    resume.
    """
    names = sorted(able)
    wanted = min(len(names), wanted)
    draw = random.Random(f"isthmus/cohort/{seed}/{round_}")  # noqa: S311 - chosen, not secret
    if guided is None:
        return sorted(draw.sample(names, wanted))
    return sorted(
        utility.choose(names, records or {}, guided, wanted=wanted, round_=round_, draw=draw)
    )
