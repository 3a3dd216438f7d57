"""Explain the decisions of a run from its round log.

A decision is logged before anything runs: what the policy observed, the comparisons it requested,
what the job's limits changed, and then the outcome of each attempt.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from isthmus.errors import UserError
from isthmus_server.read.report.privacy.device_examples import PromisedToExamples
from isthmus_server.storage.events import RunStopped
from isthmus_server.storage.records import (
    EndedAttempt,
    LoggedAttempt,
    Record,
    RoundRecord,
)
from isthmus_server.storage.store import Store
from isthmus_server.strategy.decision import Decision
from isthmus_server.strategy.gradients import GradientMeasurement, GroupSum
from isthmus_server.strategy.policy import Kind

RECENT = 5
"""Committed rounds before a decision that are shown with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecentRound(Record):
    """A committed round before a decision."""

    round: int
    regime: Kind
    metrics: Mapping[str, float]
    price: float
    norms: Mapping[str, float]
    cosine: float | None
    gradients: GradientMeasurement | None
    groups: Mapping[str, GroupSum]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedDecision(Record):
    """The decision on one round, and the attempts that followed."""

    round: int
    decision: Decision
    """The plan or the stop, the observation, requested comparisons, waits and adjustments."""
    stop: str | None
    """Why the run ended instead of the round; None if the round was planned."""
    recent: Sequence[RecentRound]
    """The last committed rounds before it, oldest first."""
    regimes: Mapping[str, int]
    """Committed rounds before it, by regime."""
    invited: Sequence[str]
    """Names of the devices that the last attempt invited."""
    datacenters: Sequence[str]
    """Names of the datacenters in it."""
    attempts: Sequence[EndedAttempt]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation(Record):
    """The decisions of a run. Programs may rely on the keys of its JSON document."""

    run_id: str
    policy: str
    """Name of the job's policy."""
    rounds: int
    """The job's limit."""
    status: str
    reason: str
    """Why the run has ended; empty while it runs."""
    decisions: Sequence[ExplainedDecision]
    device_examples_privacy: PromisedToExamples | None = None
    """None without `[federated.privacy]`."""


def explain(store: Store, round_: int | None = None) -> Explanation:
    """Read the decisions of a run, or the one on a round, from its log.

    Raises:
        UserError: no such round was decided on.
    """
    status, reason, _ = store.status()
    decisions = list(_decisions(store))
    if round_ is not None:
        known = [decision.round for decision in decisions]
        decisions = [decision for decision in decisions if decision.round == round_]
        if not decisions:
            last = f"the last decided round is {known[-1]}" if known else "no round is decided yet"
            raise UserError(f"the run has no decision on round {round_}; {last}")
    return Explanation(
        run_id=store.run_id,
        policy=store.job.strategy.policy,
        rounds=store.job.rounds,
        status=status,
        reason=reason,
        decisions=decisions,
        device_examples_privacy=PromisedToExamples.of(store.job),
    )


def explained_attempts(
    round_: int, logged: Sequence[LoggedAttempt], recent: Sequence[RoundRecord], kinds: Counter[str]
) -> ExplainedDecision:
    """The decision on one round that was planned.

    Args:
        round_: the round.
        logged: all attempts at it; at least one.
        recent: at least the last `RECENT` rounds that were committed before it.
        kinds: all rounds that were committed before it, by regime.
    """
    planned = logged[-1].planned
    return ExplainedDecision(
        round=round_,
        decision=planned.decision,
        stop=None,
        recent=_recent(recent),
        regimes=dict(kinds),
        invited=planned.invited,
        datacenters=planned.datacenters,
        attempts=[each.record for each in logged if each.record is not None],
    )


def _decisions(store: Store) -> Iterator[ExplainedDecision]:
    """All decisions, oldest first; a round that was tried several times was decided on once."""
    by_round: dict[int, list[LoggedAttempt]] = {}
    for logged in store.logged_attempts():
        by_round.setdefault(logged.planned.round, []).append(logged)
    committed: list[RoundRecord] = []
    for round_, logged_attempts in by_round.items():
        explained = explained_attempts(
            round_, logged_attempts, committed, Counter(_regimes(committed))
        )
        yield explained
        committed += [each for each in explained.attempts if isinstance(each, RoundRecord)]
    stops = [event for event in store.events() if isinstance(event, RunStopped)]
    if stops:
        yield ExplainedDecision(
            round=stops[-1].round,
            decision=stops[-1].decision,
            stop=stops[-1].reason,
            recent=_recent(committed),
            regimes=_regimes(committed),
            invited=(),
            datacenters=(),
            attempts=(),
        )


def _recent(committed: Sequence[RoundRecord]) -> list[RecentRound]:
    return [
        RecentRound(
            round=record.round,
            regime=record.regime,
            metrics=record.metrics,
            price=record.cost.price,
            norms=record.norms,
            cosine=record.cosine,
            gradients=record.gradients,
            groups=record.groups,
        )
        for record in committed[-RECENT:]
    ]


def _regimes(committed: Sequence[RoundRecord]) -> dict[str, int]:
    return dict(Counter(record.regime for record in committed))
