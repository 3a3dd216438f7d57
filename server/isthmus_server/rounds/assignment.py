"""Whom to ask for what: a plan, as it comes to with those who are here."""

from __future__ import annotations

from collections.abc import Collection

from isthmus.job import Job
from isthmus_server.rounds.cohort_selection import Cohorts
from isthmus_server.rounds.roster import Roster
from isthmus_server.storage.run_state import RunState
from isthmus_server.strategy.policy import CURRENT, Plan
from isthmus_server.strategy.round_spec import RoundSpec, evaluates


def resolve_plan(
    job: Job,
    at: RunState,
    roster: Roster,
    cohorts: Cohorts,
    busy: Collection[str],
    plan: Plan,
    attempt: int,
) -> RoundSpec:
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
    averages = job.strategy.served_average > 0
    return RoundSpec(
        plan=plan,
        round=round_,
        attempt=attempt,
        cohort={} if alone else cohorts.invite(round_, federated, busy),
        federated=federated,
        datacenters=ranks,
        from_step=at.datacenter_step,
        steps=(plan.datacenter_steps or job.datacenter.steps) if ranks else 0,
        datacenter_has_model=plan.start == CURRENT and ranks == [at.holder],
        evaluate=one and not averages and evaluates(job, round_),
        hand_back=not one or averages or any(plan.keep.values()),
        transfers=transfers,
        gradient_step=at.gradient_step,
    )
