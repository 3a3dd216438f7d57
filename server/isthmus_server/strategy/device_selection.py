"""Select the devices of a round: uniformly at random, or guided by a utility per device.

Guided selection is Oort (Lai et al. 2021, algorithm 1). The paper's statistical utility, examples x
root mean square loss, is examples x mean loss here, because the mean loss is what devices report.
The paper's pacer is left out: the share of devices that counts as slow is fixed (see
`isthmus.job.federated.Utility`).

>>> select_devices(["a", "b", "c", "d"], count=3, seed=7, round_=1)
['a', 'c', 'd']
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

from isthmus.job.federated import Utility
from isthmus_server.strategy.attendance import ParticipationRecord

_CLIP_QUANTILE = 0.95
"""Statistical utilities are clipped to this quantile, as in the paper, so that one device with a
broken loss is not selected in every round."""
_CUTOFF = 0.95
"""Devices below this fraction of the utility of the last device that would be selected are not
candidates."""
_FAST_QUANTILE = 0.8
"""The quantile of device times that counts as fast enough, if the job sets no preferred time."""


def select_devices(
    eligible: Iterable[str],
    *,
    count: int,
    seed: int,
    round_: int,
    records: Mapping[str, ParticipationRecord] | None = None,
    guided: Utility | None = None,
) -> list[str]:
    """Select `count` of the eligible devices, or all if there are fewer.

    The same names, records, seed and round give the same sample in every attempt and after every
    resume.

    Args:
        eligible: names of the devices that may be selected.
        count: devices to select.
        seed: the job's seed.
        round_: the round, from 1.
        records: history of the devices that have taken part before; used by guided selection.
        guided: settings of guided selection; None for a uniform sample.
    """
    # The order of arrival must not decide.
    names = sorted(eligible)
    count = min(len(names), count)
    # Without the attempt: all attempts at a round select the same devices, if the same are there.
    rng = random.Random(f"isthmus/cohort/{seed}/{round_}")  # noqa: S311 - a sample, not a secret
    if guided is None:
        return sorted(rng.sample(names, count))
    return sorted(
        _select_by_utility(names, records or {}, guided, count=count, round_=round_, rng=rng)
    )


def utilities(
    records: Mapping[str, ParticipationRecord], names: Sequence[str], settings: Utility, round_: int
) -> dict[str, float]:
    """Compute the utility of each named device, all of which have records; above 0."""
    statistical_utilities = {
        name: records[name].examples * loss
        for name in names
        if (loss := records[name].loss) is not None
    }
    clip = (
        quantile(list(statistical_utilities.values()), _CLIP_QUANTILE)
        if statistical_utilities
        else 0.0
    )
    preferred_seconds = settings.preferred_seconds or quantile(
        [records[name].seconds for name in names], _FAST_QUANTILE
    )
    result = {}
    for name in names:
        record = records[name]
        statistical = min(statistical_utilities.get(name, 0.0) / clip, 1.0) if clip > 0 else 1.0
        last_round, _ = record.invited[-1]
        bonus = math.sqrt(settings.uncertainty * math.log(max(round_, 1)) / last_round)
        slow = record.seconds > preferred_seconds > 0
        speed = (preferred_seconds / record.seconds) ** settings.slowness if slow else 1.0
        # Above 0, as weighted sampling divides by it.
        result[name] = max((statistical + bonus) * speed, 1e-9)
    return result


def _select_by_utility(
    names: Sequence[str],
    records: Mapping[str, ParticipationRecord],
    settings: Utility,
    *,
    count: int,
    round_: int,
    rng: random.Random,
) -> list[str]:
    """Select `count` of sorted names: some devices without a record, and the most useful others."""
    known = [name for name in names if name in records]
    unknown = [name for name in names if name not in records]
    share = settings.exploration * settings.exploration_decay ** (round_ - 1)
    share = max(share, settings.min_exploration)
    # More unknown ones than their share if there are not enough known ones.
    explored = min(len(unknown), max(math.ceil(share * count), count - len(known)))
    exploited = count - explored
    selected = rng.sample(unknown, explored)
    if exploited:
        utility = utilities(records, known, settings, round_)
        # A little below the last one, so that the same devices do not train in every round.
        cutoff = sorted(utility.values(), reverse=True)[exploited - 1] * _CUTOFF
        candidates = [name for name in known if utility[name] >= cutoff]
        # Weighted sampling: the largest u ** (1 / w) (Efraimidis & Spirakis 2006).
        keys = {name: math.log(1.0 - rng.random()) / utility[name] for name in candidates}
        selected += sorted(candidates, key=lambda name: keys[name], reverse=True)[:exploited]
    return selected


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed; 0 of none.

    >>> quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.8)
    4.0
    """
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0
