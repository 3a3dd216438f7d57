"""One run as the console shows it: summaries, series for charts, and pages of its rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from isthmus_server.read.console.attempt_index import OUTCOMES, AttemptIndex, IndexedAttempt
from isthmus_server.read.pages.charts import RATES
from isthmus_server.storage.store import Store

MAX_POINTS = 1000
"""Points of a chart; of more rounds, evenly spaced ones are sent."""

MAX_SPANS = 300
"""Pieces of a timeline."""

REGIMES = ("datacenter", "federated", "hybrid")


class ShownRun:
    """Reads one run directory, which another process may write; use it in one thread.

    Guarantees:
      * it opens the log for reading only, and holds no transaction between two calls;
      * each attempt is parsed once for summaries, however often pages are shown.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Open the run.

        Args:
            directory: the run directory.
            name: in addresses of pages.

        Raises:
            UserError: there is no run, or it cannot be read.
        """
        self.name = name
        self.directory = directory
        self.store = Store.open(directory)
        self.index = AttemptIndex(self.store.log.connection)
        self._file = _identity(directory)

    def close(self) -> None:
        """Close the log."""
        self.store.close()

    @property
    def replaced(self) -> bool:
        """Whether the log is another file now; the run must be opened again."""
        return _identity(self.directory) != self._file

    def version(self) -> str:
        """A text that changes with every commit to the log.

        Raises:
            sqlite3.Error: the log cannot be read.
        """
        row = self.store.log.connection.execute(
            "SELECT (SELECT changes FROM seal), (SELECT max(rowid) FROM attempts)"
        ).fetchone()
        return "-".join(str(value or 0) for value in row)

    def refresh(self) -> None:
        """Read what was committed since the last call."""
        self.index.refresh()

    # -- summaries ---------------------------------------------------------------------------------

    @property
    def hides_figures(self) -> bool:
        """Whether secure aggregation hides the figures of single devices."""
        return self.store.job.federated.secure_aggregation

    def metric_names(self) -> list[str]:
        """Names of evaluation figures that a chart can show."""
        names = {name: None for attempt in self.index.attempts for name in attempt.metrics}
        return sorted(names, key=lambda name: (name.endswith("loss"), name))

    def spent(self) -> float:
        """Price of all attempts so far."""
        return sum(attempt.price for attempt in self.index.attempts)

    def epsilon(self) -> float | None:
        """Privacy spent by the device that was asked most; None without `[privacy]`."""
        if self.store.job.privacy is None:
            return None
        return max((each.epsilon or 0.0 for each in self.index.attempts), default=0.0)

    def spans(self) -> list[dict[str, Any]]:
        """Consecutive rounds of one regime: `first`, `last`, `regime` and the first's `reason`."""
        spans = []
        for regime, group in itertools.groupby(self.index.rounds, key=lambda each: each.regime):
            members = list(group)
            first = members[0]
            last = members[-1]
            spans.append(
                {
                    "first": first.round,
                    "last": last.round,
                    "regime": regime,
                    "reason": first.reason,
                }
            )
        return list(_thinned(spans, MAX_SPANS))

    def under_way(self) -> dict[str, Any] | None:
        """The attempt that was planned and has not ended, of a run that goes on."""
        row = self.store.log.connection.execute(
            "SELECT round, attempt, planned FROM attempts WHERE record IS NULL "
            "ORDER BY round DESC, attempt DESC LIMIT 1"
        ).fetchone()
        newest = self.index.attempts[-1] if self.index.attempts else None
        if row is None or (
            newest is not None and (row[0], row[1]) < (newest.round, newest.attempt)
        ):
            return None
        return {"round": row[0], "attempt": row[1]}

    # -- charts ------------------------------------------------------------------------------------

    def series(self) -> dict[str, Any]:
        """Columns of the charts, with at most `MAX_POINTS` rows; figures that are not finite: null.

        Keys: `round`, `cost` (spent after it), `elapsed`, `regime`, `epsilon`, `metrics` by name,
        `outcomes` by name, and `profile` by datacenter and figure.
        """
        spent = itertools.accumulate(each.price for each in self.index.attempts)
        rows = [
            (attempt, cost)
            for attempt, cost in zip(self.index.attempts, spent, strict=True)
            if attempt.committed
        ]
        rows = list(_thinned(rows, MAX_POINTS))
        rounds = [attempt for attempt, _ in rows]
        return {
            "run": self.name,
            "round": [each.round for each in rounds],
            "cost": [_finite(cost) for _, cost in rows],
            "elapsed": [_finite(each.elapsed) for each in rounds],
            "regime": [each.regime for each in rounds],
            "epsilon": [_finite(each.epsilon) for each in rounds],
            "metrics": {
                name: [_finite(each.metrics.get(name)) for each in rounds]
                for name in self.metric_names()
            },
            "outcomes": {
                name: [each.outcomes.get(name, 0) for each in rounds] for name in OUTCOMES
            },
            "profile": _profiles(rounds),
        }


def _profiles(rounds: Sequence[IndexedAttempt]) -> dict[str, dict[str, list[float | None]]]:
    names = dict.fromkeys(name for each in rounds for name in each.profile)
    charts: dict[str, dict[str, list[float | None]]] = {}
    for name in names:
        for key in RATES:
            column = [_finite(each.profile.get(name, {}).get(key)) for each in rounds]
            if any(value is not None for value in column):
                charts.setdefault(name, {})[key] = column
    return charts


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _thinned(rows: Sequence[Any], most: int) -> Iterator[Any]:
    """At most `most` evenly spaced rows, the first and the last among them."""
    if len(rows) <= most:
        yield from rows
        return
    for place in range(most):
        yield rows[round(place * (len(rows) - 1) / (most - 1))]


def _identity(directory: Path) -> tuple[int, int]:
    found = (directory / "run.sqlite").stat()
    return found.st_dev, found.st_ino
