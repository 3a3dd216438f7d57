"""Charts as SVG: no script, no fonts, no requests; colours come from the page's style sheet.

Places are computed here, and drawn by the macros of `templates/charts.html`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from markupsafe import Markup

from isthmus_server.read.pages.templates import digits, templates

_T = TypeVar("_T")

MAX_MARKS = 1000
"""Points or bars of one chart; of more, evenly spaced ones are drawn."""

RATES = {
    "units_per_second": "scored units per second",
    "peak_memory_gib": "peak memory in GiB",
    "mfu": "model FLOPS utilisation",
    "restarts": "restarts of the ranks",
}
"""Figures of datacenters that have a chart, and its title."""

_WIDTH = 460.0
_HEIGHT = 230.0
_LEFT = 56.0
_RIGHT = 10.0
_TOP = 12.0
_BOTTOM = 36.0
_TICKS = 5
_STRIP_WIDTH = 940.0
_STRIP_HEIGHT = 54.0


@dataclasses.dataclass(frozen=True)
class Point:
    """A mark of a line chart."""

    x: float
    y: float
    kind: str
    """Style class of the point, such as the regime of its round."""
    label: str
    """What is shown when the pointer rests on it."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive rounds of one kind in a timeline."""

    first: int
    last: int
    kind: str
    label: str


def ticks(low: float, high: float) -> list[float]:
    """Round figures that cover a range.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(3.0, 3.0)
    [3.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line through points, with a mark for each."""

    points: Sequence[Point]
    """In the order of the line."""
    kind: str = "line"
    """Style class of the line."""


def line_chart(
    points: Sequence[Point], *, title: str, x_label: str, limit: float | None = None
) -> Markup:
    """A chart of one line; see `lines_chart`."""
    return lines_chart([Line(points)], title=title, x_label=x_label, limit=limit)


def lines_chart(
    lines: Sequence[Line], *, title: str, x_label: str, limit: float | None = None
) -> Markup:
    """Lines with the same axes.

    Args:
        lines: their points with figures that are not finite are left out.
        title: what `y` is.
        x_label: what `x` is.
        limit: a value of `y` that is drawn as a dashed line.

    Returns the SVG; empty without points.
    """
    drawn = [dataclasses.replace(line, points=_drawable(line.points)) for line in lines]
    points = [point for line in drawn for point in line.points]
    if not points:
        return Markup()
    heights = [point.y for point in points] + ([] if limit is None else [limit])
    x_low = min(point.x for point in points)
    x_high = max(point.x for point in points)
    y_low = min(heights)
    y_high = max(heights)
    x_ticks = ticks(x_low, x_high)
    y_ticks = ticks(y_low, y_high)

    def across(x: float) -> float:
        room = _WIDTH - _LEFT - _RIGHT
        return _LEFT + room * ((x - x_low) / (x_high - x_low) if x_high > x_low else 0.5)

    def down(y: float) -> float:
        room = _HEIGHT - _TOP - _BOTTOM
        return _TOP + room * ((y_high - y) / (y_high - y_low) if y_high > y_low else 0.5)

    first = points[0]
    last = points[-1]
    spoken = f"{title} against {x_label}: from {digits(first.y)} to {digits(last.y)}"
    if len(drawn) > 1:
        spoken = f"{title} against {x_label}: {len(drawn)} lines"
    marks = [
        {
            "kind": line.kind,
            # Numbers alone; as text they would be cut off, as sentences of other machines are.
            "path": Markup(" ").join(f"{across(p.x):.1f},{down(p.y):.1f}" for p in line.points),
            "marks": [
                (f"{across(each.x):.1f}", f"{down(each.y):.1f}", each.kind, each.label)
                for each in line.points
            ],
        }
        for line in drawn
    ]
    return _drawn(
        "lines",
        title=title,
        x_label=x_label,
        spoken=spoken,
        width=f"{_WIDTH:g}",
        height=f"{_HEIGHT:g}",
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        bottom=_HEIGHT - _BOTTOM,
        label_y=_HEIGHT - 4,
        y_ticks=[(f"{down(y):.1f}", digits(y)) for y in y_ticks],
        x_ticks=[(f"{across(x):.1f}", digits(x)) for x in x_ticks],
        limit=None if limit is None else (f"{down(limit):.1f}", digits(limit)),
        lines=marks,
        radius=3 if len(points) <= 100 else 1.5,
    )


def _drawable(points: Sequence[Point]) -> Sequence[Point]:
    return thinned([each for each in points if math.isfinite(each.x) and math.isfinite(each.y)])


def timeline(spans: Sequence[Span], rounds: int) -> Markup:
    """Rounds from left to right, coloured by their kind; `rounds` are those of the whole width."""
    width = _STRIP_WIDTH / max(rounds, 1)
    marks = [
        {
            "kind": span.kind,
            "x": f"{(span.first - 1) * width:.2f}",
            "y": "0",
            "width": f"{max((span.last - span.first + 1) * width, 1.0):.2f}",
            "height": "34",
            "label": span.label,
        }
        for span in thinned(spans)
    ]
    places = [
        ("middle", f"{min((tick - 0.5) * width, _STRIP_WIDTH - 12):.1f}", 49, f"{tick:.0f}")
        for tick in ticks(1.0, float(max(rounds, 1)))
        if tick == int(tick)
    ]
    kinds = ", ".join(dict.fromkeys(span.kind for span in spans))
    spoken = f"Timeline of {rounds} rounds: {kinds}"
    return _strip(_STRIP_HEIGHT, spoken, marks, places)


def stacked_bars(bars: Sequence[tuple[int, Mapping[str, int]]], *, title: str) -> Markup:
    """Counts by kind for each round: pairs of a round and its counts; empty without bars."""
    bars = thinned(bars)
    highest = max((sum(counts.values()) for _, counts in bars), default=0)
    if not highest:
        return Markup()
    bottom = _STRIP_HEIGHT * 2 - 16
    room = _STRIP_HEIGHT * 2 - 22
    width = _STRIP_WIDTH / len(bars)
    marks = []
    for place, (round_, counts) in enumerate(bars):
        top = bottom
        label = f"round {round_}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
        for kind, count in counts.items():
            height = room * count / highest
            top -= height
            if count:
                marks.append(
                    {
                        "kind": kind,
                        "x": f"{place * width:.2f}",
                        "y": f"{top:.2f}",
                        "width": f"{max(width - 0.5, 0.5):.2f}",
                        "height": f"{height:.2f}",
                        "label": label,
                    }
                )
    ends = (("start", 0.0, bars[0][0]), ("end", _STRIP_WIDTH, bars[-1][0]))
    places = [(anchor, x, bottom + 13, f"round {round_}") for anchor, x, round_ in ends]
    spoken = f"{title}: up to {highest} in a round"
    return _strip(_STRIP_HEIGHT * 2, spoken, marks, places)


def gauge(spent: float, limit: float, what: str) -> Markup:
    """A bar that shows how much of a limit is spent."""
    share = min(max(spent / limit, 0.0), 1.0) if limit > 0 else 1.0
    return _drawn(
        "gauge",
        words=f"{what}: {digits(spent)} of {digits(limit)}",
        width=f"{_WIDTH:g}",
        full=_WIDTH,
        filled=f"{_WIDTH * share:.1f}",
        kind="failed" if share >= 0.9 else "spent",
    )


def thinned(marks: Sequence[_T]) -> Sequence[_T]:
    """At most `MAX_MARKS` marks, the last one among them."""
    if len(marks) <= MAX_MARKS:
        return marks
    step = math.ceil(len(marks) / MAX_MARKS)
    return list(marks[::-1][::step])[::-1]


def _strip(
    height: float,
    spoken: str,
    marks: Sequence[Mapping[str, str]],
    places: Sequence[tuple[str, str | float, float, str]],
) -> Markup:
    return _drawn(
        "strip",
        width=f"{_STRIP_WIDTH:g}",
        height=f"{height:g}",
        spoken=spoken,
        marks=marks,
        ticks=places,
    )


def _drawn(macro: str, **chart: Any) -> Markup:
    """What a macro of `charts.html` draws; it escapes all text."""
    module: Any = templates().get_template("charts.html").module
    return Markup(getattr(module, macro)(chart))  # noqa: S704 - the macro has escaped it
