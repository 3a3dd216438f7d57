"""The lottery of secure rounds: tickets, shares, and what colluding devices can reach."""

import hashlib
import math
import random

import pytest
from tests.privacy.protocol import AUTHORITY, FAR_FUTURE, identity

from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.lottery import (
    MILLION,
    colluder_bound,
    is_selected,
    largest_share,
    smallest_share,
    ticket,
)

MONDAY = 1_800_230_400  # 2027-01-18 00:00 UTC
WEEK = 7 * 86_400


def lottery(name="a", key="a", now=MONDAY):
    enrolment = AUTHORITY.enrol(name, identity(key).public, not_after=FAR_FUTURE, now=now)
    Directory(AUTHORITY.public).check(enrolment)
    return enrolment.lottery


def test_joining_or_renewing_within_a_week_does_not_draw_again():
    assert lottery() == lottery(now=MONDAY + WEEK - 1)
    assert len({lottery(), lottery(now=MONDAY + WEEK), lottery("b"), lottery(key="b")}) == 4


def test_tickets_are_uniform_and_new_in_every_draw():
    number = hashlib.sha256(b"a device").digest()  # as another one may be an unlucky device's
    drawn = sorted(ticket(number, MONDAY + second) for second in range(2000))
    assert max(abs(value - (i + 0.5) / 2000) for i, value in enumerate(drawn)) < 0.05


def test_the_stated_share_selects_exactly_the_lowest_tickets():
    numbers = random.Random(1)
    lotteries = sorted((numbers.randbytes(32) for _ in range(500)), key=lambda n: ticket(n, MONDAY))
    share = smallest_share([ticket(number, MONDAY) for number in lotteries[:20]])
    assert [is_selected(number, MONDAY, share) for number in lotteries[:21]] == [True] * 20 + [
        False
    ]
    assert is_selected(lotteries[-1], MONDAY, MILLION)


def test_the_bound_on_colluders_is_a_binomial_tail_times_the_draws_of_a_week():
    enrolled, colluders, cohort, exceeding = 100_000, 100, 50, 12
    share = 2 * 10 * cohort / enrolled
    assert share == 2 * largest_share(10, cohort, enrolled) / MILLION
    tail = sum(
        math.comb(colluders, k) * share**k * (1 - share) ** (colluders - k)
        for k in range(exceeding + 1, colluders + 1)
    )
    bound = colluder_bound(
        enrolled=enrolled, colluders=colluders, cohort=cohort, exceeding=exceeding
    )
    assert bound == pytest.approx(9 * 86_400 * tail, rel=1e-6)
    assert bound < 1e-3


def test_a_small_fleet_has_no_bound_and_no_colluders_need_none():
    assert largest_share(10, cohort=20, population=200) == MILLION
    assert colluder_bound(enrolled=200, colluders=19, cohort=20, exceeding=5) == 1.0
    assert colluder_bound(enrolled=200, colluders=5, cohort=20, exceeding=5) == 0.0


def test_the_table_of_the_threat_model():
    """A thousandth of all devices collude: so many are eligible in the best draw of a week."""
    found = {
        enrolled: min(
            c
            for c in range(200)
            if colluder_bound(
                enrolled=enrolled, colluders=enrolled // 1000, cohort=100, exceeding=c
            )
            < 1e-6
        )
        for enrolled in (10_000, 100_000, 1_000_000)
    }
    assert found == {10_000: 10, 100_000: 18, 1_000_000: 18}
