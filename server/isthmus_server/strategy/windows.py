"""When a side can work: the job's windows, as a forecast.

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
    """What the windows of one side say at `now` (seconds since 1970, UTC).

    The share is of `seconds_left`, or of a week where the run's time has no limit.
    """
    hours = [window for window in windows if window.side == side]
    if not hours:
        return Forecast()
    return forecast_hours(hours, now, seconds_left)


def forecast_hours(hours: Sequence[Hours], now: float, seconds_left: float | None) -> Forecast:
    """The same for any hours of the week."""
    spans = _spans(hours)
    if spans == [(0.0, WEEK)]:
        return Forecast()
    at = (now - _MONDAY) % WEEK
    edges = [edge for span in spans for edge in span]
    return Forecast(
        ready=any(opens <= at < closes for opens, closes in spans),
        changes_in=min(_later(edge - at) for edge in edges if _real(edge, spans)),
        share=_share(spans, at, WEEK if seconds_left is None else seconds_left),
    )


def _spans(hours: Sequence[Hours]) -> list[tuple[float, float]]:
    """Where the week is open, in seconds since Monday 00:00; sorted, apart from each other."""
    pieces: list[tuple[float, float]] = []
    for one in hours:
        opens, closes = _seconds(one.opens), _seconds(one.closes)
        length = (closes - opens) % DAY or DAY
        for day in one.days or DAYS:
            start = DAYS.index(day) * DAY + opens
            end = start + length
            pieces.append((start, min(end, WEEK)))
            if end > WEEK:
                pieces.append((0.0, end - WEEK))
    joined: list[tuple[float, float]] = []
    for start, end in sorted(pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _real(edge: float, spans: Sequence[tuple[float, float]]) -> bool:
    """Whether something changes there: not at a midnight from Sunday that is open on both sides."""
    if edge not in (0.0, WEEK):
        return True
    return not (spans[0][0] == 0.0 and spans[-1][1] == WEEK)


def _later(seconds: float) -> float:
    """The time until an edge, this week or next."""
    return seconds % WEEK or WEEK


def _share(spans: Sequence[tuple[float, float]], at: float, left: float) -> float:
    """The part of the next `left` seconds that is open."""
    if left <= 0:
        return 0.0
    weeks, rest = divmod(left, WEEK)
    opened = weeks * sum(closes - opens for opens, closes in spans)
    for opens, closes in spans:
        for shift in (0.0, WEEK):
            opened += max(0.0, min(closes + shift, at + rest) - max(opens + shift, at))
    return opened / left


def _seconds(clock: str) -> float:
    hours, minutes = clock.split(":")
    return int(hours) * 3600.0 + int(minutes) * 60.0
