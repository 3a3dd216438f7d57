"""A policy decides round after round on metrics that learning curves forecast.

The policy, its observation and the job's limits are those of a run; only what a round does to the
metrics is a forecast. So a policy that asks for what only devices can answer cannot be followed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from isthmus.errors import JobError
from isthmus.job import Job, with_changes
from isthmus_server.plan.round_log import kept_mode, kind_of
from isthmus_server.plan.seconds_of_rounds import SecondsOfRounds, run_of
from isthmus_server.strategy.answer_checks import checked_answer
from isthmus_server.strategy.forecast import planned_price
from isthmus_server.strategy.learning_curves import (
    LEAST_EVALUATED,
    Interval,
    LearningCurves,
    Values,
)
from isthmus_server.strategy.limits import LimitRefusal, enforce_limits
from isthmus_server.strategy.loading import load_policy
from isthmus_server.strategy.observation import observe
from isthmus_server.strategy.policies import BUILT_IN
from isthmus_server.strategy.policies.adaptive import Adaptive
from isthmus_server.strategy.policy import (
    CURRENT,
    Compare,
    PastRound,
    Plan,
    Policy,
    Stop,
    Wait,
)
from isthmus_server.strategy.round_spec import evaluates

FOLLOWED = 24
"""Members of the sample for which a policy that follows metrics is replayed."""
MOST_WAITS = 1000
"""Most waits before one round."""


class CannotBeKnown(Exception):
    """What a policy would have done, or reached, does not follow from the log; with the reason."""

    def __init__(self, reason: str, missing: str = "") -> None:
        """`missing`: rounds that the run would need for it, a clause; empty for none that help."""
        super().__init__(reason)
        self.missing = missing


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """What rounds of each kind take, and who takes part."""

    price: Mapping[str, float]
    """By kind of round, in the job's unit, with the mean of attempts that fail."""
    seconds: Mapping[str, float]
    """Mean by kind of round."""
    device_bytes: Mapping[str, float]
    """To and from all devices, by kind of round."""
    evaluated: Mapping[str, int]
    """By kind, how many rounds a forecast rests on."""
    successions: Mapping[tuple[str, str], int]
    """How often a round of a kind came after one of a kind, by both."""
    devices: int
    """Devices that may be invited."""
    datacenters: Sequence[str]
    model_bytes: int
    bytes_each: int
    """Most bytes of one device in a round."""
    began: float
    """Start of the run, in Unix seconds."""
    times: Mapping[str, SecondsOfRounds] = dataclasses.field(default_factory=dict)
    """How long rounds of each kind took, by which runs differ; empty if only `seconds` are asked
    for."""

    def took(
        self,
        kinds: Sequence[str],
        seconds: float,
        limit: float | None = None,
        *,
        is_cut: bool = False,
    ) -> Interval:
        """How long a run takes.

        Args:
            kinds: of its rounds.
            seconds: that it takes with the mean of each kind, and with its waits.
            limit: of its job, in seconds, after which no round begins; None for none.
            is_cut: whether it has fewer rounds than its job since they reach the limit.
        """
        counts = Counter(kinds)
        found = None
        if self.times:
            found = run_of([(self.times[kind], count) for kind, count in counts.items()])
        if found is None:
            return Interval(seconds, seconds, seconds)
        waits = seconds - sum(self.seconds[kind] * count for kind, count in counts.items())
        low, middle, high = (
            max(0.0, waits + each) for each in (found.low, found.median, found.high)
        )
        if limit is None:
            return Interval(low, middle, high)
        # A run of slower rounds has fewer of them, and one of faster rounds more: the last one
        # begins before the limit.
        longest = max(max(self.times[kind].seconds) for kind in counts)
        if is_cut:
            low = limit
            middle = min(max(middle, limit), limit + longest)
        return Interval(low, middle, max(min(high, limit + longest), middle))

    def check(self, kind: str, before: str | None) -> None:
        """Refuse a round that nothing is known of.

        What a round does depends on those before it by more than the metric, so that rounds in
        turn say nothing of rounds in a row.

        Args:
            kind: of the round.
            before: kind of the round before it; None for the first.

        Raises:
            CannotBeKnown: too few rounds of the kind were evaluated, or came after such a round.
        """
        count = self.evaluated.get(kind, 0)
        # Of rounds in a row, the first follows none.
        more = f"at least {LEAST_EVALUATED + 1} {kind} rounds"
        if not count:
            raise CannotBeKnown(
                f"it trains {kind} rounds, and none was trained and evaluated", more
            )
        if count < LEAST_EVALUATED:
            raise CannotBeKnown(
                f"it trains {kind} rounds, and {count} evaluated of them are too few; a forecast "
                f"needs {LEAST_EVALUATED}",
                more,
            )
        least = LEAST_EVALUATED if kind == before else 1
        if before is not None and self.successions.get((before, kind), 0) < least:
            often = "seldom" if (before, kind) in self.successions else "never"
            turns = f"{kind} rounds right after {before} ones"
            raise CannotBeKnown(
                f"its {kind} rounds follow {before} ones, which {often} came so",
                f"{more} in a row" if kind == before else turns,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a policy did in one replay."""

    kinds: Sequence[str]
    """Kind of each round."""
    price: float
    seconds: float
    ended: str
    """Why it ended; empty for the job's rounds."""


def with_policy(job: Job, name: str) -> Job:
    """The job under another policy, with that one's usual settings.

    Raises:
        UserError: the job cannot have the policy.
    """
    if name == job.strategy.policy:
        return job
    if name == "schedule" and not job.strategy.schedule:
        raise JobError("there are no phases to follow: the job has no strategy.schedule")
    changes: dict[str, object] = {"strategy.policy": name, "strategy.settings": {}}
    return with_changes(job, changes)


def replays(
    job: Job, facts: RoundFacts, curves: Mapping[str, LearningCurves], shown: str
) -> tuple[list[Replayed], Values, Values]:
    """Follow a job's policy to the end of the job.

    Args:
        job: with the policy.
        facts: of its rounds.
        curves: of each metric that is known; samples of the same size.
        shown: the metric that is asked for.

    Returns:
        What it did, once or for some members of the sample; the metric of the delivered model by
        member; and its doubt, see `LearningCurves.doubt`.

    Raises:
        CannotBeKnown: with the reason.
        UserError: the job cannot have the policy.
    """
    name = job.strategy.policy
    if name not in BUILT_IN:
        raise CannotBeKnown(f"{name} is no policy of Isthmus, and may decide by anything")
    policy = load_policy(job.strategy)
    if isinstance(policy, Adaptive):
        raise CannotBeKnown(
            "it decides by comparisons, gradients and losses of its own models, which only a run "
            "has"
        )
    size = len(curves[shown])
    is_blind = not hasattr(policy, "metric") and not _ends_by_metric(job)
    stride = size if is_blind else max(1, size // FOLLOWED)
    done = []
    ends = []
    doubt = []
    for member in range(0, size, stride):
        replay = _replayed(job, policy, facts, curves, member)
        done.append(replay)
        # Members up to the next one that is followed do the same.
        alike = slice(member, member + stride)
        ends.append(delivered_of(job, shown, curves[shown].after(replay.kinds)[alike]))
        doubt.append(curves[shown].doubt(replay.kinds)[alike])
    return done, np.concatenate(ends), np.concatenate(doubt)


def delivered_of(job: Job, shown: str, path: Values) -> Values:
    """The metric of the model that a run delivers: the last one, or the best.

    Args:
        job: of the run.
        shown: the metric.
        path: it after each round; one row for each member of a sample.
    """
    mode = kept_mode(job, shown)
    if mode is None:
        return path[:, -1]
    found: Values = path.max(axis=1) if mode == "max" else path.min(axis=1)
    return found


def _ends_by_metric(job: Job) -> bool:
    return job.strategy.target_metric is not None or job.evaluation.patience is not None


def _replayed(
    job: Job,
    policy: Policy,
    facts: RoundFacts,
    curves: Mapping[str, LearningCurves],
    member: int,
) -> Replayed:
    """Decide until the job ends.

    Raises:
        CannotBeKnown: the policy asks for what is not known, or trains nothing.
    """
    history: list[PastRound] = []
    kinds: list[str] = []
    followed = {name: curve.followed(member) for name, curve in curves.items()}
    state: Mapping[str, object] = {}
    spent = 0.0
    device_bytes = 0.0
    elapsed = 0.0
    ended = ""
    waits = 0
    while len(history) < job.rounds:
        observation = observe(
            job,
            history,
            spent=spent,
            device_bytes=math.ceil(device_bytes),
            state=state,
            clients_ready=facts.devices,
            datacenters=facts.datacenters,
            model_bytes=facts.model_bytes,
            now=facts.began + elapsed,
            elapsed=elapsed,
        )
        answer = enforce_limits(
            checked_answer(policy, job.strategy.policy, observation), observation
        ).answer
        if isinstance(answer, Stop):
            ended = answer.reason
            break
        if isinstance(answer, Wait):
            waits += 1
            elapsed += answer.seconds
            if waits > MOST_WAITS:
                raise CannotBeKnown(f"it waits {MOST_WAITS} times for a round")
            continue
        if isinstance(answer, Compare | LimitRefusal):
            raise CannotBeKnown(
                "it has devices compare models, and how these score only a run can say"
            )
        _check_plan(answer)
        waits = 0
        kind = kind_of(answer, job)
        facts.check(kind, kinds[-1] if kinds else None)
        values = {name: each.next(kind) for name, each in followed.items()}
        is_evaluated = evaluates(job, observation.round)
        price = facts.price.get(kind, planned_price(answer, observation))
        spent += price
        device_bytes += facts.device_bytes[kind]
        elapsed += facts.seconds[kind]
        state = answer.state
        kinds.append(kind)
        history.append(
            PastRound(
                round=observation.round,
                regime=answer.regime,
                metrics=dict(values) if is_evaluated else {},
                seconds=facts.seconds[kind],
                price=price,
                accepted=observation.cohort,
                bytes_each=facts.bytes_each,
                elapsed=elapsed,
            )
        )
    if not kinds:
        raise CannotBeKnown(f"it trains nothing: {ended}")
    return Replayed(kinds=kinds, price=spent, seconds=elapsed, ended=ended)


def _check_plan(plan: Plan) -> None:
    """Refuse a plan whose effect learning curves do not have.

    Raises:
        CannotBeKnown: with the reason.
    """
    if plan.measure_gradients:
        raise CannotBeKnown(
            "it decides by gradients that are measured at its own models, which only a run can do"
        )
    if plan.start != CURRENT or plan.by_group or plan.datacenter_weights:
        raise CannotBeKnown(
            "it goes back to earlier models, or weights groups or datacenters by itself"
        )
