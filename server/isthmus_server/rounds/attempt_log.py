"""Write ended attempts to the round log: committed rounds and failed attempts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.errors import RoundFailed
from isthmus_server.budgets.budget import PrivacyBudget
from isthmus_server.regimes.attempt_result import TrainingResult
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.committed_sums import CommittedSums
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.measurements.evaluation import Evaluated
from isthmus_server.storage.events import Event, RoundAttemptFailed, RoundCommitted, RoundPlanned
from isthmus_server.storage.records import (
    Cost,
    FailedAttempt,
    Participants,
    PlannedAttempt,
    Receipt,
    RoundRecord,
)
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.decision import Decision
from isthmus_server.strategy.policy import SERVED, Plan
from isthmus_server.strategy.round_spec import RoundSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptTime:
    """When an attempt began and ended."""

    started_at: float
    """Seconds since 1970-01-01 UTC, by the run's clock."""
    ended_at: float
    elapsed: float
    """Seconds that the run had lasted when the attempt ended."""


class AttemptLog:
    """Creates and stores the record of each ended attempt, and returns the run's next state."""

    def __init__(
        self,
        store: Store,
        availability: DeviceAvailability,
        sums: CommittedSums,
        publish: Callable[[Event], None],
        privacy: PrivacyBudget | None = None,
    ) -> None:
        self._store = store
        self._privacy = privacy
        self._availability = availability
        self._sums = sums
        self._publish = publish

    def plan(self, decision: Decision, spec: RoundSpec) -> PlannedAttempt:
        """Store and publish an attempt before it begins."""
        planned = PlannedAttempt(
            round=spec.round,
            attempt=spec.attempt,
            decision=decision,
            invited=sorted(spec.cohort),
            datacenters=spec.datacenters,
            draw=spec.draw,
        )
        self._store.plan(planned)
        self._publish(
            RoundPlanned(
                round=spec.round,
                attempt=spec.attempt,
                regime=spec.plan.regime,
                reason=spec.plan.reason,
                invited=len(spec.cohort) + len(spec.datacenters),
            )
        )
        return planned

    def commit(
        self,
        state: RunState,
        spec: RoundSpec,
        results: TrainingResult,
        *,
        evaluated: Evaluated,
        saved: Mapping[str, Any],
        averaged: int,
        time: AttemptTime,
    ) -> RunState:
        """Commit a round: record, state and checkpoints become visible together.

        Args:
            state: of the run before the round.
            spec: the round.
            results: of its training.
            evaluated: the evaluation of its model.
            saved: the fields of the state that the round's checkpoints change.
            averaged: models in the served average after it.
            time: of the attempt.
        """
        receipts = results.receipts
        devices = sum(receipt.regime == "federated" for receipt in receipts)
        price = self._price(devices, spec.priced_steps)
        on_devices = evaluated.on_devices
        cost = Cost.of(receipts, price, state.comparisons, on_devices)
        record = RoundRecord(
            **_common(spec.plan, spec.round, spec.attempt, receipts, time),
            epsilon=self._epsilon,
            cost=cost,
            metrics=dict(evaluated.metrics),
            evaluation=on_devices,
            # While only the datacenter has the model, nobody here has its digest.
            model_sha256=None if spec.model_stays else saved["models"][SERVED].sha256,
            comparisons=state.comparisons,
            training=results.training,
            norms=results.norms,
            noise=results.noise,
            cosine=results.cosine,
            gradients=results.gradients,
            groups=results.groups,
            profile=results.profile,
            step_figures=results.step_figures,
        )
        state = state.after_round(spec, record, averaged, saved)
        # The log first: what is in memory follows from it, and an event must not announce a round
        # that a crash would undo.
        self._store.commit(record, state.committed())
        self._availability.add(record)
        self._sums.add(record)
        self._publish(RoundCommitted(record=record))
        return state

    def fail(
        self,
        state: RunState,
        plan: Plan,
        error: RoundFailed,
        *,
        time: AttemptTime,
        given_up: bool,
    ) -> RunState:
        """Record a failed attempt at the next round; `given_up` if its plan is not tried again."""
        receipts = error.receipts if isinstance(error, AttemptFailed) else ()
        # Devices that were reached are paid for; the work of the ranks is not known.
        reached = sum(r.started for r in receipts if r.regime == "federated")
        record = FailedAttempt(
            **_common(plan, state.round + 1, state.attempts + 1, receipts, time),
            epsilon=self._epsilon,
            cost=Cost.of(receipts, self._price(reached, 0)),
            error=str(error),
            given_up=given_up,
        )
        self._store.fail(record)
        self._availability.add(record)
        self._publish(RoundAttemptFailed(record=record))
        return state.after_failure(record)

    @property
    def _epsilon(self) -> float | None:
        return None if self._privacy is None else self._privacy.spent

    def _price(self, devices: int, steps: int) -> float:
        prices = self._store.job.prices
        return devices * prices.client_update + steps * prices.datacenter_step


def _common(
    plan: Plan, round_: int, attempt: int, receipts: Sequence[Receipt], time: AttemptTime
) -> dict[str, Any]:
    """The fields that both kinds of records have."""
    return {
        "round": round_,
        "attempt": attempt,
        "regime": plan.regime,
        "reason": plan.reason,
        "started_at": time.started_at,
        "seconds": time.ended_at - time.started_at,
        "elapsed": time.elapsed,
        "participants": Participants.of(receipts),
        "receipts": receipts,
    }
