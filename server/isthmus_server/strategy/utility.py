"""Guided selection: whose update promises the most (Oort, Lai et al. 2021, algorithm 1).

The paper's statistical utility, examples x root mean square loss, is examples x mean loss here, for
that is what devices report. Its pacer is left out: what counts as slow is a fixed share of devices
(see `isthmus.job.federated.Utility`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from isthmus.job.federated import Utility
from isthmus_server.strategy.attendance import Record

_CLIP = 0.95
"""The quantile that statistical utilities are clipped to, as in the paper: one device with a broken
loss must not be asked for ever."""
_CUTOFF = 0.95
"""Who has less than this of the last device's utility that would be taken is not drawn from."""
_QUICK = 0.8
"""The quantile of the devices' times that is preferred, where the job names none."""


def utilities(
    records: Mapping[str, Record], names: Sequence[str], settings: Utility, round_: int
) -> dict[str, float]:
    """The utility of each device that was asked before; above 0."""
    worth = {
        name: records[name].examples * loss
        for name in names
        if (loss := records[name].loss) is not None
    }
    most = quantile(list(worth.values()), _CLIP) if worth else 0.0
    pace = settings.preferred_seconds or quantile([records[n].seconds for n in names], _QUICK)
    found = {}
    for name in names:
        record = records[name]
        statistical = min(worth.get(name, 0.0) / most, 1.0) if most > 0 else 1.0
        last, _ = record.asked[-1]
        bonus = math.sqrt(settings.uncertainty * math.log(max(round_, 1)) / last)
        slow = record.seconds > pace > 0
        speed = (pace / record.seconds) ** settings.slowness if slow else 1.0
        found[name] = max((statistical + bonus) * speed, 1e-9)
    return found


def choose(
    names: Sequence[str],
    records: Mapping[str, Record],
    settings: Utility,
    *,
    wanted: int,
    round_: int,
    draw: random.Random,
) -> list[str]:
    """`wanted` of sorted names: some that were never asked, and of the others the most useful."""
    known = [name for name in names if name in records]
    fresh = [name for name in names if name not in records]
    share = settings.exploration * settings.exploration_decay ** (round_ - 1)
    share = max(share, settings.min_exploration)
    explored = min(len(fresh), max(math.ceil(share * wanted), wanted - len(known)))
    exploited = wanted - explored
    chosen = draw.sample(fresh, explored)
    if exploited:
        found = utilities(records, known, settings, round_)
        enough = sorted(found.values(), reverse=True)[exploited - 1] * _CUTOFF
        able = [name for name in known if found[name] >= enough]
        # Without replacement, by utility: the largest u ** (1 / w) (Efraimidis & Spirakis 2006).
        keys = {name: math.log(1.0 - draw.random()) / found[name] for name in able}
        chosen += sorted(able, key=lambda name: keys[name], reverse=True)[:exploited]
    return chosen


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so large a share is not above; 0 of none.

    >>> quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.8)
    4.0
    """
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0
