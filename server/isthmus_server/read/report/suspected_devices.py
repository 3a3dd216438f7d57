"""Devices whose random groups were left out so often that it is no chance.

With robust sums the server sees which groups were left out, and who was in them; it opens nothing
else. A device that lies makes its group long in every round, and the others of that group are in
other ones in the next round: by and by only the liar is left. Each round of a device multiplies the
odds that it lies. In a round in which a part q of the devices was in groups that were left out,

    left out:  P(left out | it lies) / q        not left out:  (1 - P(left out | it lies)) / (1 - q)

The logarithms are added, and begin anew whenever the sum is below 0, so that many honest rounds do
not hide a liar of today (the cumulative sum test, Page 1954). An honest device exceeds the limit
within R rounds with probability at most R divided by the odds, if others lie no matter who is with
them. Devices that collude can lie only where one is, and have that one named in their place: it
cannot be told from a liar. So the sentence does not say that it is one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from isthmus.printable import in_a_line
from isthmus_server.storage.records import RoundRecord

_LEFT_OUT = 0.95
"""P(left out | it lies); below 1, as a liar's group may be among those that others are compared
with."""
_ODDS = 1000.0
"""Times the number of devices: the odds from which on a device is named."""


@dataclasses.dataclass(frozen=True, order=True)
class Suspicion:
    """A device whose groups were left out more often than by chance."""

    device: str
    rounds: int
    """Rounds in which it was in the sum of a random group."""
    left_out: int
    """Rounds among these in which its group was left out."""


def suspected_devices(rounds: Iterable[RoundRecord]) -> list[Suspicion]:
    """The devices of rounds with robust sums that most likely lie, by name."""
    evidence: dict[str, float] = {}
    counts: dict[str, Suspicion] = {}
    limit = 0.0
    for record in rounds:
        bad = {name for name, group in record.groups.items() if group.left_out}
        in_sums = {
            receipt.participant: receipt.group
            for receipt in record.receipts
            if receipt.group in record.groups and receipt.status == "accepted"
        }
        if not in_sums:
            continue
        share = sum(group in bad for group in in_sums.values()) / len(in_sums)
        for name, group in in_sums.items():
            is_bad = group in bad
            odds = _LEFT_OUT / share if is_bad else (1 - _LEFT_OUT) / (1 - share)
            evidence[name] = max(0.0, evidence.get(name, 0.0) + math.log(odds))
            before = counts.get(name, Suspicion(name, 0, 0))
            counts[name] = Suspicion(name, before.rounds + 1, before.left_out + is_bad)
        limit = math.log(_ODDS * len(counts))
    return sorted(counts[name] for name, found in evidence.items() if found > limit)


def suspicions(rounds: Sequence[RoundRecord]) -> list[str]:
    """What to tell an operator after these rounds; the latest is the last."""
    return [
        f"{in_a_line(found.device)}: the sum of its random group was left out in {found.left_out} "
        f"of {found.rounds} rounds, which is no chance: it sends updates that are too long, by a "
        "fault or on purpose, or others do where it is; ask its owner before you `isthmus server "
        "revoke` it"
        for found in suspected_devices(rounds)
    ]
