"""What an aggregation rule is: it gets the updates of a round one by one, and returns one of them.

A package provides a rule by an entry point of the group `isthmus.aggregation_rules`: a name, which
jobs write in `federated.aggregation`, and a class that is called with the job's `[federated]`. The
class checks `federated.aggregation_settings`, and raises `UserError` if they cannot be used.

Shape legend: N = float32 elements of the exchange set, n = updates of a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

RULES = "isthmus.aggregation_rules"
"""Entry-point group of aggregation rules."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleUpdate:
    """The update of one device, which its round has accepted."""

    device: str
    """Name of the device."""
    examples: int
    """Weight of the update: the number of the device's examples, or 1 if these are protected."""
    vector: torch.Tensor
    """Start minus end of its training, float32 (N); finite. The rule may keep and change it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AggregatedRound:
    """What a rule is told of an attempt at a round before its first update."""

    round: int
    """Number of the round, from 1."""
    size: int
    """N: elements of an update."""
    cohort: Mapping[str, int]
    """The invited devices, with the number of examples that each declared."""
    quorum: int
    """Fewest updates with which the round is committed."""
    max_updates: int
    """Most updates that the round accepts."""


class RoundAggregation(Protocol):
    """The aggregation of one attempt at a round; it ends with `result`, or is dropped."""

    def add(self, update: SingleUpdate) -> None:
        """Take an update; called by one thread at a time, and not in the event loop's.

        Updates come in the order of the cohort if the rule needs all of them, and otherwise in that
        of their arrival, on which the result should not depend.
        """
        ...

    def result(self) -> torch.Tensor:
        """The pseudo-gradient, float32 (N), of at least a quorum of updates."""
        ...


class AggregationRule(Protocol):
    """Turns the updates of each round into a pseudo-gradient."""

    needs_all: bool
    """Whether it needs all updates of a round at once, so that the server's memory has cohort x
    model; `federated.aggregation_max_bytes` is checked for such a rule. Others use each update when
    it arrives, and keep a number of vectors that does not grow with the cohort."""

    def begin(self, facts: AggregatedRound) -> RoundAggregation:
        """Begin an attempt at a round.

        Raises:
            RoundFailed: a round of so many devices cannot be aggregated.
        """
        ...


@runtime_checkable
class RuleWithState(Protocol):
    """What an `AggregationRule` has besides if it keeps something from round to round.

    Its `RoundAggregation` has the attribute `state`, which is read after `result`. The state
    becomes current when the round is committed, or not at all.
    """

    def commit(self, state: Any) -> None:
        """Make the state of an attempt the current one.

        A round that fails afterwards is undone by `reset`, and by `import_state` of what was
        exported with the last committed round.
        """
        ...

    def reset(self) -> None:
        """Return to the state before the first round; a plan may ask for it."""
        ...

    def export_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The current state as float32 tensors and JSON values, stored with a checkpoint."""
        ...

    def import_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `export_state` returned."""
        ...
