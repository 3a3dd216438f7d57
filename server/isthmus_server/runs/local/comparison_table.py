"""The table of a comparison: means over seeds, and their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from isthmus_server.runs.local.variations import value_text

OWN = ("seed", "rounds", "cost", "seconds", "device_bytes", "failed")
"""Keys of a run's results that are not metrics of the task."""

_MEGABYTES = "MB of devices"

Result = Mapping[str, Any]
"""What a run ended with: its seed, its figures and metrics, or why it failed."""


def metrics_of(result: Result) -> dict[str, float]:
    """The metrics of the task in the results of a run."""
    return {name: value for name, value in result.items() if name not in OWN}


def statistics_of(runs: Sequence[Result]) -> dict[str, dict[str, float]]:
    """The means of a variant's figures, and their standard deviations if it has several seeds.

    Failed runs do not count. A figure that only some of the others have is left out.

    >>> statistics_of([{"seed": 1, "loss": 1.0}, {"seed": 2, "loss": 3.0}])["means"]
    {'loss': 2.0}
    """
    ended = [run for run in runs if "failed" not in run]
    names = [name for name in (ended[0] if ended else ()) if name != "seed"]
    figures = {
        name: [float(run[name]) for run in ended]
        for name in names
        if all(name in run for run in ended)
    }
    return {
        "means": {name: statistics.mean(each) for name, each in figures.items()},
        "deviations": {name: _deviation(each) for name, each in figures.items() if len(each) > 1},
    }


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation of the population that the values are a sample of."""
    # statistics.stdev raises an AttributeError if a value is infinite or nan.
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def comparison_table(
    variants: Sequence[Mapping[str, Any]], results: Sequence[Sequence[Result]]
) -> Table:
    """A row for each variant: its changes, and the figures of its runs that have not failed.

    Time and bytes have a column where any run has some: devices without profiles take no simulated
    time, and a datacenter moves no bytes of devices.
    """
    ended = [[run for run in runs if "failed" not in run] for runs in results]
    metrics = dict.fromkeys(name for runs in ended for run in runs for name in metrics_of(run))
    known = [
        name
        for name in ("seconds", "device_bytes")
        if any(run.get(name) for runs in ended for run in runs)
    ]
    columns = {"rounds": ".1f", "cost": ".1f", **dict.fromkeys([*known, *metrics], ".4g")}
    rows = []
    for runs in results:
        figures = statistics_of(runs)
        means = figures["means"]
        deviations = figures["deviations"]
        rows.append(
            [
                _figure(name, form, means[name], deviations.get(name)) if name in means else "-"
                for name, form in columns.items()
            ]
        )
    names = [_MEGABYTES if name == "device_bytes" else name for name in columns]
    if any(len(some) < len(runs) for some, runs in zip(ended, results, strict=True)):
        names.append("failed")
        for row, some, runs in zip(rows, ended, results, strict=True):
            row.append(f"{len(runs) - len(some)} of {len(runs)}")
    return _table(variants, names, rows)


def _figure(name: str, form: str, mean: float, deviation: float | None) -> str:
    """A mean with its spread; seeds that do not change the rounds or the bytes need none.

    >>> _figure("loss", ".4g", 0.45951, 0.2549)
    '0.4595 +- 0.25'
    >>> _figure("rounds", ".1f", 3.0, 0.0)
    '3'
    """
    if name == "device_bytes":
        mean = mean / 1e6
        deviation = None if deviation is None else deviation / 1e6
    text = format(mean, form)
    if name == "rounds":
        text = text.removesuffix(".0")
    if deviation is None or (name in OWN and not deviation):
        return text
    return f"{text} +- {deviation:.2g}"


def _table(
    variants: Sequence[Mapping[str, Any]], names: Sequence[str], rows: Sequence[Sequence[str]]
) -> Table:
    table = Table()
    keys = list(variants[0])
    for key in keys:
        name = "policy" if key == "strategy.policy" else key
        table.add_column(Text(name), overflow="fold")
    for column, name in enumerate(names):
        width = max(len(row[column]) for row in rows)  # a figure is never cut
        table.add_column(Text(name), justify="right", overflow="fold", min_width=width)
    for changes, row in zip(variants, rows, strict=True):
        table.add_row(*(Text(_cell(key, changes[key])) for key in keys), *map(Text, row))
    return table


def _cell(key: str, value: Any) -> str:
    """A value of a key in the table; policies are names."""
    return str(value) if key == "strategy.policy" else value_text(value)
