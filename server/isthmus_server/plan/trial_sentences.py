"""What is to be known to compare the trials of policies, in sentences."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from isthmus.job import Job
from isthmus_server.plan.policy_trial import PolicyTrial
from isthmus_server.plan.round_log import kept_mode
from isthmus_server.read.report.one_price import unequal_ends
from isthmus_server.strategy.learning_curves import COVERED

FAR = 4
"""Times the rounds of a trial from which on a forecast is far from it."""


def overlap_of(policies: Sequence[PolicyTrial], metric: str) -> str:
    """Which policies the forecasts cannot tell from the best, a sentence; empty if they can."""
    sign = 1 if metric.endswith("loss") else -1
    known = [(each.policy, each.interval) for each in policies if each.interval is not None]
    known.sort(key=lambda each: sign * each[1].median)
    if not known:
        return ""
    (best, first), *others = known
    alike = [name for name, each in others if each.low <= first.high and first.low <= each.high]
    if not alike:
        return ""
    if all(each.to_the_end for each in policies if each.policy in (best, *alike)):
        return (
            f"the runs do not tell {best} from {', '.join(alike)}, which are no further apart than "
            "seeds are: isthmus simulate --seeds trains more of them"
        )
    return (
        f"the forecasts do not tell {best} from {', '.join(alike)}, whose intervals overlap "
        "with its own: a trial of more rounds makes them shorter"
    )


def origin_of(policies: Sequence[PolicyTrial], rounds: int) -> str:
    """Which values are forecast and which were simulated to the end, sentences.

    Args:
        policies: with their trials.
        rounds: most of each trial.
    """
    whole = [each.policy for each in policies if each.to_the_end]
    others = [each.policy for each in policies if each.is_forecast]
    seeds = max((len(each.seeds) for each in policies), default=0)
    followed = (
        f"{rounds} simulated rounds of each policy with {seeds} seeds, and the ranges are "
        f"{COVERED:.0%} intervals. A forecast knows a round by its regime and by the metric before "
        "it."
    )
    if not whole:
        return f"Quality is forecast from {followed}"
    if not others:
        which = "each policy" if len(whole) == len(policies) else ", ".join(whole)
        return (
            f"All rounds of {which} were simulated with {seeds} seeds, and the ranges are those of "
            "the seeds: nothing is forecast."
        )
    is_one = len(whole) == 1
    return (
        f"All rounds of {', '.join(whole)} were simulated with {seeds} seeds, and "
        f"{'its range is that' if is_one else 'their ranges are those'} of the seeds. Quality of "
        f"{', '.join(others)} is forecast from {followed}"
    )


def unequal_of(
    policies: Sequence[PolicyTrial],
    budget: float | None = None,
    most_rounds: int | None = None,
) -> str:
    """A sentence that policies end at unequal prices or rounds, and what makes them equal.

    Empty if they are equal.

    Args:
        policies: with their trials.
        budget: of the job; None for none.
        most_rounds: of the job; None if they are no matter.
    """
    known = [each.known for each in policies if each.known is not None]
    prices = [statistics.fmean(each.price) for each in known]
    rounds = [statistics.fmean(each.rounds) for each in known]
    return unequal_ends(prices, rounds, budget, most_rounds)


def beyond_trials_of(policies: Sequence[PolicyTrial], job: Job, metric: str, rounds: int) -> str:
    """What forecasts of many more rounds than were tried do not know; empty if none are.

    Args:
        policies: with their trials.
        job: that is planned.
        metric: that is forecast.
        rounds: most of each trial.
    """
    if kept_mode(job, metric) is not None:  # what falls later is not delivered
        return ""
    names = [
        each.policy
        for each in policies
        if each.is_forecast and each.known is not None and each.known.rounds[1] >= FAR * rounds
    ]
    if not names:
        return ""
    turns = "rises" if metric.endswith("loss") else "falls"
    return (
        f"{', '.join(names)}: the forecasts go far beyond the {rounds} rounds that were tried, and "
        f"assume that rounds go on as they began: where {metric} {turns} again, as by training for "
        "too long on few data, they are too good, and their intervals do not hold what comes"
    )


def lower_of(policies: Sequence[PolicyTrial], job: Job, metric: str) -> str:
    """Why forecasts begin below what the trials had reached, a sentence; empty if none do.

    Args:
        policies: with their trials.
        job: that is planned.
        metric: that is forecast.
    """
    if kept_mode(job, metric) is not None:
        return ""
    falls = metric.endswith("loss")
    best, worst = (min, max) if falls else (max, min)
    names = []
    for each in policies:
        reached = each.interval
        if each.to_the_end or reached is None:
            continue
        had = worst(best(point.value for point in seed) for seed in each.seeds if seed)
        if reached.high > had if falls else reached.low < had:
            names.append(each.policy)
    if not names:
        return ""
    mode = "min" if falls else "max"
    which = (
        "the last model" if job.evaluation.deliver == "last" else "the best model by another metric"
    )
    return (
        f"{', '.join(names)}: the intervals have worse values than the trials had reached, since "
        f"the run delivers {which}, and later rounds may be worse; with evaluation.keep_best="
        f"{{name='{metric}', mode='{mode}'}} and evaluation.deliver=best it delivers the best one"
    )


def untimed_side(job: Job, regimes: Collection[str]) -> str:
    """Which option says how long rounds of these regimes take, a clause; empty if it is known."""
    section = job.simulation
    missing = []
    if not section.has_speeds and set(regimes) - {"datacenter"}:
        missing.append("simulation.step_seconds of devices")
    if not section.datacenter_step_seconds and set(regimes) - {"federated"}:
        missing.append("steps of the datacenter by --gpu or simulation.datacenter_step_seconds")
    return " and ".join(missing)


def untimed_of(policies: Sequence[PolicyTrial], job: Job) -> str:
    """A sentence on policies without a known duration, and what gives it; empty without any."""
    names = [
        each.policy for each in policies if each.known is not None and each.known.seconds is None
    ]
    if not names:
        return ""
    missing = untimed_side(job, ("federated", "datacenter"))
    if not missing:
        return ""
    return f"durations of {', '.join(names)} are not known: give {missing}"
