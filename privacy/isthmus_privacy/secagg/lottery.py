"""A public lottery decides which devices a server may select, so that it cannot compose a cohort.

A server that chooses the roster freely can ask one victim and otherwise devices that collude with
it; the sum then reveals the victim's update to them. So each enrolment contains a *lottery number*,
32 bytes that the authority computes with a secret from the name, the identity key and the week. A
round has a *draw*, a time in Unix seconds. The hash of both is the device's *ticket*, and only
tickets in the lowest `selected_ppm` millionths may be in the roster. Every client checks every
member, and that the share is not larger than the round needs in a fleet of the enrolled size.

What it bounds: with N enrolled devices, C of which collude, and a cohort of at least K, one
colluder is in a given draw with probability at most p = 2 slack K / N: it may hold two enrolments,
of two weeks, for as long as both are valid. A client accepts draws within a day of its clock, so in
a week at most 9 x 86,400. By the union bound, more than c colluders are eligible in some draw with
probability at most 777,600 P(Bin(C, p) > c); see `colluder_bound`.

>>> f"{colluder_bound(enrolled=1_000_000, colluders=1_000, cohort=100, exceeding=20):.0e}"
'4e-09'
>>> colluder_bound(enrolled=1_000, colluders=10, cohort=100, exceeding=5)  # too small a fleet
1.0

What it does not bound: the server knows all lottery numbers, so it can compute every draw in
advance, choose the best one for its colluders within the bound, and leave out honest devices that
are eligible. In a fleet of fewer than `slack` x K devices everyone is eligible. An authority that
cooperates can choose lottery numbers. Lotto (Jiang and Wang, USENIX Security 2024) prevents the
prediction with a verifiable random function of each device; this costs one hash per member, and no
proof travels.
"""

from __future__ import annotations

import math

from isthmus_privacy.crypto.canonical import NUMBER, tagged_hash

LOTTERY_BYTES = 32

MILLION = 1_000_000

DRAW_SECONDS = 86_400
"""A client accepts draws at most this far from its own clock."""

SELECTION_SLACK = 10
"""Default of how many times more devices than the round needs may be eligible, because only about
a tenth of the enrolled devices is available at a time."""

_DRAWS = 9 * 86_400
"""Draws that a client can accept in a week: seven days, and one before and after."""


def ticket(lottery: bytes, draw: int) -> float:
    """The ticket of a lottery number in a draw, uniform in [0, 1) in steps of 2^-53.

    >>> ticket(bytes(32), 0) == ticket(bytes(32), 0) != ticket(bytes(32), 1)
    True
    """
    digest = tagged_hash("ticket", lottery, NUMBER.write(draw))
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)


def is_selected(lottery: bytes, draw: int, selected_ppm: int) -> bool:
    """Whether a ticket is within the selected share, in millionths."""
    return selected_ppm >= MILLION or ticket(lottery, draw) * MILLION < selected_ppm


def smallest_share(tickets: list[float]) -> int:
    """The smallest share, in millionths, that selects all of the tickets.

    >>> smallest_share([0.25, 0.125])
    250001
    """
    return min(MILLION, math.floor(max(tickets) * MILLION) + 1)


def largest_share(slack: int, cohort: int, population: int) -> int:
    """The largest share, in millionths, for at least `cohort` of `population` enrolled devices.

    >>> largest_share(10, cohort=100, population=1_000_000), largest_share(10, 3, 12)
    (1000, 1000000)
    """
    return min(MILLION, -(-slack * cohort * MILLION // max(population, 1)))


def colluder_bound(
    *, enrolled: int, colluders: int, cohort: int, exceeding: int, slack: int = SELECTION_SLACK
) -> float:
    """Bound on the probability that some draw of a week admits more than `exceeding` colluders.

    Args:
        enrolled: N, the number of enrolled devices.
        colluders: C of them collude with the server.
        cohort: K, the minimum number of devices in a sum.
        exceeding: c.
        slack: see `SELECTION_SLACK`.
    """
    share = min(1.0, 2 * largest_share(slack, cohort, enrolled) / MILLION)
    if share == 1.0:
        return 1.0 if colluders > exceeding else 0.0
    tail = math.fsum(
        math.exp(
            math.lgamma(colluders + 1)
            - math.lgamma(k + 1)
            - math.lgamma(colluders - k + 1)
            + k * math.log(share)
            + (colluders - k) * math.log1p(-share)
        )
        for k in range(exceeding + 1, colluders + 1)
    )
    return min(1.0, _DRAWS * tail)
