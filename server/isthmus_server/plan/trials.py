"""What policies reach in the first simulated rounds of a job, and a forecast of the others."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from isthmus.errors import UserError
from isthmus.job import Job, with_changes
from isthmus_server.plan.policy_trial import PolicyTrial, TrialPoint
from isthmus_server.plan.replayed_policy import RoundFacts, delivered_of, with_policy
from isthmus_server.plan.round_log import (
    LoggedRound,
    RoundLog,
    kept_mode,
    shown_metric,
    usual_rounds,
)
from isthmus_server.plan.seconds_of_rounds import SecondsOfRounds
from isthmus_server.plan.simulated_log import (
    UnknownTarget,
    refuse_private,
    simulated_log,
    train_trial,
)
from isthmus_server.plan.timed_rounds import TimedRounds
from isthmus_server.plan.trial_sentences import (
    beyond_trials_of,
    lower_of,
    origin_of,
    overlap_of,
    unequal_of,
    untimed_of,
    untimed_side,
)
from isthmus_server.plan.what_if import (
    Alternative,
    alternative,
    curves_of,
    facts_of,
    with_times,
)
from isthmus_server.read.report.durations import duration
from isthmus_server.strategy.learning_curves import LEAST_EVALUATED, Interval, LearningCurves
from isthmus_server.strategy.policy import Kind

MIXED = 2.0
"""Factor on the distance of an interval's ends from its median where the regimes of a trial mix:
without it, 72 % of 90 % intervals held in the twenty jobs by which it was chosen, and with it 88 %.
A factor of 4/3, which ten of them had chosen with fewer seeds, held 80 % of the other ten."""
SEEDS = 2
"""Trials of each policy, of which each divides and draws in another way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """The trials of several policies."""

    metric: str
    rounds: int
    """Most rounds of each trial."""
    job_rounds: int
    """Rounds of the job."""
    policies: Sequence[PolicyTrial]
    unequal: str = ""
    """A sentence that the policies end at unequal prices or rounds, and what makes them equal;
    empty if they are."""
    lower: str = ""
    """Why forecasts begin below what the trials had reached, a sentence; empty if none do."""
    beyond: str = ""
    """What forecasts of many more rounds than were tried do not know, a sentence; empty if none
    are."""
    whole_seconds: float | None = None
    """What trials of all rounds of these policies would take on this machine, by the time that
    these have taken; None if all are whole runs."""
    untimed: str = ""
    """A sentence on policies without a known duration, and what gives it; empty without any."""
    steps: str = ""
    """How steps of the trials' datacenter differ from those of the job's, a sentence; empty if they
    have as many examples, or there are none."""

    @classmethod
    def of(
        cls,
        job: Job,
        base: Path,
        names: Sequence[str],
        rounds: int,
        ranks: int,
        timed: TimedRounds | None = None,
        step_seconds: float | None = None,
    ) -> Self:
        """Train them.

        Args:
            job: that is planned.
            base: the job file's folder.
            names: of the policies.
            rounds: that each is trained for.
            ranks: of the planned datacenter; 0 for none.
            timed: federated rounds of the job, which say more of durations than a few trained ones.
            step_seconds: of a step of the planned datacenter, which those of the trials take then;
                None if that is not known, for `simulation.datacenter_step_seconds`.

        Raises:
            UserError: nothing can be trained or evaluated, with the reason.
        """
        refuse_private(job, "--trial")
        planned = job
        if step_seconds is not None:
            job = with_changes(job, {"simulation.datacenter_step_seconds": step_seconds})
        if ranks and not job.datacenter.ranks:
            job = with_changes(job, {"datacenter.ranks": 1})  # simulated ranks are one anyway
        train = train_trial("a trial")
        logs: dict[str, list[RoundLog]] = {}
        failed: dict[str, str] = {}
        took: dict[str, float] = {}
        with tempfile.TemporaryDirectory(prefix="isthmus-trial-") as scratch:
            for name in dict.fromkeys(names):
                began = time.perf_counter()
                try:
                    logs[name] = [
                        simulated_log(train, _seeded(job, name, seed), base, Path(scratch), rounds)
                        for seed in range(job.seed, job.seed + SEEDS)
                    ]
                except UnknownTarget:
                    raise  # no other policy has it either
                except UserError as error:
                    failed[name] = str(error)
                took[name] = time.perf_counter() - began
        every = [log for each in logs.values() for log in each]
        seen = list(dict.fromkeys(n for log in every for r in log.rounds for n in r.record.metrics))
        shown = shown_metric(job, seen)
        if shown is None or shown not in seen:
            reason = "the task has no held-out metrics: eval_data()"
            if not any(log.rounds for log in every):
                reason = "the job's limits end each policy before its first round"
            reason = next(iter(failed.values()), reason)
            raise UserError(f"the trial says nothing of quality: {reason}")
        tried = [_tried(job, name, each, timed, shown, rounds) for name, each in logs.items()]
        tried += [PolicyTrial(policy=name, note=why) for name, why in failed.items()]
        order = list(dict.fromkeys(names))
        tried.sort(key=lambda each: order.index(each.policy))
        kinds = {each.plan.regime for log in every for each in log.rounds}
        steps = _other_steps(planned, ranks) if kinds - {"federated"} else ""
        return cls(
            metric=shown,
            rounds=rounds,
            job_rounds=job.rounds,
            policies=tried,
            unequal=unequal_of(tried, job.budget, job.rounds),
            lower=lower_of(tried, job, shown),
            beyond=beyond_trials_of(tried, job, shown, rounds),
            whole_seconds=_whole_seconds(job, tried, logs, took),
            untimed=untimed_of(tried, job),
            steps=steps,
        )

    @property
    def sentences(self) -> list[str]:
        """What is to be known to compare the policies."""
        found = (
            self.overlap,
            self.longer,
            self.unequal,
            self.lower,
            self.beyond,
            self.untimed,
            self.steps,
        )
        return [each for each in found if each]

    @property
    def origin(self) -> str:
        """Which values are forecast and which were simulated to the end, sentences."""
        return origin_of(self.policies, self.rounds)

    @property
    def trained(self) -> str:
        """What was simulated, a clause."""
        whole = [each.policy for each in self.policies if each.to_the_end]
        if len(whole) == sum(any(each.seeds) for each in self.policies):
            return "all rounds were simulated here"
        first = "the first rounds were simulated here"
        return f"{first}, of {', '.join(whole)} all of them" if whole else first

    @property
    def heading(self) -> str:
        """What the values of the policies are, a clause."""
        whole = [each for each in self.policies if each.to_the_end]
        others = [each for each in self.policies if each.is_forecast]
        if whole and not others:
            how = "all rounds simulated"
        else:
            how = f"forecast from {self.rounds} simulated rounds of each policy"
        if whole and others:
            how += ", or simulated to the end"
        return f"{self.metric} at the end of the job, {how}"

    @property
    def overlap(self) -> str:
        """Which policies the forecasts cannot tell from the best, a sentence; empty if they can."""
        return overlap_of(self.policies, self.metric)

    @property
    def longer(self) -> str:
        """What trials of all rounds would take, a sentence; empty if the forecasts tell enough."""
        is_open = self.overlap and any(each.is_forecast for each in self.policies)
        if not is_open or self.whole_seconds is None:
            return ""
        return (
            f"simulating all {self.job_rounds} rounds of these policies would take about "
            f"{duration(self.whole_seconds)} here, and would need no forecast: --trial "
            f"{self.job_rounds}"
        )

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "metric": self.metric,
            "rounds": self.rounds,
            "overlap": self.overlap,
            "longer": self.longer,
            "whole_seconds": self.whole_seconds,
            "unequal": self.unequal,
            "lower": self.lower,
            "beyond": self.beyond,
            "untimed": self.untimed,
            "steps": self.steps,
            "policies": [each.to_json() for each in self.policies],
        }


def _whole_seconds(
    job: Job,
    tried: Sequence[PolicyTrial],
    logs: Mapping[str, Sequence[RoundLog]],
    took: Mapping[str, float],
) -> float | None:
    """Seconds that trials of all rounds would take on this machine; None if these are.

    Args:
        job: that is planned.
        tried: what is known of each policy.
        logs: of its trials.
        took: seconds of the trials of each policy here.
    """
    # Longer trials of one that failed would fail, too, and of one without rounds have none.
    begun = [each for each in tried if any(log.rounds for log in logs.get(each.policy, ()))]
    if all(each.to_the_end for each in begun):
        return None
    total = 0.0
    for each in begun:
        had = statistics.fmean(len(log.rounds) for log in logs[each.policy])
        rounds = float(job.rounds)
        if each.known is not None:
            rounds = statistics.fmean(each.known.rounds)
        total += took[each.policy] * max(rounds / had, 1.0)
    return total


def policies_of(job: Job, regimes: Sequence[Kind], *, datacenter: bool) -> list[str]:
    """The policies that a trial compares if none are named: the job's, and those of one regime.

    Args:
        job: the job.
        regimes: that the rounds of the job can have.
        datacenter: whether there is one.
    """
    names: list[str] = [job.strategy.policy]
    if any(kind != "datacenter" for kind in regimes):
        names.append("federated")
    if datacenter:
        names.append("datacenter")
    if datacenter and len(names) > 2:
        names.append("hybrid")
    return list(dict.fromkeys(names))


def _other_steps(job: Job, ranks: int) -> str:
    """How steps of one simulated rank differ from those of the ranks; empty if they do not.

    Args:
        job: that is planned.
        ranks: of the planned datacenter; 0 for none.
    """
    section = job.datacenter
    if not ranks or section.privacy is not None:
        return ""
    try:
        replicas = section.replicas(ranks)
        planned = replicas * section.for_replicas(replicas).batch_size
    except ValueError:  # the job's own policy needs no ranks, so that they were not checked
        return ""
    tried = section.for_replicas(1).batch_size
    if planned == tried:
        return ""
    return (
        f"steps of the trials' datacenter, which is one rank, have {tried} examples, and those of "
        f"{ranks} ranks {planned}: with datacenter.global_batch={planned} the trials have as many, "
        "and take longer"
    )


def _seeded(job: Job, policy: str, seed: int) -> Job:
    """The job under a policy, with a seed.

    Raises:
        UserError: it cannot have the policy.
    """
    return with_changes(with_policy(job, policy), {"seed": seed})


def _with_timed(
    facts: RoundFacts, timed: TimedRounds | None, logs: Sequence[RoundLog]
) -> RoundFacts:
    """The facts with what timed rounds say of durations and failed attempts, and all durations.

    That is where devices take part in a round. Rounds of other cohorts, and those in which devices
    wait for the datacenter's gradient, are taken as those that were trained.
    """
    every = [each for log in logs for each in log.rounds]
    usual = {kind: usual_rounds(every, kind) for kind in facts.seconds}
    times = {
        kind: SecondsOfRounds([each.record.seconds for each in rounds])
        for kind, rounds in usual.items()
    }
    failed = None if timed is None else timed.failed_attempts
    if timed is None or failed is None:
        return dataclasses.replace(facts, times=times)
    price = dict(facts.price)
    for kind, rounds in usual.items():
        plan = rounds[0].plan
        job = logs[0].job
        if plan.regime == "datacenter" or plan.cohort not in (None, job.federated.cohort):
            continue
        if plan.regime == "hybrid" and (plan.merge or job.strategy.merge) == "transfer":
            continue
        datacenter = statistics.fmean(_seconds_of_datacenters(each) for each in rounds)
        evaluation = statistics.fmean(_seconds_of_evaluation(each) for each in rounds)
        times[kind] = timed.times_with(datacenter, evaluation)
        price[kind] = statistics.fmean(each.price for each in rounds) + failed.price
    seconds = {kind: each.mean for kind, each in times.items()}
    return dataclasses.replace(facts, seconds=seconds, times=times, price=price)


def _seconds_of_datacenters(round_: LoggedRound) -> float:
    receipts = round_.record.receipts
    return max((each.seconds for each in receipts if each.regime == "datacenter"), default=0.0)


def _seconds_of_evaluation(round_: LoggedRound) -> float:
    evaluation = round_.record.evaluation
    return 0.0 if evaluation is None else evaluation.seconds


def _tried(
    job: Job,
    name: str,
    logs: Sequence[RoundLog],
    timed: TimedRounds | None,
    shown: str,
    rounds: int,
) -> PolicyTrial:
    """The trials of a policy, and what it would reach if it went on.

    All of it follows from the policy's own trials: what a round of a regime does after the rounds
    of another policy is another thing, and who else is compared changes no forecast.

    Args:
        job: that is planned.
        name: of the policy.
        logs: of its trials.
        timed: federated rounds of the job; None if none were timed.
        shown: the metric.
        rounds: most of each trial.
    """
    points = [_points(log, shown) for log in logs]
    if not any(points):
        why = f"no round of its trials has a finite {shown}"
        if not any(log.rounds for log in logs):
            why = "the job's limits end it before its first round"
        return PolicyTrial(policy=name, seeds=points, note=f"no forecast: {why}")
    facts = _with_timed(facts_of(logs, shown), timed, logs)
    if all(len(log.rounds) < rounds or len(log.rounds) >= job.rounds for log in logs):
        return _whole(job, name, logs, facts, shown)
    curves = curves_of(logs, shown)
    return _forecast(job, name, logs, facts, curves, shown, rounds)


def _whole(
    job: Job, name: str, logs: Sequence[RoundLog], facts: RoundFacts, shown: str
) -> PolicyTrial:
    """Trials that are whole runs: with all rounds of the job, or ended by its limits.

    What they reached is what the job reaches with their seeds: there is nothing to forecast.
    """
    values = [value for log in logs if (value := log.delivered(shown)) is not None]
    rounds = [len(log.rounds) for log in logs]
    prices = [log.spent for log in logs]
    runs = [
        ([each.kind for each in log.rounds], sum(facts.seconds[each.kind] for each in log.rounds))
        for log in logs
    ]
    found = Alternative(
        policy=name,
        reached=Interval(min(values), statistics.median(values), max(values)),
        rounds=(min(rounds), max(rounds)),
        price=(min(prices), max(prices)),
    )
    found = with_times(found, job, facts, runs)
    return PolicyTrial(
        policy=name,
        seeds=[_points(log, shown) for log in logs],
        forecast=_known_times(job, logs, found),
        to_the_end=True,
    )


def _forecast(
    job: Job,
    name: str,
    logs: Sequence[RoundLog],
    facts: RoundFacts,
    curves: Mapping[str, LearningCurves],
    shown: str,
    rounds: int,
) -> PolicyTrial:
    """What a policy would reach if it went on, by what its trials say of rounds."""
    points = [_points(log, shown) for log in logs]
    found = alternative(job, name, facts, curves, shown)
    thin = _too_few(logs, shown, rounds)
    # One that cannot be followed goes on with rounds like its last ones, if these are alike.
    if thin and rounds < job.rounds and not (found.reached is None and _ends_alike(logs[0])):
        return PolicyTrial(policy=name, seeds=points, note=thin)
    if found.reached is not None and found.rounds[1] <= min(len(log.rounds) for log in logs):
        return _whole(job, name, logs, facts, shown)  # the job's limits end it there
    note = ""
    is_learnt = set(logs[0].kinds) <= set(curves[shown].kinds)
    if found.reached is None and logs[0].rounds and is_learnt:
        last = logs[0].rounds[-1].kind
        count = facts.evaluated.get(last, 0)
        if count < LEAST_EVALUATED and len(logs[0].rounds) < job.rounds:
            note = (
                f"{found.unknown}; and its last rounds, {last} ones, cannot be continued by "
                f"forecasts: {count} of the trials were evaluated, and {LEAST_EVALUATED} are needed"
            )
            return PolicyTrial(policy=name, seeds=points, forecast=found, note=note)
        note = f"{found.unknown}; so its forecast goes on with rounds like its last ones"
        found = _as_before(job, name, logs[0], curves[shown], facts, shown)
    found = _as_often_right(found, logs, curves[shown])
    return PolicyTrial(
        policy=name,
        seeds=points,
        forecast=_known_times(job, logs, _at_least(job, found, points, shown)),
        note=note,
    )


def _as_often_right(
    found: Alternative, logs: Sequence[RoundLog], curve: LearningCurves
) -> Alternative:
    """A forecast with a longer interval, if the regimes of the trials mix."""
    if found.reached is None or all(len(log.kinds) < 2 for log in logs):
        return found
    return dataclasses.replace(found, reached=curve.widened(found.reached, MIXED))


def _at_least(
    job: Job, found: Alternative, points: Sequence[Sequence[TrialPoint]], shown: str
) -> Alternative:
    """A forecast that is not worse than what the trials of all seeds had, if a run keeps that."""
    mode = kept_mode(job, shown)
    if mode is None or found.reached is None:
        return found
    best, worst = (max, min) if mode == "max" else (min, max)
    had = worst(best(point.value for point in seed) for seed in points if seed)
    of = found.reached
    reached = Interval(best(of.low, had), best(of.median, had), best(of.high, had))
    return dataclasses.replace(found, reached=reached)


def _known_times(job: Job, logs: Sequence[RoundLog], found: Alternative) -> Alternative:
    """A forecast without a duration, if that of one of its regimes is not known."""
    regimes = {each.plan.regime for log in logs for each in log.rounds}
    if untimed_side(job, regimes):
        return dataclasses.replace(found, seconds=None, middle_seconds=None)
    return found


def _too_few(logs: Sequence[RoundLog], shown: str, rounds: int) -> str:
    """Why trials in which regimes mix are too short for a forecast; empty if they are not.

    What a regime does in a mixture is another thing than what it does alone, in the trials of other
    policies. Trials that ended by themselves are as long as the run.
    """
    for log in logs:
        if len(log.kinds) < 2 or len(log.rounds) < rounds:
            continue
        counts = {kind: log.evaluated(shown, kind) for kind in log.kinds}
        if min(counts.values()) < LEAST_EVALUATED:
            had = " and ".join(f"{count} {kind}" for kind, count in counts.items())
            least = LEAST_EVALUATED * len(counts) * log.job.evaluation.every
            return (
                f"no forecast: too few rounds of each regime ({had} ones were evaluated in a "
                f"trial, and {LEAST_EVALUATED} of each are needed); try --trial "
                f"{max(least, rounds + 1)} or more"
            )
    return ""


def _ends_alike(log: RoundLog) -> bool:
    """Whether the last rounds of a trial were of one regime."""
    return len({each.kind for each in log.rounds[-LEAST_EVALUATED:]}) == 1


def _points(log: RoundLog, shown: str) -> list[TrialPoint]:
    points = []
    price = 0.0
    for each in log.rounds:
        price += each.record.cost.price
        price += sum(failed.price for failed in log.failures if failed.round == each.record.round)
        value = each.record.metrics.get(shown, math.nan)
        if math.isfinite(value):
            points.append(TrialPoint(each.record.round, price, value))
    return points


def _as_before(
    job: Job, name: str, log: RoundLog, curves: LearningCurves, facts: RoundFacts, shown: str
) -> Alternative:
    """A trial that goes on with its last kind of round, to the end of the job."""
    kinds = [each.kind for each in log.rounds]
    price = log.spent
    # By their mean, as those of a policy that is followed: the same rounds take the same time.
    seconds = sum(facts.seconds[kind] for kind in kinds)
    last = kinds[-1]
    alike = [each for each in log.rounds if each.kind == last]
    price_of_round = facts.price[last]
    bytes_of_round = statistics.fmean(each.device_bytes for each in alike)
    budget = math.inf if job.budget is None else job.budget
    limit = math.inf if job.seconds is None else job.seconds
    most_bytes = math.inf if job.device_bytes is None else job.device_bytes
    moved = float(sum(each.record.cost.device_bytes for each in log.rounds))
    while len(kinds) < job.rounds and seconds < limit:
        if price + price_of_round > budget or moved + bytes_of_round > most_bytes:
            break
        kinds.append(last)
        price += price_of_round
        moved += bytes_of_round
        seconds += facts.seconds[last]
    path = curves.after(kinds)
    found = Alternative(
        policy=name,
        reached=curves.interval(delivered_of(job, shown, path), curves.doubt(kinds)),
        rounds=(len(kinds), len(kinds)),
        price=(price, price),
    )
    return with_times(found, job, facts, [(kinds, seconds)])
