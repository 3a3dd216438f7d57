"""What a regime comes to: a result, or a failed attempt with what became of everyone in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from isthmus.errors import RoundFailed
from isthmus_server.storage.receipts import Receipt

if TYPE_CHECKING:
    from isthmus_server.flower.state import State


class AttemptFailed(RoundFailed):
    """An attempt that came to nothing, with what became of everyone in it."""

    def __init__(self, reason: str, receipts: Sequence[Receipt]) -> None:
        super().__init__(reason)
        self.receipts = receipts


@dataclasses.dataclass(frozen=True, kw_only=True)
class FederatedResult:
    """What a cohort came to."""

    pseudo_gradient: torch.Tensor
    """Weighted mean of start minus end, or what a Flower strategy made of them, float32 (N)."""
    training: Mapping[str, float]
    """Weighted means of the devices' own figures: loss."""
    receipts: Sequence[Receipt]
    strategy_state: State | None = None
    """What a Flower strategy remembers after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatacenterResult:
    """What the ranks came to."""

    vector: torch.Tensor | None
    """The model at the new step, float32 (N), if it was asked for; or the mean gradient."""
    training: Mapping[str, float]
    evaluation: Mapping[str, float]
    profile: Mapping[str, float]
    """Rates and memory of the ranks; no two runs have the same."""
    receipts: Sequence[Receipt]

    @property
    def examples(self) -> int:
        """What its vector weighs."""
        return sum(receipt.examples for receipt in self.receipts)
