"""What one policy reached in its simulated rounds, and would reach at the end of the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from isthmus_server.plan.what_if import Alternative
from isthmus_server.read.pages.templates import digits
from isthmus_server.strategy.learning_curves import Interval


@dataclasses.dataclass(frozen=True)
class TrialPoint:
    """One evaluated round of a trial."""

    round: int
    price: float
    """Price of the trial so far."""
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyTrial:
    """The trials of one policy."""

    policy: str
    seeds: Sequence[Sequence[TrialPoint]] = ()
    """The evaluated rounds of each seed."""
    forecast: Alternative | None = None
    """What it would reach at the end of the job; None if the trials failed, or are too short."""
    to_the_end: bool = False
    """Whether its trials are whole runs: then `forecast` has what they reached, from the least to
    the most of all seeds, and nothing is forecast."""
    note: str = ""
    """What the forecast assumes besides, or why there is none."""

    @property
    def interval(self) -> Interval | None:
        """Where the metric ends; None if nothing is known of it."""
        return None if self.forecast is None else self.forecast.reached

    @property
    def known(self) -> Alternative | None:
        """What it reaches, with its rounds and price; None if nothing is known of it."""
        return None if self.interval is None else self.forecast

    @property
    def is_forecast(self) -> bool:
        """Whether what it reaches is a forecast, and neither simulated nor unknown."""
        return self.interval is not None and not self.to_the_end

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return dataclasses.asdict(self)

    @property
    def text(self) -> str:
        """What it reaches, or why that is not known."""
        if self.forecast is None:
            return self.note
        if not self.to_the_end:
            return self.forecast.text
        return f"{self.reached}, {self.forecast.course}"

    @property
    def reached(self) -> str:
        """The metric at the end of the job in words; empty if nothing is known of it."""
        found = self.interval
        if found is None:
            return ""
        if not self.to_the_end:
            return f"{digits(found.median)} ({digits(found.low)} to {digits(found.high)})"
        ends = " to ".join(dict.fromkeys(digits(each) for each in (found.low, found.high)))
        seeds = len(self.seeds)
        of = f" with {seeds} seeds" if seeds > 1 else ""
        return f"{ends}, simulated to the end{of}"
