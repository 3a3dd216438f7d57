"""Which side trains until the limits end the run, by forecasts of the target metric.

What the target metric does in each of the `courses` that are left is a forecast of
`isthmus_server.strategy.learning_curves`, as in `isthmus what-if` and `isthmus plan`: a sample of
curves, each of which is one way in which the run may go on. In each, a course reaches the target
after some seconds and for some price, or not before the limits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from isthmus.job import StrategySection
from isthmus_server.strategy.forecast import progress_by_round
from isthmus_server.strategy.policies.adaptive.courses import OTHER, REGIMES, Course, courses
from isthmus_server.strategy.policies.adaptive.state import TrainingSide
from isthmus_server.strategy.policy import Kind, Observation

if TYPE_CHECKING:
    from isthmus_server.strategy.learning_curves import LearningCurves, Values

LEAST_CHANGES = 2
"""Rounds of each side before and after which the metric is known, without which nothing is planned.
Where these say little, intervals are long, and trials decide."""
MISSED = 2.0
"""What a course costs that misses the target, in units of the most that any course takes; the part
of the way to the target that is left comes on top."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outlook:
    """What comes of a course, in each member of a sample of learning curves."""

    course: Course
    loss: Values
    """How bad it is: less than `MISSED` where it reaches the target."""
    reached: float
    """Part of the sample in which it reaches the target."""
    rounds: tuple[int, int]
    """Fewest and most rounds to the target, without a twentieth of the sample at each end; 0 if it
    is never reached."""
    takes: tuple[float, float]
    """Seconds or price, likewise."""

    @property
    def mean_loss(self) -> float:
        """By which courses are chosen."""
        return float(self.loss.mean())

    def better_than(self, other: Outlook) -> float:
        """Part of the sample in which this course is better; where both are equal, half counts."""
        return float((self.loss < other.loss).mean() + (self.loss == other.loss).mean() / 2)

    def text(self, unit: str) -> str:
        """What it does, and what is forecast of it; `unit` is that of `takes`."""
        if not self.reached:
            return f"{self.course.wish.text}, which no forecast has at the target"
        rounds = _range(*(str(each) for each in self.rounds))
        takes = _range(*(f"{each:.3g}" for each in self.takes))
        return (
            f"{self.course.wish.text}, which is at the target in {self.reached:.0%} of the "
            f"forecasts, after {rounds} more rounds and {takes} {unit}"
        )


def outlooks(
    found: Sequence[Course],
    curves: LearningCurves,
    observation: Observation,
    past: Sequence[TrainingSide],
    start: float | None,
) -> list[Outlook]:
    """Forecast what comes of courses.

    Args:
        found: the courses.
        curves: of the target metric, by side.
        observation: with the target.
        past: sides of the rounds before, since the model that `start` is of.
        start: see `LearningCurves.after`.
    """
    import numpy as np  # here, as commands that only read a run's log are quick without it

    target = observation.target
    assert target is not None  # objectives have one, which the job checks
    sign = 1 if target.rises else -1
    goal = target.missing(0.0)
    most = max((course.takes[-1] for course in found), default=0.0) or 1.0
    results = []
    for course in found:
        values = curves.after([*past, *course.sides], start)[:, len(past) :]
        missing = goal - sign * values
        is_there = missing <= 0
        reached = is_there.any(axis=1)
        place = is_there.argmax(axis=1)
        takes = np.asarray(course.takes)[place]
        left = missing.min(axis=1) / curves.moved
        loss = np.where(reached, takes / most, MISSED + left)
        ends = (0, 0)
        paid = (0.0, 0.0)
        if reached.any():
            tails = [0.05, 0.95]
            first, last = np.quantile(place[reached] + 1, tails, method="nearest")
            low, high = np.quantile(takes[reached], tails, method="nearest")
            ends = (int(first), int(last))
            paid = (float(low), float(high))
        results.append(
            Outlook(
                course=course,
                loss=loss,
                reached=float(reached.mean()),
                rounds=ends,
                takes=paid,
            )
        )
    return results


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


# -- the plan --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preference:
    """The best course that begins with each side."""

    best: Mapping[TrainingSide, Outlook]
    unit: str

    def surely(self, side: TrainingSide, share: float) -> bool:
        """Whether it is better to begin with a side, in such a part of the forecasts."""
        if side not in self.best or OTHER[side] not in self.best:
            return False
        mine = self.best[side]
        other = self.best[OTHER[side]]
        return mine.mean_loss < other.mean_loss and mine.better_than(other) >= share

    def text(self, side: TrainingSide) -> str:
        """The best course that begins with a side, against the best that begins with the other."""
        mine = self.best[side]
        if OTHER[side] not in self.best:
            return mine.text(self.unit)
        other = self.best[OTHER[side]]
        return (
            f"{mine.text(self.unit)}; better in {mine.better_than(other):.0%} of them than "
            f"{other.text(self.unit)}"
        )


class RestOfRun:
    """Plans the rest of a run."""

    def __init__(self, strategy: StrategySection) -> None:
        self._strategy = strategy

    def preference(
        self, observation: Observation, broken: tuple[int, int] | None = None
    ) -> Preference | None:
        """Return the best courses; None if too few rounds of a side were evaluated.

        It is None as well if the values are too large for a forecast.

        Args:
            observation: of the round to plan, with a target.
            broken: the last round before others that began with earlier models, and the last of
                those; None if there were none.
        """
        # It needs NumPy, without which commands that only read a run's log are quick.
        from isthmus_server.strategy import learning_curves

        assert observation.target is not None  # objectives have one, which the job checks
        name = observation.target.name
        sides = [_side_of(past.regime) for past in observation.history]
        values = [past.metrics.get(name, math.nan) for past in observation.history]
        pieces = [learning_curves.RunPiece(sides, values)]
        start = None
        if broken is not None:
            before, last = broken
            start = values[last - 1]
            if not math.isfinite(start):
                return None
            pieces = [
                learning_curves.RunPiece(sides[:before], values[:before]),
                learning_curves.RunPiece(sides[last:], values[last:], start),
            ]
        kinds = {kind for piece in pieces for kind in piece.kinds}
        known = {side: len(progress_by_round(observation, REGIMES[side])) for side in OTHER}
        if kinds != set(OTHER) or min(known.values()) < LEAST_CHANGES:
            return None
        try:
            curves = learning_curves.LearningCurves.of_metric(
                name, pieces, learning_curves.Inertia.of(self._strategy)
            )
        except ValueError:  # a run that has diverged has values that nothing can be made of
            return None
        objective: Literal["time", "cost"] = (
            "cost" if self._strategy.objective == "cost" else "time"
        )
        changes = set(itertools.pairwise(sides))
        # What rounds in turn do is known from such only, as in what-if.
        in_turns = all((side, OTHER[side]) in changes for side in OTHER)
        found = courses(observation, self._strategy.windows, objective, in_turns=in_turns)
        past = sides if broken is None else sides[broken[1] :]
        views = outlooks(found, curves, observation, past, start)
        best: dict[TrainingSide, Outlook] = {}
        for view in sorted(views, key=lambda each: each.mean_loss):
            best.setdefault(view.course.wish.first, view)
        unit = "seconds" if objective == "time" else "units of price"
        return Preference(best=best, unit=unit)


def _side_of(regime: Kind) -> TrainingSide:
    return "datacenter" if regime == "datacenter" else "devices"
