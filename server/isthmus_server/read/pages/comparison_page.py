"""Write the runs of a comparison as one HTML page with their curves."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from isthmus_server.read.pages.charts import Line, Point, lines_chart
from isthmus_server.read.pages.report_page import page
from isthmus_server.read.pages.templates import digits

_COLOURS = 8


@dataclasses.dataclass(frozen=True)
class Curve:
    """What was measured in the rounds of one run."""

    number: int
    """Number of the run's variant."""
    variant: str
    """The variant in words, which may be those of another."""
    seed: int
    changes: Mapping[str, Any]
    """What its variant changes in the job, by key."""
    rounds: Mapping[int, Mapping[str, float]]
    """Metrics by round."""
    end: Mapping[str, float]
    """Metrics of the model that the run delivers."""


def comparison_page(
    name: str, curves: Sequence[Curve], totals: Sequence[str] = (), now: float | None = None
) -> str:
    """The whole page.

    Args:
        name: of the job.
        curves: of all runs; those of one variant follow each other.
        totals: what is said of all runs together, sentences.
        now: when it is written, in Unix seconds; by default the clock's time.
    """
    variants: dict[int, list[Curve]] = {}
    for curve in curves:
        variants.setdefault(curve.number, []).append(curve)
    metrics = dict.fromkeys(
        metric for curve in curves for row in curve.rounds.values() for metric in row
    )
    seeds = max((len(members) for members in variants.values()), default=0)
    ends = dict.fromkeys(metric for curve in curves for metric in curve.end)
    by_round = [_against_rounds(metric, variants) for metric in metrics]
    by_key = [_against_key(metric, variants) for metric in ends]
    return page(
        "comparison",
        f"{name}: comparison",
        now,
        seeds=f"Lines are means of {seeds} seeds." if seeds > 1 else "One seed.",
        totals=totals,
        variants=[(_kind(number), members[0].variant) for number, members in variants.items()],
        sections=[
            ("Rounds", [each for each in by_round if each]),
            ("Delivered models", [each for each in by_key if each]),
        ],
    )


def _kind(number: int) -> str:
    """The style of a variant; colours repeat with dashes."""
    again = " again" if number // _COLOURS % 2 else ""
    return f"series{number % _COLOURS}{again}"


def _against_rounds(metric: str, variants: Mapping[int, Sequence[Curve]]) -> Markup:
    """The mean over seeds in each round in which all seeds were measured."""
    lines = []
    for number, members in variants.items():
        kind = _kind(number)
        variant = members[0].variant
        common = set.intersection(
            *({number for number, row in each.rounds.items() if metric in row} for each in members)
        )
        points = []
        for round_ in sorted(common):
            mean = statistics.mean(each.rounds[round_][metric] for each in members)
            label = f"{variant}, round {round_}: {digits(mean)}"
            points.append(Point(round_, mean, kind, label))
        lines.append(Line(points, kind))
    return lines_chart(lines, title=metric, x_label="rounds")


def _against_key(metric: str, variants: Mapping[int, Sequence[Curve]]) -> Markup:
    """The value of each delivered model against the key that is varied, if it is a number."""
    changes = [members[0].changes for members in variants.values()]
    keys = dict.fromkeys(key for each in changes for key in each)
    if len(keys) != 1 or len(variants) < 2:
        return Markup()
    (key,) = keys
    if not all(type(each[key]) in (int, float) for each in changes):
        return Markup()
    means = []
    marks = []
    for number, members in sorted(variants.items(), key=lambda one: one[1][0].changes[key]):
        kind = _kind(number)
        variant = members[0].variant
        x = float(members[0].changes[key])
        ends = [(each.seed, each.end[metric]) for each in members if metric in each.end]
        if not ends:
            continue
        mean = statistics.mean(end for _, end in ends)
        means.append(Point(x, mean, kind, f"{variant}: {digits(mean)}, the mean"))
        for seed, end in ends:
            mark = Point(x, end, kind, f"{variant}, seed {seed}: {digits(end)}")
            marks.append(Line([mark], kind))
    return lines_chart([Line(means), *marks], title=metric, x_label=key)
