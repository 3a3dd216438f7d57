"""Forecast what a planned round takes and achieves, from the rounds before it.

Duration and progress are those of the latest rounds in the same regime; price and bytes follow from
the plan. Progress is the part of what is missing to the target that a round closes, so that it can
be compared between early rounds, which gain much, and later ones. Without a target, what is missing
is the held-out loss.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection

from isthmus_server.strategy.policy import KINDS, Kind, Observation, Plan

LATEST = 3
"""Rounds of which the mean progress and the median duration are taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundForecast:
    """What the planned round will take and achieve, if it goes on as before."""

    price: float
    """If every invited device takes part."""
    device_bytes: float
    """To and from all invited devices."""
    seconds: float | None = None
    """From its plan to its commit; None if no round in this regime was committed before."""
    metric: str = "loss"
    """The held-out metric that `value` is of: the target's, else the loss."""
    value: float | None = None
    """After the round; None if the progress of this regime was not measured yet."""
    rounds_to_target: float | None = None
    """Rounds of this kind until the target; infinity if they do not come closer to it. None without
    a target or without `value`."""


def forecast_round(plan: Plan, observation: Observation) -> RoundForecast:
    """Return what a planned round will take and achieve."""
    regimes = (plan.regime,)
    metric = "loss" if observation.target is None else observation.target.name
    values = [past.metrics[metric] for past in observation.history if metric in past.metrics]
    progress = mean_progress(observation, regimes)
    forecast = RoundForecast(
        price=planned_price(plan, observation),
        device_bytes=planned_bytes(plan, observation),
        seconds=round_seconds(observation, regimes),
        metric=metric,
    )
    if progress is None:
        return forecast
    return dataclasses.replace(
        forecast,
        value=_after(values[-1], progress, observation),
        rounds_to_target=None if observation.target is None else rounds_to_target(progress),
    )


def rounds_to_target(progress: float) -> float:
    """Return how many rounds with this progress are needed; infinity if it is not above 0.

    >>> rounds_to_target(0.25)
    4.0
    """
    return 1 / progress if progress > 0 else math.inf


def planned_price(plan: Plan, observation: Observation) -> float:
    """Return the price of a planned round in which every invited device takes part."""
    transfers = plan.regime == "hybrid" and (plan.merge or observation.merge) == "transfer"
    training = observation.price(
        plan.regime,
        plan.cohort,
        plan.datacenter_steps,
        measured=plan.measure_gradients and not transfers,
    )
    return training + observation.evaluation_devices * observation.comparison_price


def planned_bytes(plan: Plan, observation: Observation) -> float:
    """Return the bytes that a planned round moves to and from all invited devices."""
    evaluating = float(observation.evaluation_devices * observation.model_bytes)
    if plan.regime == "datacenter":
        return evaluating
    each = observation.client_bytes + plan.measure_gradients * observation.model_bytes
    return observation.invited(plan.cohort) * each + evaluating


# -- the rounds before -----------------------------------------------------------------------------


def round_seconds(observation: Observation, regimes: Collection[Kind]) -> float | None:
    """Return the median duration of the latest rounds in these regimes; None if there are none."""
    latest = [past.seconds for past in observation.history if past.regime in regimes][-LATEST:]
    return statistics.median(latest) if latest else None


def mean_progress(
    observation: Observation, regimes: Collection[Kind] = KINDS, since: int = 0
) -> float | None:
    """Return the mean part of what was missing that the latest rounds in these regimes closed.

    Args:
        observation: with the history and the target.
        regimes: a figure counts only if all rounds since the evaluation before were in them.
        since: rounds up to this one are left out.

    Returns:
        Per round, at most 1; below 0 if the rounds moved away from the target. None if no
        evaluated round in these regimes follows another evaluated one.
    """
    parts = progress_by_round(observation, regimes, since)
    return statistics.fmean(parts[-LATEST:]) if parts else None


def progress_by_round(
    observation: Observation, regimes: Collection[Kind], since: int = 0
) -> list[float]:
    """Return the part of what was missing that each evaluated round closed, oldest first."""
    metric = "loss" if observation.target is None else observation.target.name
    parts: list[float] = []
    before: float | None = None
    rounds = 0
    counts = True
    for past in observation.history:
        rounds += 1
        # With rounds that are not evaluated, a figure is of all rounds since the last one, and
        # counts only if they are all of these regimes.
        counts = counts and past.regime in regimes and past.round > since
        value = past.metrics.get(metric, math.nan)
        if not math.isfinite(value):
            continue
        # As a part of what was missing, and for each round: early rounds gain more in absolute
        # figures.
        after = _missing(value, observation)
        if before is not None and before > 0 and counts:
            parts.append((before - after) / before / rounds)
        before = after
        rounds = 0
        counts = True
    return parts


def _missing(value: float, observation: Observation) -> float:
    return value if observation.target is None else observation.target.missing(value)


def _after(value: float, progress: float, observation: Observation) -> float:
    change = progress * _missing(value, observation)
    return value + change if observation.target and observation.target.rises else value - change
