"""Forecast when a side can work, from the job's windows.

>>> from isthmus.job import Window
>>> night = [Window(side="federated", opens="22:00", closes="06:00")]
>>> forecast(night, "federated", now=20 * 3600)
Forecast(ready=False, changes_in=7200.0, share=0.333...)
>>> forecast(night, "datacenter", now=20 * 3600)
Forecast(ready=True, changes_in=None, share=1.0)
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.job import Window
from isthmus.job.section import DAYS, Hours
from isthmus_server.strategy.policy import Forecast, Side

DAY = 24 * 3600.0
WEEK = 7 * DAY
_MONDAY = 4 * DAY
"""The first Monday after 1970-01-01, which was a Thursday."""


def forecast(
    windows: Sequence[Window], side: Side, now: float, seconds_left: float | None = None
) -> Forecast:
    """Forecast the availability of one side by its windows.

    Args:
        windows: the job's windows, of both sides.
        side: the side to forecast.
        now: seconds since 1970, UTC.
        seconds_left: the period that `Forecast.share` refers to; None for a week.
    """
    hours = [window for window in windows if window.side == side]
    if not hours:
        return Forecast()
    return forecast_hours(hours, now, seconds_left)


def forecast_hours(hours: Sequence[Hours], now: float, seconds_left: float | None) -> Forecast:
    """Forecast the availability within any weekly hours; see `forecast`."""
    spans = _spans(hours)
    if spans == [(0.0, WEEK)]:
        return Forecast()
    time_of_week = (now - _MONDAY) % WEEK
    edges = [edge for span in spans for edge in span]
    return Forecast(
        ready=any(opens <= time_of_week < closes for opens, closes in spans),
        changes_in=min(
            _until(edge - time_of_week) for edge in edges if _is_transition(edge, spans)
        ),
        share=_open_share(spans, time_of_week, WEEK if seconds_left is None else seconds_left),
    )


def _spans(hours: Sequence[Hours]) -> list[tuple[float, float]]:
    """Return the open spans of the week in seconds since Monday 00:00, sorted and disjoint."""
    pieces: list[tuple[float, float]] = []
    for entry in hours:
        opens = _seconds(entry.opens)
        closes = _seconds(entry.closes)
        # Equal times are a whole day, and not none.
        length = (closes - opens) % DAY or DAY
        for day in entry.days or DAYS:
            start = DAYS.index(day) * DAY + opens
            end = start + length
            pieces.append((start, min(end, WEEK)))
            if end > WEEK:
                # A span over the end of Sunday goes on at the beginning of the week.
                pieces.append((0.0, end - WEEK))
    joined: list[tuple[float, float]] = []
    for start, end in sorted(pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _is_transition(edge: float, spans: Sequence[tuple[float, float]]) -> bool:
    """Return whether availability changes at an edge: not at a week boundary open on both sides."""
    if edge not in (0.0, WEEK):
        return True
    return not (spans[0][0] == 0.0 and spans[-1][1] == WEEK)


def _until(seconds: float) -> float:
    """Return the time until an edge, this week or next."""
    return seconds % WEEK or WEEK


def _open_share(
    spans: Sequence[tuple[float, float]], time_of_week: float, duration: float
) -> float:
    """Return the part of the next `duration` seconds that is open."""
    if duration <= 0:
        return 0.0
    weeks, rest = divmod(duration, WEEK)
    open_seconds = weeks * sum(closes - opens for opens, closes in spans)
    for opens, closes in spans:
        for shift in (0.0, WEEK):
            end = min(closes + shift, time_of_week + rest)
            start = max(opens + shift, time_of_week)
            open_seconds += max(0.0, end - start)
    return open_seconds / duration


def _seconds(clock: str) -> float:
    hours, minutes = clock.split(":")
    return int(hours) * 3600.0 + int(minutes) * 60.0
