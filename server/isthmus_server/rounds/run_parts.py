"""What a run is made of."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Self

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.task import keep_process, load_task
from isthmus_server.budgets.populations import Populations
from isthmus_server.budgets.run_budgets import RunBudgets
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.model.optimizers import check_round_length
from isthmus_server.regimes.committed_sums import CommittedSums
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.regimes.opening import opening_of
from isthmus_server.regimes.round_times import RoundTimes
from isthmus_server.regimes.secure_sums.attempt import TRAINING_SHARE
from isthmus_server.rounds.attempt_log import AttemptLog
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import CohortSelector
from isthmus_server.rounds.comparisons import ComparisonRunner
from isthmus_server.rounds.held_model import HeldModel
from isthmus_server.rounds.measurements.evaluation import RoundEvaluator
from isthmus_server.rounds.merger import ModelMerger
from isthmus_server.rounds.model_publication import ModelPublication
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.rounds.observer import RunObserver
from isthmus_server.rounds.readiness import RoundReadiness
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.run_progress import RunProgress
from isthmus_server.rounds.running_statistics import RunningStatistics
from isthmus_server.rounds.start_offer import StartOffer
from isthmus_server.rounds.trainer import Trainer
from isthmus_server.storage.events import EventStream, Paused
from isthmus_server.storage.run_journal import RunJournal
from isthmus_server.storage.store import Store
from isthmus_server.strategy.limits import RunLimits
from isthmus_server.strategy.loading import load_policy
from isthmus_server.strategy.policy import Policy, Wait
from isthmus_server.transport.link import Link


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of one run, each made for this run only, except for the link.

    They are handed to a `Coordinator` or a `StatisticsRun`, which closes the budgets when its `run`
    ends.
    """

    store: Store
    """The run on disk."""
    link: Link
    """Connects the participants; it may outlive the run."""
    events: EventStream
    """Passes every event of the run to its subscribers."""
    journal: RunJournal
    """Publishes events, and stores those of the report and the end of the run."""
    clock: Clock
    """Measures windows, the limit on the run's time, and the duration of rounds."""
    progress: RunProgress
    """The state of the run, and its time."""
    policy: Policy
    """Decides each round."""
    model: GlobalModel
    versions: ModelVersions
    """Versions of the model, in memory and as checkpoints."""
    budgets: RunBudgets
    """Budgets of privacy."""
    roster: ParticipantRoster
    """The participants that are ready."""
    cohorts: CohortSelector
    """Selects devices."""
    limits: RunLimits
    """Limits of the job, on decisions and on attempts."""
    readiness: RoundReadiness
    """Waits until a plan can be carried out."""
    federated: FederatedRegime
    """Trains on devices."""
    held: HeldModel
    """The model, as far as only a datacenter has it."""
    trainer: Trainer
    """Runs attempts."""
    merger: ModelMerger
    """Computes the next model from their results."""
    comparisons: ComparisonRunner
    """Answers the policy's questions."""
    evaluator: RoundEvaluator
    """Evaluates the next model."""
    log: AttemptLog
    """Records what became of attempts."""

    @property
    def job(self) -> Job:
        """The job of the run."""
        return self.store.job

    @classmethod
    def of(
        cls,
        store: Store,
        link: Link,
        events: EventStream | None = None,
        clock: Clock | None = None,
        populations: Populations | None = None,
    ) -> Self:
        """Load the task and the model, and restore the state of the run.

        Args:
            store: the run on disk.
            link: connects the participants; it may outlive the run.
            events: receives every event of the run; None for a stream of its own.
            clock: a simulated one; None for the machine's.
            populations: privacy ledgers that runs share; None for a run by itself.

        Raises:
            UserError: the job, its task or a checkpoint cannot be used.
        """
        keep_process()
        job = store.job
        clock = clock or Clock()
        events = events or EventStream()
        data = job.task.data_in(store.base)
        task = load_task(job.task.source, job.task.settings, base=store.base, data=data)
        policy = load_policy(job.strategy)  # its module may be next to the task's
        model = GlobalModel.of(job, task, store.base, shared=link.shares_memory)
        check_round_length(job, task, lambda: model.module)
        if link.enrolments.certified and _sums_updates(job):
            # As each device would refuse it, so that no round could end.
            half = model.layout.explain_half_precision(model.module)
            if half is not None:
                raise TaskError(half)
        progress = RunProgress(store.run_state(), clock)
        with contextlib.ExitStack() as opened:
            budgets = RunBudgets.open(store, progress.state, populations)
            # If what follows fails: ledgers are locked while they are open, and the next run needs
            # them.
            opened.callback(budgets.close)
            layout = model.layout
            journal = RunJournal(store, events)
            opening = opening_of(store.run_id, job, store.base, model)
            sums = CommittedSums.of(job, store.attempts)
            round_times = RoundTimes(job.time, publish=journal.publish)
            share = TRAINING_SHARE if job.federated.secure_aggregation else 1.0
            for attempt in store.attempts():
                round_times.restore(attempt.receipts, share)
            round_times.restore_unready(store.events("unready"))
            context = FederatedContext(
                link=link,
                job=job,
                opening=opening,
                layout=layout,
                spool=store.directory,
                unmaskings=store.unmaskings,
                privacy=budgets.devices,
                sums=sums,
                ranges=store.ranges,
                signed_sums=store.signed_sums,
                round_times=round_times,
            )
            federated = FederatedRegime(context)
            datacenter = DatacenterRegime(
                link=link, job=job, run_id=store.run_id, layout=layout, sums=sums
            )
            versions = ModelVersions(
                model=model,
                checkpoints=store.checkpoints,
                evaluation=job.evaluation,
                extension=federated.extension,
            )
            versions.restore(progress.state)
            if progress.state.model_in_datacenter:
                model.leave()
            availability = DeviceAvailability(
                job=job, clock=clock, attempts=store.attempts(), privacy=budgets.devices
            )
            roster = ParticipantRoster(
                link=link,
                job=job,
                run=opening,
                availability=availability,
                publish=journal.publish,
                ranks_job=store.ranks_job,
                # Participants that this machine starts have its files.
                start=(
                    StartOffer.of(opening, job, store.base, model)
                    if link.enrolments.certified
                    else None
                ),
                now=clock.now,
                earlier=store.events("late"),
            )
            cohorts = CohortSelector(
                job=job,
                roster=roster,
                availability=availability,
                clock=clock,
                enrolments=link.enrolments,
                run_id=store.run_id,
                unmaskings=store.unmaskings,
                ranges=store.ranges,
            )
            observer = RunObserver(
                job=job,
                clock=clock,
                progress=progress,
                roster=roster,
                cohorts=cohorts,
                versions=versions,
                budgets=budgets,
                model_bytes=layout.nbytes,
            )

            async def pause(wait: Wait) -> None:
                round_ = progress.state.round + 1
                journal.publish(Paused(round=round_, seconds=wait.seconds, reason=wait.reason))
                await clock.sleep(wait.seconds)

            limits = RunLimits(
                observe=observer.observe,
                pause=pause,
                refused_for_privacy=observer.refused_for_privacy,
            )
            held = HeldModel(
                link=link, model=model, progress=progress, roster=roster, datacenter=datacenter
            )
            publication = ModelPublication(
                link=link,
                model=model,
                spool=store.directory,
                may_spill=federated.extension is None,
            )
            statistics = RunningStatistics(
                job=job,
                model=model,
                datacenter=datacenter,
                roster=roster,
                publication=publication,
            )
            evaluator = RoundEvaluator(
                model=model,
                cohorts=cohorts,
                context=context,
                clock=clock,
                publication=publication,
                busy=lambda: federated.busy,
            )
            evaluator.check_policy(policy)
            parts = cls(
                store=store,
                link=link,
                events=events,
                journal=journal,
                clock=clock,
                progress=progress,
                policy=policy,
                model=model,
                versions=versions,
                budgets=budgets,
                roster=roster,
                cohorts=cohorts,
                limits=limits,
                readiness=RoundReadiness(job=job, roster=roster, cohorts=cohorts, limits=limits),
                federated=federated,
                held=held,
                trainer=Trainer(
                    model=model,
                    federated=federated,
                    datacenter=datacenter,
                    publication=publication,
                    statistics=statistics,
                ),
                merger=ModelMerger(
                    strategy=job.strategy,
                    model=model,
                    statistics=statistics,
                    extension=federated.extension,
                ),
                comparisons=ComparisonRunner(
                    store=store,
                    context=context,
                    clock=clock,
                    progress=progress,
                    roster=roster,
                    cohorts=cohorts,
                    versions=versions,
                    held=held,
                    publication=publication,
                    publish=journal.publish,
                ),
                evaluator=evaluator,
                log=AttemptLog(
                    store=store,
                    availability=availability,
                    sums=sums,
                    publish=journal.publish,
                    privacy=budgets.devices,
                ),
            )
            opened.pop_all()
            return parts


def _sums_updates(job: Job) -> bool:
    """Whether devices' updates may be summed securely."""
    trains = job.strategy.policy != "datacenter" and not job.statistics.collect
    return trains and job.federated.secure_aggregation
