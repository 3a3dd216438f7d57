"""Forecasts of windows, compared with a minute-by-minute simulation."""

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.job import Window
from isthmus.job.section import DAYS, Hours
from isthmus_server.strategy.policy import Forecast
from isthmus_server.strategy.windows import forecast, forecast_hours

DAY = 86400.0
MONDAY = datetime.datetime(2026, 3, 2, tzinfo=datetime.UTC).timestamp()


def text(minutes):
    return f"{minutes // 60:02}:{minutes % 60:02}"


times = st.integers(0, 47).map(lambda half: text(30 * half))
hours = st.builds(Hours, opens=times, closes=times, days=st.sets(st.sampled_from(DAYS)).map(tuple))


def is_open(listed, now):
    """Whether some of the hours are under way: those of today, or of yesterday over midnight."""
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
    clock = f"{moment:%H:%M}"
    today, yesterday = DAYS[moment.weekday()], DAYS[moment.weekday() - 1]
    for one in listed:
        over_midnight = one.closes <= one.opens
        days = one.days or DAYS
        if today in days and one.opens <= clock and (over_midnight or clock < one.closes):
            return True
        if yesterday in days and over_midnight and clock < one.closes:
            return True
    return False


@given(st.lists(hours, min_size=1, max_size=3), st.integers(0, 14 * 48 - 1))
def test_a_forecast_matches_a_minute_by_minute_simulation(listed, half_hours):
    now = MONDAY + 1800.0 * half_hours
    found = forecast_hours(listed, now, None)
    assert found.ready == is_open(listed, now)
    steps = (step for step in range(1, 7 * 48 + 1))
    later = (step for step in steps if is_open(listed, now + 1800.0 * step) != found.ready)
    change = next(later, None)
    assert found.changes_in == (None if change is None else 1800.0 * change)
    opened = sum(is_open(listed, now + 1800.0 * step) for step in range(7 * 48))
    assert found.share == pytest.approx(opened / (7 * 48))


@given(st.lists(hours, min_size=1, max_size=3), st.integers(0, 400), st.integers(1, 900))
def test_the_open_share_refers_to_the_remaining_time(listed, start, left):
    now = MONDAY + 1800.0 * start
    opened = sum(is_open(listed, now + 1800.0 * step) for step in range(left))
    found = forecast_hours(listed, now, 1800.0 * left)
    assert found.share == pytest.approx(opened / left)


def test_a_side_without_windows_can_always_work():
    night = Window(side="federated", opens="22:00", closes="06:00")
    assert forecast([night], "datacenter", MONDAY) == Forecast()
    assert forecast([], "federated", MONDAY) == Forecast()
    all_day = Window(side="federated", opens="09:00", closes="09:00")
    assert forecast([all_day], "federated", MONDAY) == Forecast()


def test_the_open_share_of_an_ended_run_is_zero():
    night = Window(side="federated", opens="22:00", closes="06:00")
    assert forecast([night], "federated", MONDAY, seconds_left=0.0).share == 0.0


def test_several_windows_add_up():
    zones = [
        Window(side="federated", opens="01:00", closes="03:00"),
        Window(side="federated", opens="03:00", closes="05:00", days=["tue"]),
    ]
    found = forecast(zones, "federated", MONDAY + DAY + 2 * 3600)
    assert found == Forecast(ready=True, changes_in=3 * 3600.0, share=pytest.approx(16 / 168))
