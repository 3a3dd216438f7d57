"""What the log of a run says of its rounds: their kinds, metrics, prices and times."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, Self

from isthmus.job import Job
from isthmus.task.definition import PUBLIC
from isthmus_server.storage.records import PlannedAttempt, RoundRecord
from isthmus_server.storage.store import Store
from isthmus_server.strategy.learning_curves import RunPiece
from isthmus_server.strategy.observation import best_round
from isthmus_server.strategy.policy import CURRENT, INITIAL, Comparison, Observation, Plan


def kind_of(plan: Plan, job: Job) -> str:
    """The kind of a planned round: its regime, and of a hybrid one how both sides are merged.

    Rounds of another size than the job's are kinds of their own.
    """
    merge = plan.merge or job.strategy.merge
    parts = [f"hybrid by {merge}" if plan.regime == "hybrid" else plan.regime]
    if plan.regime != "federated" and plan.datacenter_steps not in (None, job.datacenter.steps):
        parts.append(f"of {plan.datacenter_steps} steps")
    if plan.regime != "datacenter" and plan.cohort not in (None, job.federated.cohort):
        parts.append(f"of {plan.cohort} updates")
    if plan.step_scale != 1:
        parts.append(f"at {plan.step_scale:g} of the step")
    return " ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedRound:
    """A committed round with the plan that it followed."""

    planned: PlannedAttempt
    plan: Plan
    record: RoundRecord
    kind: str

    @property
    def price(self) -> float:
        """Without the comparisons that its policy asked for."""
        return self.record.cost.price - sum(each.price for each in self.record.comparisons)

    @property
    def device_bytes(self) -> int:
        """To and from all devices, without the comparisons that its policy asked for."""
        compared = sum(each.device_bytes for each in self.record.comparisons)
        return self.record.cost.device_bytes - compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedFailure:
    """An attempt that failed, at a round that is committed or not."""

    round: int
    kind: str
    """Kind of the round that was planned."""
    price: float


def usual_rounds(rounds: Sequence[LoggedRound], kind: str) -> Sequence[LoggedRound]:
    """Rounds of a kind in which no gradients were measured, and if there are none, all of it.

    A policy that has gradients measured pays for it, and others that train such rounds do not.
    """
    found = [each for each in rounds if each.kind == kind]
    return [each for each in found if not each.plan.measure_gradients] or found


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundLog:
    """The committed rounds of a run."""

    job: Job
    run_id: str
    rounds: Sequence[LoggedRound]
    failures: Sequence[LoggedFailure] = ()

    @classmethod
    def of(cls, store: Store) -> Self:
        """Read it."""
        rounds = []
        failures = []
        for logged in store.logged_attempts():
            plan = logged.planned.decision.answer
            record = logged.record
            if record is None or not isinstance(plan, Plan):
                continue
            kind = kind_of(plan, store.job)
            if isinstance(record, RoundRecord):
                rounds.append(
                    LoggedRound(planned=logged.planned, plan=plan, record=record, kind=kind)
                )
            else:
                failures.append(
                    LoggedFailure(round=record.round, kind=kind, price=record.cost.price)
                )
        return cls(job=store.job, run_id=store.run_id, rounds=rounds, failures=failures)

    @property
    def observed(self) -> Observation | None:
        """What the policy saw before the last round; None before any."""
        return self.rounds[-1].planned.decision.observation if self.rounds else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the rounds, by their first."""
        return tuple(dict.fromkeys(each.kind for each in self.rounds))

    @property
    def spent(self) -> float:
        """Price of everything, comparisons and failed attempts included."""
        committed = sum(each.record.cost.price for each in self.rounds)
        return committed + sum(each.price for each in self.failures)

    def evaluated(self, metric: str, kind: str) -> int:
        """How many rounds of a kind have a metric, and began with a model whose metric is known."""
        return sum(
            each == kind and math.isfinite(value)
            for piece in self.pieces(metric)
            for each, value in zip(piece.kinds, piece.values, strict=True)
        )

    @property
    def successions(self) -> Mapping[tuple[str, str], int]:
        """How often a round of a kind came after one of a kind, by both."""
        kinds = [each.kind for each in self.rounds]
        return Counter(itertools.pairwise(kinds))

    def pieces(self, metric: str) -> list[RunPiece]:
        """The rounds as learning curves take them: a round from a kept model begins another."""
        pieces: list[list[LoggedRound]] = []
        for each in self.rounds:
            if not pieces or each.plan.start != CURRENT:
                pieces.append([])
            pieces[-1].append(each)
        found = []
        for piece in pieces:
            kinds = [each.kind for each in piece]
            values = [each.record.metrics.get(metric, math.nan) for each in piece]
            is_first = piece is pieces[0] or piece[0].plan.start == INITIAL
            if is_first:
                found.append(RunPiece(kinds, values))
                continue
            # The value of the kept model is not in the log: the piece begins after its first one.
            known = [place for place, value in enumerate(values) if math.isfinite(value)]
            if len(known) > 1:
                first = known[0]
                found.append(RunPiece(kinds[first + 1 :], values[first + 1 :], values[first]))
        return found

    def delivered(self, metric: str) -> float | None:
        """A metric of the model that the run delivers: of its last evaluated round, or the best.

        None if no round has it.
        """
        history = [each.record.as_past_round() for each in self.rounds]
        keep = self.job.evaluation.keep_best
        if keep is not None and self.job.evaluation.deliver == "best":
            best = best_round([each for each in history if keep.name in each.metrics], keep)
            if best is not None and math.isfinite(best.metrics.get(metric, math.nan)):
                return best.metrics[metric]
        values = [each.metrics.get(metric, math.nan) for each in history]
        return next((each for each in reversed(values) if math.isfinite(each)), None)

    def comparisons(self) -> list[tuple[int, Comparison]]:
        """Comparisons of models on devices that have a result, with the round."""
        return [
            (each.record.round, comparison.result)
            for each in self.rounds
            for comparison in each.record.comparisons
            if comparison.result is not None
        ]


def kept_mode(job: Job, metric: str) -> Literal["max", "min"] | None:
    """How the delivered model is the best by a metric; None if it is not chosen by this one."""
    keep = job.evaluation.keep_best
    if keep is None or job.evaluation.deliver == "last" or keep.name != metric:
        return None
    return keep.mode


def shown_metric(job: Job, names: Sequence[str]) -> str | None:
    """The metric that is forecast: that of the target, else the first that is no loss.

    Metrics of public data come last.
    """
    if job.strategy.target_metric is not None:
        return job.strategy.target_metric.name
    ordered = sorted(names, key=lambda name: (name.startswith(PUBLIC), name.endswith("loss")))
    return ordered[0] if ordered else None
