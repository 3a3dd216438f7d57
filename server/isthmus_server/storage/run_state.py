"""The state of a run between rounds: everything that it needs to continue after a crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus_server.storage.records import (
    AttemptRecord,
    CommittedState,
    ComparisonRecord,
    PlannedAttempt,
    RoundRecord,
)
from isthmus_server.strategy.policy import PastRound

if TYPE_CHECKING:
    from isthmus_server.strategy.round_spec import RoundSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState(CommittedState):
    """The committed state, and what the round log has about the run so far.

    Receipts are not part of it: only the log has them.
    """

    round: int = 0
    """Last committed round; 0 if none."""
    attempts: int = 0
    """Number of the last attempt at the next round, one that a crash cut short included."""
    history: Sequence[PastRound] = ()
    """Committed rounds, oldest first."""
    paid: float = 0.0
    """Price of all ended attempts, with the comparisons of committed rounds."""
    moved: int = 0
    """Bytes to and from devices in these attempts."""
    elapsed: float = 0.0
    """Elapsed time of the run in seconds, as it was last stored."""
    cut_short: PlannedAttempt | None = None
    """The last attempt at the next round, if a crash cut its plan short."""
    comparisons: Sequence[ComparisonRecord] = ()
    """Ended comparison attempts for the next round, in order; their results are reused."""
    comparisons_ended: int = 0
    """Comparisons of the whole run that have ended, with a result or given up."""
    comparison_attempts: int = 0
    """Number of the last attempt at the next comparison, one that a crash cut short included."""

    @property
    def spent(self) -> float:
        """Price so far, failed attempts and comparisons for the next round included."""
        return sum((comparison.price for comparison in self.comparisons), self.paid)

    @property
    def device_bytes(self) -> int:
        """Bytes to and from devices so far, likewise."""
        return self.moved + sum(comparison.device_bytes for comparison in self.comparisons)

    def committed(self) -> CommittedState:
        """The part that is committed with a round."""
        names = [field.name for field in dataclasses.fields(CommittedState)]
        return CommittedState(**{name: getattr(self, name) for name in names})

    def after_comparison(self, record: ComparisonRecord) -> RunState:
        """The state after a comparison attempt has ended."""
        return dataclasses.replace(
            self,
            comparisons=[*self.comparisons, record],
            comparisons_ended=self.comparisons_ended + record.ended,
            comparison_attempts=0 if record.ended else record.attempt,
            policy_state=record.policy_state,
        )

    def after_failure(self, record: AttemptRecord) -> RunState:
        """The state after an attempt at the next round has failed."""
        return dataclasses.replace(
            self,
            attempts=record.attempt,
            paid=self.paid + record.cost.price,
            moved=self.moved + record.cost.device_bytes,
        )

    def after_round(
        self, spec: RoundSpec, record: RoundRecord, averaged: int, saved: Mapping[str, Any]
    ) -> RunState:
        """The state after a round is trained; `saved` are the fields its checkpoints change."""
        return dataclasses.replace(
            self,
            round=spec.round,
            attempts=0,
            averaged=averaged,
            **saved,
            datacenter_step=self.datacenter_step + spec.steps,
            schedule_step=self.schedule_step + spec.position.steps,
            gradient_step=self.gradient_step + spec.gradient_steps,
            holder=spec.datacenters[0] if spec.single_datacenter else None,
            model_in_datacenter=spec.model_stays,
            policy_state=dict(spec.plan.state),
            history=[*self.history, record.as_past_round()],
            paid=self.paid + record.cost.price,
            moved=self.moved + record.cost.device_bytes,
            comparisons=(),
        )
