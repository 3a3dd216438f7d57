"""Charts as SVG: no script, no fonts, no requests; colours come from the page's style sheet."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from isthmus.printable import in_a_line

_T = TypeVar("_T")

MAX_MARKS = 1000
"""Points or bars of one chart; of more, evenly spaced ones are drawn."""

_WIDTH = 460.0
_HEIGHT = 230.0
_LEFT = 56.0
_RIGHT = 10.0
_TOP = 12.0
_BOTTOM = 36.0
_TICKS = 5
_STRIP_WIDTH = 940.0
_STRIP_HEIGHT = 54.0


def text(value: object) -> str:
    """Text for an element or an attribute; text of other machines becomes one line."""
    return html.escape(in_a_line(str(value)))


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


def figure(value: float) -> str:
    """A figure with at most four digits.

    >>> figure(1234567.0), figure(0.25), figure(float("nan"))
    ('1.235e+06', '0.25', 'nan')
    """
    return f"{value:.4g}"


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
) -> str:
    """A chart of one line; see `lines_chart`."""
    return lines_chart([Line(points)], title=title, x_label=x_label, limit=limit)


def lines_chart(
    lines: Sequence[Line], *, title: str, x_label: str, limit: float | None = None
) -> str:
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
        return ""
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

    bottom = _HEIGHT - _BOTTOM
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(y):.1f}" '
        f'y2="{down(y):.1f}"/><text class="tick" text-anchor="end" x="{_LEFT - 6}" '
        f'y="{down(y) + 4:.1f}">{figure(y)}</text>'
        for y in y_ticks
    ]
    parts += [
        f'<text class="tick" text-anchor="middle" x="{across(x):.1f}" y="{bottom + 15}">'
        f"{figure(x)}</text>"
        for x in x_ticks
    ]
    parts.append(
        f'<text class="tick" text-anchor="middle" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" '
        f'y="{_HEIGHT - 4}">{text(x_label)}</text>'
    )
    if limit is not None:
        parts.append(
            f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(limit):.1f}" '
            f'y2="{down(limit):.1f}"><title>limit {figure(limit)}</title></line>'
        )
    radius = 3 if len(points) <= 100 else 1.5
    for line in drawn:
        path = " ".join(f"{across(point.x):.1f},{down(point.y):.1f}" for point in line.points)
        parts.append(f'<polyline class="{text(line.kind)}" points="{path}"/>')
        parts += [
            f'<circle class="{text(point.kind)}" cx="{across(point.x):.1f}" '
            f'cy="{down(point.y):.1f}" r="{radius}"><title>{text(point.label)}</title></circle>'
            for point in line.points
        ]
    first = points[0]
    last = points[-1]
    spoken = f"{title} against {x_label}: from {figure(first.y)} to {figure(last.y)}"
    if len(drawn) > 1:
        spoken = f"{title} against {x_label}: {len(drawn)} lines"
    return (
        f"<figure><figcaption>{text(title)} against {text(x_label)}</figcaption>"
        f"{_svg(_WIDTH, _HEIGHT, spoken, parts)}</figure>"
    )


def _drawable(points: Sequence[Point]) -> Sequence[Point]:
    return thinned([each for each in points if math.isfinite(each.x) and math.isfinite(each.y)])


def timeline(spans: Sequence[Span], rounds: int) -> str:
    """Rounds from left to right, coloured by their kind; `rounds` are those of the whole width."""
    width = _STRIP_WIDTH / max(rounds, 1)
    parts = [
        f'<rect class="{text(span.kind)}" x="{(span.first - 1) * width:.2f}" y="0" '
        f'width="{max((span.last - span.first + 1) * width, 1.0):.2f}" height="34">'
        f"<title>{text(span.label)}</title></rect>"
        for span in thinned(spans)
    ]
    for tick in ticks(1.0, float(max(rounds, 1))):
        if tick == int(tick):
            x = min((tick - 0.5) * width, _STRIP_WIDTH - 12)
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="49">{tick:.0f}</text>'
            )
    kinds = ", ".join(dict.fromkeys(span.kind for span in spans))
    spoken = f"Timeline of {rounds} rounds: {kinds}"
    return _svg(_STRIP_WIDTH, _STRIP_HEIGHT, spoken, parts)


def stacked_bars(bars: Sequence[tuple[int, Mapping[str, int]]], *, title: str) -> str:
    """Counts by kind for each round: pairs of a round and its counts; empty without bars."""
    bars = thinned(bars)
    highest = max((sum(counts.values()) for _, counts in bars), default=0)
    if not highest:
        return ""
    bottom = _STRIP_HEIGHT * 2 - 16
    room = _STRIP_HEIGHT * 2 - 22
    width = _STRIP_WIDTH / len(bars)
    parts = []
    for place, (round_, counts) in enumerate(bars):
        top = bottom
        label = f"round {round_}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
        for kind, count in counts.items():
            height = room * count / highest
            top -= height
            if count:
                parts.append(
                    f'<rect class="{text(kind)}" x="{place * width:.2f}" y="{top:.2f}" '
                    f'width="{max(width - 0.5, 0.5):.2f}" height="{height:.2f}">'
                    f"<title>{text(label)}</title></rect>"
                )
    first = bars[0][0]
    last = bars[-1][0]
    for anchor, x, round_ in (("start", 0.0, first), ("end", _STRIP_WIDTH, last)):
        parts.append(
            f'<text class="tick" text-anchor="{anchor}" x="{x}" y="{bottom + 13}">'
            f"round {round_}</text>"
        )
    spoken = f"{title}: up to {highest} in a round"
    return _svg(_STRIP_WIDTH, _STRIP_HEIGHT * 2, spoken, parts)


def gauge(spent: float, limit: float, what: str) -> str:
    """A bar that shows how much of a limit is spent."""
    share = min(max(spent / limit, 0.0), 1.0) if limit > 0 else 1.0
    kind = "failed" if share >= 0.9 else "spent"
    parts = [
        f'<rect class="grid" x="0" y="0" width="{_WIDTH}" height="14"/>',
        f'<rect class="{kind}" x="0" y="0" width="{_WIDTH * share:.1f}" height="14"/>',
    ]
    words = f"{what}: {figure(spent)} of {figure(limit)}"
    drawn = _svg(_WIDTH, 14.0, words, parts)
    return f"<figure><figcaption>{text(words)}</figcaption>{drawn}</figure>"


def thinned(marks: Sequence[_T]) -> Sequence[_T]:
    """At most `MAX_MARKS` marks, the last one among them."""
    if len(marks) <= MAX_MARKS:
        return marks
    step = math.ceil(len(marks) / MAX_MARKS)
    return list(marks[::-1][::step])[::-1]


def _svg(width: float, height: float, spoken: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(spoken)}">'
        f"{''.join(parts)}</svg>"
    )
