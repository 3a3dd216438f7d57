"""What every other policy would have reached in a run, from the run's log alone.

Policies decide anew, on metrics that learning curves of the run's own rounds forecast
(`replayed_policy`). What the log cannot say is said to be unknown, with the reason and with what it
does have of it: comparisons of models, and gradients of both sides.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus_server.plan.replayed_policy import (
    CannotBeKnown,
    RoundFacts,
    replays,
    with_policy,
)
from isthmus_server.plan.round_log import RoundLog, shown_metric, usual_rounds
from isthmus_server.read.pages.templates import digits
from isthmus_server.read.report.durations import duration, durations
from isthmus_server.storage.store import Store
from isthmus_server.strategy.learning_curves import COVERED, Inertia, Interval, LearningCurves
from isthmus_server.strategy.policies import BUILT_IN

OPEN = 0.25
"""Longest interval of a forecast, as a part of all that the metric moved in the run: what is less
known has no forecast."""
_LOSS = "loss"
"""The metric that policies follow unless they are told another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What a policy has reached in simulation."""

    value: float
    """The metric of the delivered model."""
    rounds: int
    price: float
    seconds: float

    @property
    def text(self) -> str:
        """All of it in words."""
        return (
            f"{digits(self.value)}, {self.rounds} rounds, cost {digits(self.price)}, "
            f"{time_in_words(self.seconds)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
    """One policy, and what it would have reached."""

    policy: str
    reached: Interval | None = None
    """Forecast of the metric of the delivered model; None if it cannot be known."""
    rounds: tuple[int, int] = (0, 0)
    """Fewest and most rounds."""
    price: tuple[float, float] = (0.0, 0.0)
    seconds: tuple[float, float] | None = None
    """Least and most, in a plan the ends of a 90 % interval; None if it is not known how long its
    rounds take."""
    middle_seconds: float | None = None
    """In the middle of that interval; None where there is none."""
    unknown: str = ""
    """Why it cannot be known."""
    missing: str = ""
    """Rounds that a run would need at least for it to be known, a clause; empty if none help, or
    if it is known."""
    open: Interval | None = None
    """Where it lies, if that is known too little for a forecast; None otherwise."""
    trained: Trained | None = None
    """What it reaches in simulation, which takes the place of the forecast; None if it was not
    trained."""
    untrained: str = ""
    """Why it could not be trained in simulation."""

    @property
    def error(self) -> float | None:
        """The median of the forecast less what simulation reaches; None without either."""
        if self.reached is None or self.trained is None:
            return None
        return self.reached.median - self.trained.value

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**dataclasses.asdict(self), "error": self.error}

    @property
    def text(self) -> str:
        """What it would have reached, or why that is not known."""
        if self.untrained:
            return f"cannot be trained: {self.untrained}"
        if self.trained is not None:
            return f"{self.trained.text}; {self._said_before}"
        if self.reached is None:
            return f"cannot be known: {self.unknown}"
        return f"{_interval(self.reached)}, {self.course}"

    @property
    def course(self) -> str:
        """Rounds, cost and time of it."""
        return f"{_range(self.rounds)} rounds, cost {_range(self.price)}, {self.time}"

    @property
    def time(self) -> str:
        """How long it takes, with the interval if there is one."""
        ends = time_in_words(*self.seconds or ())
        if self.seconds is None or self.middle_seconds is None or " to " not in ends:
            return ends
        (middle, low, high), unit = durations(self.middle_seconds, *self.seconds)
        return f"{middle} {unit} ({low} to {high} {unit})"

    @property
    def _said_before(self) -> str:
        """What was forecast of what was trained since, a clause."""
        if self.open is not None:
            return f"the log had left {digits(self.open.low)} to {digits(self.open.high)} open"
        if self.reached is None or self.error is None:
            return "there was no estimate"
        verdict = "right"
        if self.error:
            verdict = f"{digits(abs(self.error))} too {'high' if self.error > 0 else 'low'}"
        return f"the estimate {_interval(self.reached)} was {verdict}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhatIf:
    """All policies for the job of a run."""

    run_id: str
    policy: str
    """Name of the run's policy."""
    metric: str
    value: float
    """The metric of the delivered model; while the run goes on, of what it would deliver now."""
    rounds: int
    """Number of committed rounds."""
    price: float
    alternatives: Sequence[Alternative]
    evidence: Sequence[str]
    """What the log has besides, one sentence each."""
    again: Trained | None = None
    """What the run's own policy reaches in simulation, in as many rounds; None if nothing was
    trained."""

    @classmethod
    def of(cls, store: Store) -> Self:
        """Read the log of a run, ended or not.

        Raises:
            UserError: nothing can be said of the run, with the reason.
        """
        return cls.of_log(RoundLog.of(store))

    @classmethod
    def of_log(cls, log: RoundLog) -> Self:
        """Forecasts from a log that was read.

        Raises:
            UserError: nothing can be said of the run, with the reason.
        """
        names = list(dict.fromkeys(name for each in log.rounds for name in each.record.metrics))
        shown = shown_metric(log.job, names)
        if shown is None or shown not in names:
            raise UserError(
                f"the run {log.run_id} has no round with held-out metrics, so nothing says what "
                "another policy would have reached"
            )
        curves = curves_of([log], shown)
        facts = facts_of([log], shown)
        value = log.delivered(shown)
        if value is None:
            raise UserError(f"no round of the run {log.run_id} has a finite {shown}")
        return cls(
            run_id=log.run_id,
            policy=log.job.strategy.policy,
            metric=shown,
            value=value,
            rounds=len(log.rounds),
            price=log.spent,
            alternatives=[
                _known_well(alternative(log.job, name, facts, curves, shown), curves[shown])
                for name in BUILT_IN
                if name != log.job.strategy.policy
            ],
            evidence=list(_evidence(log)),
        )

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        alternatives = [each.to_json() for each in self.alternatives]
        return {**dataclasses.asdict(self), "alternatives": alternatives}

    def lines(self, directory: str = "RUN") -> list[str]:
        """Lines for a terminal; `directory` is that of the run, as a word of a command."""
        found = [
            f"{self.run_id}: policy {self.policy} reached {self.metric} {digits(self.value)} in "
            f"{self.rounds} rounds for {digits(self.price)}",
        ]
        trained = [each for each in self.alternatives if each.trained or each.untrained]
        if self.again is not None:
            found += self._trained_lines(self.again, trained)
        others = [each for each in self.alternatives if each not in trained]
        if others:
            found.append(
                f"other policies, to the end of the job, with {COVERED:.0%} intervals of forecasts "
                "from this run's log:"
            )
            found += _rows(sorted(others, key=lambda each: each.reached is None))
        if self.evidence:
            found += ["what the log has besides:", *(f"  {each}" for each in self.evidence)]
        if others:
            found.append(
                "a forecast knows a round by its regime and by the metric before it; to be sure, "
                f"train the policies: isthmus what-if {directory} --replay in simulation, or "
                "isthmus compare JOB --policies A,B"
            )
            found += self._missing_lines(others)
        return found

    def _missing_lines(self, others: Sequence[Alternative]) -> list[str]:
        """Which rounds of a run would have told more, by what they would tell."""
        of_rounds: dict[str, list[str]] = {}
        for each in others:
            if each.missing:
                of_rounds.setdefault(each.missing, []).append(each.policy)
        if not of_rounds:
            return []
        parts = [f"{missing} (for {', '.join(names)})" for missing, names in of_rounds.items()]
        order = ", in a row or in turn as the policy has them"
        return [f"a log tells more with {'; '.join(parts)}{order}"]

    def _trained_lines(self, again: Trained, trained: Sequence[Alternative]) -> list[str]:
        """What simulation says, and how far the estimates were from it."""
        apart = abs(again.value - self.value)
        close = f"{digits(apart)} from the run" if apart else "as the run"
        found = [
            f"trained again in simulation, it reaches {again.text}: {close}, and so far may be off "
            "what is said of others",
            "other policies, trained in simulation to the end of the job:",
        ]
        sign = 1 if self.metric.endswith(_LOSS) else -1
        known = [each for each in trained if each.trained is not None]
        known.sort(key=lambda each: sign * each.trained.value if each.trained else math.inf)
        found += _rows([*known, *(each for each in trained if each.trained is None)])
        errors = [abs(each.error) for each in trained if each.error is not None]
        held = sum(
            each.reached.low <= each.trained.value <= each.reached.high
            for each in trained
            if each.reached is not None and each.trained is not None
        )
        if errors:
            found.append(
                f"the estimates were off by {digits(statistics.fmean(errors))} on average, and "
                f"{held} of {len(errors)} intervals hold what was reached"
            )
        return found


def curves_of(logs: Sequence[RoundLog], shown: str) -> dict[str, LearningCurves]:
    """The learning curves of a metric, by the rounds of runs of one task, and of a loss they have.

    Raises:
        UserError: no round has the metric.
    """
    found = {}
    losses = [each.record.metrics.get(_LOSS, math.nan) for log in logs for each in log.rounds]
    has_loss = any(math.isfinite(each) for each in losses)
    for name in dict.fromkeys([shown, _LOSS] if has_loss else [shown]):
        pieces = [piece for log in logs for piece in log.pieces(name)]
        try:
            found[name] = LearningCurves.of_metric(name, pieces, Inertia.of(logs[0].job.strategy))
        except ValueError as error:
            raise UserError(str(error)) from error
    return found


def facts_of(logs: Sequence[RoundLog], metric: str) -> RoundFacts:
    """What rounds of each kind take, by runs of one job."""
    evaluated: dict[str, int] = {}
    for log in logs:
        for kind in log.kinds:
            evaluated[kind] = evaluated.get(kind, 0) + log.evaluated(metric, kind)
    successions: Counter[tuple[str, str]] = Counter()
    for log in logs:
        successions.update(log.successions)
    every = [each for log in logs for each in log.rounds]
    usual = {kind: usual_rounds(every, kind) for kind in evaluated}
    observations = [each.planned.decision.observation for each in every]
    past = [each.record.as_past_round() for each in every]
    names = sorted({name for each in observations for name in each.datacenter_names})
    return RoundFacts(
        price={
            kind: statistics.fmean(each.price for each in rounds) + _price_of_failures(logs, kind)
            for kind, rounds in usual.items()
        },
        seconds={
            kind: statistics.fmean(each.record.seconds for each in rounds)
            for kind, rounds in usual.items()
        },
        device_bytes={
            kind: statistics.fmean(each.device_bytes for each in rounds)
            for kind, rounds in usual.items()
        },
        evaluated=evaluated,
        successions=successions,
        devices=max((each.clients_ready for each in observations), default=0),
        datacenters=names,
        model_bytes=int(max((each.model_bytes for each in observations), default=0)),
        bytes_each=max((each.bytes_each for each in past), default=0),
        began=min((each.now - each.elapsed for each in observations), default=0.0),
    )


def _price_of_failures(logs: Sequence[RoundLog], kind: str) -> float:
    """What failed attempts at rounds of a kind have cost, for each that was committed."""
    failed = sum(each.price for log in logs for each in log.failures if each.kind == kind)
    return failed / sum(each.kind == kind for log in logs for each in log.rounds)


def alternative(
    job: Job, policy: str, facts: RoundFacts, curves: Mapping[str, LearningCurves], shown: str
) -> Alternative:
    """What a policy would reach."""
    try:
        done, ends, doubt = replays(with_policy(job, policy), facts, curves, shown)
    except CannotBeKnown as error:
        return Alternative(policy=policy, unknown=str(error), missing=error.missing)
    except UserError as error:
        return Alternative(policy=policy, unknown=str(error))
    rounds = [len(each.kinds) for each in done]
    price = [each.price for each in done]
    found = Alternative(
        policy=policy,
        reached=curves[shown].interval(ends, doubt),
        rounds=(min(rounds), max(rounds)),
        price=(min(price), max(price)),
    )
    return with_times(found, job, facts, [(each.kinds, each.seconds) for each in done])


def with_times(
    found: Alternative, job: Job, facts: RoundFacts, runs: Sequence[tuple[Sequence[str], float]]
) -> Alternative:
    """What is known of a policy with the time that it takes; without, if that is not known.

    Runs of simulated devices without a speed take 0 seconds.

    Args:
        found: what is known.
        job: with the policy.
        facts: of its rounds.
        runs: kinds of the rounds of each, and the seconds that it takes with the mean of each kind.
    """
    limit = job.seconds
    took = [
        facts.took(
            kinds,
            seconds,
            limit,
            is_cut=limit is not None and len(kinds) < job.rounds and seconds >= limit,
        )
        for kinds, seconds in runs
    ]
    if not any(each.high for each in took):
        return found
    middle = statistics.median(each.median for each in took) if facts.times else None
    ends = (min(each.low for each in took), max(each.high for each in took))
    return dataclasses.replace(found, seconds=ends, middle_seconds=middle)


def _known_well(found: Alternative, curve: LearningCurves) -> Alternative:
    """The alternative without a forecast that says little."""
    reached = found.reached
    if reached is None or reached.high - reached.low <= OPEN * curve.moved:
        return found
    why = f"the run's rounds leave {digits(reached.low)} to {digits(reached.high)} open"
    return dataclasses.replace(
        found, reached=None, open=reached, unknown=why, missing="more rounds like those it has"
    )


def _evidence(log: RoundLog) -> Sequence[str]:
    """Comparisons and gradients of the log, in sentences."""
    found = []
    for round_, result in log.comparisons():
        first, *others = result.models
        for name in others:
            if result.beats(name):
                verdict = "better"
            elif result.loses(name):
                verdict = "worse"
            else:
                verdict = "neither clearly better nor worse"
            found.append(
                f"round {round_}: {result.devices} devices found {name} {verdict} than {first}"
            )
    cosines = [
        each.record.cosine if each.record.gradients is None else each.record.gradients.cosine
        for each in log.rounds
    ]
    known = [each for each in cosines if each is not None]
    if known:
        found.append(
            f"the steps of both sides had a cosine of {min(known):.2g} to {max(known):.2g} in "
            f"{len(known)} rounds; that does not say what a mixture gains"
        )
    return found


def _rows(alternatives: Sequence[Alternative]) -> list[str]:
    return [f"  {each.policy:<13} {each.text}" for each in alternatives]


def time_in_words(*ends: float) -> str:
    """The time of a run, or its ends; of simulated devices without a speed it is 0, and not known.

    >>> time_in_words(60.0, 240.0), time_in_words(0.0), time_in_words()
    ('1 to 4 min', 'time not known', 'time not known')
    """
    if not any(ends):
        return "time not known"
    numbers, unit = durations(*ends)
    if len(set(numbers)) == 1:
        return duration(ends[0])
    return f"{' to '.join(numbers)} {unit}"


def _interval(found: Interval) -> str:
    return f"{digits(found.median)} ({digits(found.low)} to {digits(found.high)})"


def _range(ends: tuple[float, float]) -> str:
    low, high = ends
    return digits(low) if low == high else f"{digits(low)} to {digits(high)}"
