"""What a run measured, and how far its forecasts were from it.

Both are in the round log of every run: forecasts are stored with each plan, before anything runs,
and receipts and records when it has ended.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from isthmus_server.read.report.forecasts import ratios
from isthmus_server.storage.records import EndedAttempt, LoggedAttempt, Receipt, Record, RoundRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredFigure(Record):
    """One figure that a run measured many times."""

    name: str
    unit: str
    count: int
    median: float
    low: float
    """The tenth percentile."""
    high: float
    """The ninetieth percentile."""

    @classmethod
    def of(cls, name: str, unit: str, values: Iterable[float]) -> Self | None:
        """The figure of all finite values; None without any.

        >>> MeasuredFigure.of("round", "s", [3.0, 1.0, 2.0]).median
        2.0
        """
        ordered = sorted(value for value in values if math.isfinite(value))
        if not ordered:
            return None
        last = len(ordered) - 1
        return cls(
            name=name,
            unit=unit,
            count=len(ordered),
            median=statistics.median(ordered),
            low=ordered[math.floor(0.1 * last)],
            high=ordered[math.ceil(0.9 * last)],
        )

    @property
    def text(self) -> str:
        """Name, median and range in words."""
        median = _shown(self.median, self.unit)
        if self.low == self.high:
            return f"{self.name}: {median}"
        low = _shown(self.low, self.unit)
        high = _shown(self.high, self.unit)
        return f"{self.name}: {median} (10 to 90 %: {low} to {high})"


def measured(attempts: Sequence[EndedAttempt]) -> list[MeasuredFigure]:
    """What a run measured, failed attempts included where they count."""
    receipts = [receipt for record in attempts for receipt in record.receipts]
    devices = [each for each in receipts if each.regime == "federated"]
    ranks = [each for each in receipts if each.regime == "datacenter"]
    found = [*_round_seconds(attempts)]
    found += [
        MeasuredFigure.of("step of a datacenter", "s", _seconds_of_a_step(ranks)),
        MeasuredFigure.of("step of a device", "s", _seconds_of_a_step(devices)),
        MeasuredFigure.of(
            "steps of a device in a round", "steps", _positive(r.steps for r in devices)
        ),
        MeasuredFigure.of(
            "to a device in a round", "bytes", _positive(r.bytes_out for r in devices)
        ),
        MeasuredFigure.of(
            "from a device in a round", "bytes", _positive(r.bytes_in for r in devices)
        ),
        MeasuredFigure.of(
            "messages of a device in a round",
            "bytes",
            _positive(r.messages_in + r.messages_out for r in devices),
        ),
    ]
    if devices:
        lost = [float(each.status == "dropped") for each in devices]
        share = statistics.fmean(lost)
        found.append(
            MeasuredFigure(
                name="devices dropped",
                unit="of the invited",
                count=len(lost),
                median=share,
                low=share,
                high=share,
            )
        )
    return [each for each in found if each is not None]


def _round_seconds(attempts: Sequence[EndedAttempt]) -> Iterator[MeasuredFigure | None]:
    committed = [each for each in attempts if isinstance(each, RoundRecord)]
    for regime in dict.fromkeys(each.regime for each in committed):
        seconds = [each.seconds for each in committed if each.regime == regime]
        yield MeasuredFigure.of(f"{regime} round", "s", seconds)


def _seconds_of_a_step(receipts: Sequence[Receipt]) -> list[float]:
    return [each.seconds / each.steps for each in receipts if each.steps and each.seconds]


def _positive(values: Iterable[float]) -> list[float]:
    return [value for value in values if value > 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastError(Record):
    """How far a figure of the committed rounds was from its forecasts."""

    name: str
    regime: str
    count: int
    ratio: float
    """Median of what was measured, divided by what was forecast."""
    low: float
    """The tenth percentile."""
    high: float
    """The ninetieth percentile."""

    @property
    def text(self) -> str:
        """The error in words."""
        spread = "" if self.low == self.high else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.ratio:.3g} times the forecast {self.name}{spread}"


def forecast_errors(logged: Iterable[LoggedAttempt]) -> list[ForecastError]:
    """Time, cost and bytes of the committed rounds of each regime, compared with their forecasts.

    The first round of a regime has no forecast of its time.
    """
    by_figure: dict[tuple[str, str], list[float]] = {}
    for each in logged:
        forecast = each.planned.decision.forecast
        if forecast is None or not isinstance(each.record, RoundRecord):
            continue
        for name, ratio in ratios(forecast, each.record):
            by_figure.setdefault((each.record.regime, name), []).append(ratio)
    found = []
    for (regime, name), values in by_figure.items():
        figure = MeasuredFigure.of(name, "", values)
        if figure is not None:
            found.append(
                ForecastError(
                    name=name,
                    regime=regime,
                    count=figure.count,
                    ratio=figure.median,
                    low=figure.low,
                    high=figure.high,
                )
            )
    return found


def _shown(value: float, unit: str) -> str:
    shown = f"{value:,.0f}" if unit in ("bytes", "steps") else f"{value:.3g}"
    return f"{shown} {unit}".strip()
