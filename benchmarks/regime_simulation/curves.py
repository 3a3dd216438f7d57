"""Draw curves as a small SVG file for the documentation, without a plotting library."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 300, 220, 46, 26, 38, 14
"""Size of a panel's drawing area and its margins, in pixels."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Colours of Okabe and Ito, which colour-blind people can distinguish."""
POINTS = 40
"""Points of a drawn curve."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line: the mean of several runs, each a list of (x, y) with x rising."""

    name: str
    runs: Sequence[Sequence[tuple[float, float]]]

    def mean(self) -> list[tuple[float, float]]:
        """The mean at equal steps of x, up to the end of the shortest run.

        Each run is a step function: it keeps a value until its next point.
        """
        runs = [run for run in self.runs if run]
        if not runs:
            return []
        first, last = max(run[0][0] for run in runs), min(run[-1][0] for run in runs)
        xs = [first + (last - first) * i / (POINTS - 1) for i in range(POINTS)]
        return [(x, statistics.mean(_value(run, x) for run in runs)) for x in xs]


def chart(panels: Mapping[str, Sequence[Curve]], x_name: str, y_name: str) -> str:
    """An SVG document: panels side by side, y from 0 to 100, one legend below."""
    names = list(dict.fromkeys(curve.name for curves in panels.values() for curve in curves))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    width = len(panels) * (LEFT + WIDTH + GAP)
    height = TOP + HEIGHT + BOTTOM + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (title, curves) in enumerate(panels.items()):
        left = number * (LEFT + WIDTH + GAP) + LEFT
        parts += _panel(title, curves, left, colours, x_name, y_name if number == 0 else "")
    step = width / max(len(names), 1)
    for i, name in enumerate(names):
        x, y = 10 + i * step, height - 10
        parts.append(
            f'<path d="M{x:.0f} {y - 4}h18" stroke="{colours[name]}" stroke-width="2.5"/>'
            f'<text x="{x + 23:.0f}" y="{y}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    title: str,
    curves: Sequence[Curve],
    left: float,
    colours: Mapping[str, str],
    x_name: str,
    y_name: str,
) -> list[str]:
    lines = [(curve.name, curve.mean()) for curve in curves]
    x_max = max((x for _, line in lines for x, _ in line), default=1.0) or 1.0
    bottom = TOP + HEIGHT
    parts = [f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{escape(title)}</text>']
    for percent in range(0, 101, 20):
        y = bottom - HEIGHT * percent / 100
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{percent}</text>')
    for share in (0.0, 0.5, 1.0):
        x = left + WIDTH * share
        label = f"{x_max * share:.3g}"
        parts.append(f'<text x="{x}" y="{bottom + 15}" text-anchor="middle">{label}</text>')
    parts.append(
        f'<text x="{left + WIDTH / 2}" y="{bottom + 30}" text-anchor="middle">'
        f"{escape(x_name)}</text>"
    )
    if y_name:
        x, y = left - 34, TOP + HEIGHT / 2
        parts.append(
            f'<text x="{x}" y="{y}" text-anchor="middle" '
            f'transform="rotate(-90 {x} {y})">{escape(y_name)}</text>'
        )
    for name, line in lines:
        points = " ".join(
            f"{left + WIDTH * x / x_max:.1f},{bottom - HEIGHT * y / 100:.1f}" for x, y in line
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="2"/>'
        )
    return parts


def _value(run: Sequence[tuple[float, float]], x: float) -> float:
    """The last value at or before x, or the first value if there is none."""
    before = [y for point_x, y in run if point_x <= x + 1e-9]
    return before[-1] if before else run[0][1]
