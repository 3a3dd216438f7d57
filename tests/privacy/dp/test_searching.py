"""Searches for the number at which a monotone condition changes."""

from hypothesis import given
from hypothesis import strategies as st

from isthmus_privacy.dp.searching import largest, least

numbers = st.integers(1, 10**9)


@given(change=st.integers(0, 10**9), start=numbers, most=numbers)
def test_the_change_is_found_from_any_start_with_few_evaluations(change, start, most):
    asked = []

    def fits(number: int) -> bool:
        assert 1 <= number <= most
        asked.append(number)
        return number <= change

    assert largest(fits, most=most, start=start) == min(change, most)
    assert len(asked) <= 2 * most.bit_length() + 8
    found = least(lambda number: not fits(number), most=most, start=start)
    assert found == (change + 1 if change < most else None)


def test_a_good_start_is_worth_most_of_the_evaluations():
    asked = []
    assert largest(lambda n: asked.append(n) or n <= 1_030_000, most=10**9, start=10**6) == 1030000
    assert len(asked) < 20
