"""Resolve a plan to concrete participants."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection

from isthmus.errors import RoundFailed
from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.job.learning_rate import RoundPosition
from isthmus_server.rounds.cohort_selection import CohortSelector, SelectedCohort
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.storage.run_state import RunState
from isthmus_server.strategy.policy import CURRENT, Plan
from isthmus_server.strategy.round_spec import RoundSpec, evaluates

Turn = Callable[[Collection[str]], contextlib.AbstractAsyncContextManager[None]]


def cohort_settings(job: Job, plan: Plan) -> FederatedSection:
    """The job's section, with the cohort and quorum of a plan."""
    if plan.cohort is None or plan.regime == "datacenter":
        return job.federated
    return job.federated.for_cohort(plan.cohort)


def participants_of(
    job: Job, spec: RoundSpec, roster: ParticipantRoster, holder: str | None
) -> set[str]:
    """Whom a round may ask; `holder` is the datacenter that has the model."""
    names = {*spec.cohort, *spec.datacenters, *spec.gradient_sources}
    if holder is not None:
        names.add(holder)
    if job.evaluation.devices and evaluates(job, spec.round):
        names |= roster.clients.keys()
    return names


@contextlib.asynccontextmanager
async def resolved_in_turn(
    job: Job,
    state: RunState,
    roster: ParticipantRoster,
    cohorts: CohortSelector,
    busy: Collection[str],
    plan: Plan,
    model_hash: bytes | None,
    turn: Turn,
) -> AsyncIterator[RoundSpec]:
    """Resolve a plan, and hold its participants for the block.

    While a job waits for its turn, others may ask its devices in later draws. They would then
    refuse the one of this job, so it selects anew, and waits again if others are needed.

    `turn` waits until no other job has these participants; for the others see `resolve_plan`.

    Raises:
        NoAllowedCohort, RoundFailed: see `resolve_plan`.
    """

    def resolved() -> tuple[RoundSpec, set[str]]:
        attempt = state.attempts + 1
        spec = resolve_plan(job, state, roster, cohorts, busy, plan, attempt, model_hash)
        return spec, participants_of(job, spec, roster, state.holder)

    # Before the turn, to know whom to wait for.
    spec, names = resolved()
    while True:
        held = names
        async with turn(held):
            if cohorts.is_outdated(spec.cohort, spec.draw):
                spec, names = resolved()
            # Otherwise another job may have the new ones: give all back, and wait for all of them.
            # Jobs that kept some while they wait for others could wait for each other.
            if names <= held:
                cohorts.note_asked(spec.cohort, spec.draw)
                yield spec
                return


def resolve_plan(
    job: Job,
    state: RunState,
    roster: ParticipantRoster,
    cohorts: CohortSelector,
    busy: Collection[str],
    plan: Plan,
    attempt: int,
    model_hash: bytes | None,
) -> RoundSpec:
    """The specification of the next round; equal in every attempt with the same participants.

    Args:
        job: the job.
        state: of the run.
        roster: the participants that are ready.
        cohorts: selects the devices.
        busy: devices that already train, in buffered mode.
        plan: of the round.
        attempt: number of the attempt at the round, from 1.
        model_hash: SHA-256 of the model that it starts from; None if no device has it yet.

    Raises:
        NoAllowedCohort: too few devices may take part.
        RoundFailed: the plan leaves out all datacenters that are ready, or none is any more.
    """
    round_ = state.round + 1
    datacenter_only = plan.regime == "datacenter"
    datacenters = _datacenters_of(plan, roster)
    federated = cohort_settings(job, plan)
    selected = SelectedCohort({})
    if not datacenter_only:
        selected = cohorts.select(round_, federated, model_hash, busy)
        if plan.by_group:
            selected = cohorts.by_group(selected, federated)
        elif federated.robust is not None:
            selected = cohorts.in_random_groups(round_, selected, federated)
    single_datacenter = datacenter_only and len(datacenters) == 1
    transfers = plan.regime == "hybrid" and (plan.merge or job.strategy.merge) == "transfer"
    steps = plan.datacenter_steps or job.datacenter.steps
    # With a transfer no datacenter trains: its gradient goes to the devices.
    sources = datacenters if transfers else []
    if plan.measure_gradients:
        # Datacenters with the weight 0, too: only a measurement can tell a policy that they would
        # help again.
        sources = sorted(roster.datacenters)
    measured = [past.gradients for past in state.history if past.gradients is not None]
    averages = job.strategy.served_average > 0
    trained = steps if datacenters and not transfers else 0
    cohort = 0 if datacenter_only else federated.cohort
    # Both sides of a hybrid round are at one position of the schedules, and go on by the steps of
    # the datacenters; devices alone have a nominal length, since each makes as many steps as its
    # data have.
    length = trained or job.federated_round_steps
    return RoundSpec(
        plan=plan,
        round=round_,
        attempt=attempt,
        cohort=selected.examples,
        groups=selected.groups,
        draw=selected.draw,
        selected_ppm=selected.selected_ppm,
        shortage=selected.shortage,
        exact=selected.exact,
        federated=federated,
        datacenters=datacenters,
        from_step=state.datacenter_step,
        steps=trained,
        datacenter_has_model=plan.start == CURRENT and datacenters == [state.holder],
        evaluate=single_datacenter and not averages and evaluates(job, round_),
        hand_back=not single_datacenter
        or averages
        or any(plan.keep.values())
        or (_serves_evaluated(job) and evaluates(job, round_)),
        transfers=transfers,
        gradient_sources=sources,
        gradient_steps=steps if sources else 0,
        gradient_step=state.gradient_step,
        position=RoundPosition(state.schedule_step, length, cohort),
        last_gradients=measured[-1] if measured else None,
    )


def _serves_evaluated(job: Job) -> bool:
    """Whether the server needs each model that is evaluated."""
    return job.evaluation.devices > 0 or job.evaluation.keep_best is not None


def _datacenters_of(plan: Plan, roster: ParticipantRoster) -> list[str]:
    """Names of the datacenters that train, or whose gradient devices add.

    Raises:
        RoundFailed: the plan leaves out all that are ready, or none is any more.
    """
    if plan.regime == "federated":
        return []
    ready = sorted(roster.datacenters)
    used = [name for name in ready if plan.datacenter_weights.get(name, 1.0) > 0]
    if not ready:
        raise RoundFailed(
            f"no datacenter is ready any more, and the round was planned as {plan.regime}"
        )
    if not used:
        raise RoundFailed(
            f"the plan gives the weight 0 to each datacenter that is ready ({', '.join(ready)})"
        )
    return used
