"""Where a run stands, and how what ends moves it on: what a crash must not forget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus_server.storage.checkpoints import Saved
from isthmus_server.strategy.observation import past_round
from isthmus_server.strategy.policy import PastRound

if TYPE_CHECKING:
    from isthmus_server.strategy.round_spec import RoundSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands after its last committed round.

    Receipts are not in it: they are in the log, and there alone.
    """

    round: int
    """Last committed round; 0 if none."""
    attempts: int
    """Number of the last attempt at the next round, one that a crash cut short included."""
    models: Mapping[str, Saved]
    """Checkpoints by name: `current`, `served` where it is another, and those that plans kept."""
    averaged: int
    """Models in the served average."""
    optimizer: Saved | None
    optimizer_numbers: Mapping[str, Any]
    datacenter_step: int
    """Optimizer steps the datacenter has made in committed rounds."""
    gradient_step: int
    """Steps whose batches have gone into gradients that devices took along."""
    holder: str | None
    """The datacenter that holds the committed model at that step, if one does."""
    model_in_datacenter: bool
    """Only that one holds it: the checkpoint of `current` is of an earlier round."""
    policy_state: Mapping[str, Any]
    history: Sequence[PastRound]
    """What each committed round came to, in order."""
    paid: float
    """Cost of all attempts that ended, with the visits made for those that were committed."""
    moved: int
    """Bytes to and from devices in them."""
    elapsed: float
    """Seconds that the run went on for, up to when that was last written down."""
    decided: Mapping[str, Any] | None
    """The `plan` and `observation` of the next round, if a crash cut it short."""
    visits: Sequence[Mapping[str, Any]]
    """Tries at visits for the next round, in order; what they gave is not asked for again."""
    visited: int
    """Visits of the whole run that have ended, with a result or given up."""
    visit_attempts: int
    """Number of the last try at the next visit, one that a crash cut short included."""

    @property
    def spent(self) -> float:
        """Cost so far, failed attempts and visits for the next round included."""
        return sum((visit["price"] for visit in self.visits), self.paid)

    @property
    def device_bytes(self) -> int:
        """Bytes to and from devices so far, likewise."""
        return self.moved + sum(int(visit["device_bytes"]) for visit in self.visits)

    def to_json(self) -> dict[str, Any]:
        """What a commit has to remember beside its round's row."""
        return {
            "models": {name: dataclasses.asdict(saved) for name, saved in self.models.items()},
            "averaged": self.averaged,
            "optimizer": None if self.optimizer is None else dataclasses.asdict(self.optimizer),
            "optimizer_numbers": dict(self.optimizer_numbers),
            "datacenter_step": self.datacenter_step,
            "gradient_step": self.gradient_step,
            "holder": self.holder,
            "model_in_datacenter": self.model_in_datacenter,
            "policy_state": dict(self.policy_state),
        }

    def after_visit(self, row: Mapping[str, Any]) -> RunState:
        """A try at a visit has ended; `row` is the log's."""
        return dataclasses.replace(
            self,
            visits=[*self.visits, row],
            visited=self.visited + row["over"],
            visit_attempts=0 if row["over"] else row["attempt"],
            policy_state=row["policy_state"],
        )

    def after_failure(self, row: Mapping[str, Any]) -> RunState:
        """An attempt has failed; `row` is the log's."""
        return dataclasses.replace(
            self,
            attempts=row["attempt"],
            paid=self.paid + row["cost"]["price"],
            moved=self.moved + row["cost"]["device_bytes"],
        )

    def after_round(
        self, work: RoundSpec, row: Mapping[str, Any], averaged: int, saved: Mapping[str, Any]
    ) -> RunState:
        """A round is done; `row` is the log's, `saved` what its checkpoints change here."""
        return dataclasses.replace(
            self,
            round=work.round,
            attempts=0,
            averaged=averaged,
            **saved,
            datacenter_step=self.datacenter_step + (0 if work.transfers else work.steps),
            gradient_step=self.gradient_step + (work.steps if work.transfers else 0),
            holder=work.datacenters[0] if work.single_datacenter else None,
            model_in_datacenter=work.model_stays,
            policy_state=dict(work.plan.state),
            history=[*self.history, past_round(row)],
            paid=self.paid + row["cost"]["price"],
            moved=self.moved + row["cost"]["device_bytes"],
            visits=[],
        )
