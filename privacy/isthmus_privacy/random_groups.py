"""Random groups of a round's devices, each of which is a secure sum of its own.

With robust sums a round is summed in several groups, and a rule compares their means. A server that
composed the groups could put one victim among devices that collude with it, and devices that could
choose would put a liar into every group, or all of them around one victim. So nobody chooses: the
lottery number in a device's enrolment and the draw of the round say in which group a device is, as
they say whether it is in the round at all (`isthmus_privacy.secagg.lottery`). Every device checks
every member of its group's roster.

The second hash is independent of the ticket. So one colluder is in a given group of a given draw
with probability 1 / count times that of the ticket, and a share of all devices that is `count`
times wider lets the server choose among as many devices for the sum of a group as for another sum
of the same size. A server has more to choose from in each draw: the number of groups, which depends
on how many devices are available, and one of them. The bound of `lottery.colluder_bound` grows by
`choices`, at most 525.

>>> group = RandomGroup.of(bytes(32), draw=7, count=4)
>>> RandomGroup.parse(group.name) == group
True
>>> group.has(bytes(32), draw=7), RandomGroup(group.index % 4 + 1, 4).has(bytes(32), draw=7)
(True, False)
"""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from isthmus_privacy.crypto.canonical import NUMBER, tagged_hash

MOST_GROUPS = 32
"""Most random groups of one round."""
FEWEST_GROUPS = 3
"""Fewest: a rule cannot tell one from the others with less."""

_NAME = re.compile(r"random-([1-9][0-9]?)-of-([1-9][0-9]?)")


@dataclasses.dataclass(frozen=True)
class RandomGroup:
    """One of the groups into which a draw divides devices."""

    index: int
    """From 1 to `count`."""
    count: int
    """Groups of the round, from `FEWEST_GROUPS`."""

    @property
    def name(self) -> str:
        """The name that devices sign.

        >>> RandomGroup(3, 12).name
        'random-3-of-12'
        """
        return f"random-{self.index}-of-{self.count}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The group of a name; None if it is not that of a random group.

        >>> RandomGroup.parse("random-13-of-12") is RandomGroup.parse("north") is None
        True
        >>> RandomGroup.parse("random-1-of-2") is None
        True
        """
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        index = int(found[1])
        count = int(found[2])
        if not (FEWEST_GROUPS <= count <= MOST_GROUPS and index <= count):
            return None
        return cls(index, count)

    @classmethod
    def of(cls, lottery: bytes, draw: int, count: int) -> Self:
        """The group of a lottery number in a draw that is divided into so many."""
        digest = tagged_hash("random-group", lottery, NUMBER.write(draw))
        # The remainder of 64 random bits is uniform but for 2^-59.
        return cls(int.from_bytes(digest[:8], "little") % count + 1, count)

    def has(self, lottery: bytes, draw: int) -> bool:
        """Whether a lottery number is in this group in a draw."""
        return self == self.of(lottery, draw, self.count)


def choices(most: int) -> int:
    """Groups that a server can choose from in one draw, of a job with at most so many groups.

    >>> choices(12), choices(MOST_GROUPS)
    (75, 525)
    """
    return sum(range(FEWEST_GROUPS, most + 1))
