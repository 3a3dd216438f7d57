"""Specification of one round: invited devices, datacenters, steps and returned results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.job.learning_rate import FIRST_POSITION, RoundPosition
from isthmus_server.strategy.gradients import GradientMeasurement
from isthmus_server.strategy.policy import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSpec:
    """A plan resolved to concrete participants and amounts of work."""

    plan: Plan
    round: int
    attempt: int
    cohort: Mapping[str, int]
    """Invited devices, with the examples they declared; empty in a datacenter round."""
    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Devices of each group that is summed by itself, and of the rest; empty for one sum."""
    draw: int = 0
    """Draw of the lottery in which the devices were selected; 0 without one."""
    selected_ppm: int = 1_000_000
    """Millionths of all enrolled devices that were eligible in it."""
    shortage: str = ""
    """Why the lottery or the job's selection left too few devices, if so."""
    federated: FederatedSection
    """The job's section, with the cohort size and quorum of this round."""
    datacenters: Sequence[str]
    """Participating datacenters; empty in a federated round."""
    from_step: int
    """Steps that the datacenters have made before this round."""
    steps: int
    """Steps to train in this round; 0 if no datacenter trains."""
    datacenter_has_model: bool
    """Whether the datacenter already holds the model at `from_step`."""
    evaluate: bool
    """Whether the datacenter evaluates the model it trained."""
    hand_back: bool
    """Whether datacenters return their model."""
    exact: bool = False
    """Whether the cohort's secure sum must be that of all its devices."""
    transfers: bool = False
    """Whether datacenters only provide a gradient that devices add to theirs, without training."""
    gradient_sources: Sequence[str] = ()
    """Datacenters that provide their mean gradient at the round's model, for the devices to add,
    to be measured, or both."""
    gradient_steps: int = 0
    """Steps whose batches go into each of these gradients."""
    gradient_step: int = 0
    """Steps whose batches have gone into such gradients before this round."""
    position: RoundPosition = FIRST_POSITION
    """Position of the round in the schedules of the learning rate."""
    last_gradients: GradientMeasurement | None = None
    """The last measurement of the run, from which the scale of the next one follows."""

    @property
    def priced_steps(self) -> int:
        """Steps of all datacenters that are paid for."""
        training = self.steps * len(self.datacenters)
        return training + self.gradient_steps * len(self.gradient_sources)

    @property
    def single_datacenter(self) -> bool:
        """Whether one datacenter trains without devices: its result is the next model."""
        return self.plan.regime == "datacenter" and len(self.datacenters) == 1

    @property
    def compressed(self) -> bool:
        """Whether datacenters send compressed updates, in a job with `datacenter.compression`."""
        return self.plan.regime == "datacenter" and len(self.datacenters) > 1

    @property
    def model_stays(self) -> bool:
        """Whether the next model stays in the datacenter that trained it."""
        return self.single_datacenter and not self.hand_back


def evaluates(job: Job, round_: int) -> bool:
    """Return whether a round's model is evaluated on the central held-out data."""
    return round_ % job.evaluation.every == 0 or round_ == job.rounds


def evaluations_after(job: Job, round_: int) -> int:
    """Return how many evaluations on devices follow that of a round, if all rounds are made."""
    if not job.evaluation.devices or round_ >= job.rounds:
        return 0
    return -(-job.rounds // job.evaluation.every) - round_ // job.evaluation.every
