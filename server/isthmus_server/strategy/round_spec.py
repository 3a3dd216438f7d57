"""The work of a round: whom to ask, for what, and what is handed back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus_server.strategy.policy import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSpec:
    """What is to be done, as it follows from a plan."""

    plan: Plan
    round: int
    attempt: int
    cohort: Mapping[str, int]
    """Devices, with the examples they declared; none in a datacenter round."""
    federated: FederatedSection
    """The job's, with the cohort's size and quorum of this round."""
    datacenters: Sequence[str]
    """None in a federated round."""
    from_step: int
    """Steps that the datacenters have made before it."""
    steps: int
    """To be made; 0 without a datacenter."""
    model_is_there: bool
    """The datacenter holds the model at `from_step`."""
    evaluate: bool
    """It evaluates where it is trained."""
    hand_back: bool
    """Datacenters send what they made."""
    transfers: bool = False
    """Datacenters give their gradient, which devices add to theirs, and train nothing."""
    gradient_step: int = 0
    """Steps whose batches have gone into such gradients before it."""

    @property
    def alone(self) -> bool:
        """One datacenter trains and nobody else: what it makes is the next model."""
        return self.plan.regime == "datacenter" and len(self.datacenters) == 1

    @property
    def away(self) -> bool:
        """The next model stays where it is made."""
        return self.alone and not self.hand_back

    def to_json(self) -> dict[str, Any]:
        """What the log has of it before it is done."""
        asked = {"invited": sorted(self.cohort), "datacenters": list(self.datacenters)}
        return {**dataclasses.asdict(self.plan), **asked}


def evaluates(job: Job, round_: int) -> bool:
    """Whether a round's model is evaluated on the central held-out data."""
    return round_ % job.evaluation.every == 0 or round_ == job.rounds
