"""What a plan comes to with those who are here: whom to ask, for what, and what is handed back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from isthmus.federated import FederatedSection
from isthmus.job import Job
from isthmus.uplink import SCORES_AND_GRADIENTS
from isthmus_server.cohorts import Cohorts
from isthmus_server.resume import Resume
from isthmus_server.roster import Roster
from isthmus_server.strategy.policy import CURRENT, Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
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


def work_of(
    job: Job,
    at: Resume,
    roster: Roster,
    cohorts: Cohorts,
    busy: Collection[str],
    plan: Plan,
    attempt: int,
) -> Work:
    """The next round's work; the same in every attempt if the same participants are ready.

    Args:
        job: what is run.
        at: where it stands.
        roster: who is here.
        cohorts: whom of them to invite.
        busy: devices that are at work for a buffer already.
        plan: of the round.
        attempt: at it.
    """
    round_ = at.round + 1
    alone = plan.regime == "datacenter"
    ranks = sorted(roster.datacenters) if plan.regime != "federated" else []
    federated = job.federated
    if plan.cohort is not None and not alone:
        federated = federated.for_cohort(plan.cohort)
    one = alone and len(ranks) == 1
    transfers = plan.regime == "hybrid" and (plan.merge or job.strategy.merge) == "transfer"
    if transfers:  # others would not know what comes behind the model
        busy = {*busy, *roster.able()} - set(roster.speaking(SCORES_AND_GRADIENTS))
    averages = job.strategy.served_average > 0
    return Work(
        plan=plan,
        round=round_,
        attempt=attempt,
        cohort={} if alone else cohorts.invite(round_, federated, busy),
        federated=federated,
        datacenters=ranks,
        from_step=at.datacenter_step,
        steps=(plan.datacenter_steps or job.datacenter.steps) if ranks else 0,
        model_is_there=plan.start == CURRENT and ranks == [at.holder],
        evaluate=one and not averages and evaluates(job, round_),
        hand_back=not one or averages or any(plan.keep.values()),
        transfers=transfers,
        gradient_step=at.gradient_step,
    )


def evaluates(job: Job, round_: int) -> bool:
    """Whether a round's model is evaluated on the central held-out data."""
    return round_ % job.evaluation.every == 0 or round_ == job.rounds
