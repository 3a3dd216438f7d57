"""The round loop: observe, plan, train, merge, evaluate, commit.

Data flows one way: job -> plan -> updates -> model -> store -> views. Read `Coordinator.run`
first; every other method is one of its steps. `Trainer` trains and merges a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from typing import Any

from isthmus.errors import CannotContinue, IsthmusError, RoundFailed
from isthmus.task import load_task
from isthmus_server.budgets.populations import Populations
from isthmus_server.budgets.run_budgets import RunBudgets
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.model.optimizers import check_round_length
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.committed_sums import CommittedSums
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.regimes.opening import opening_of
from isthmus_server.rounds.assignment import resolved_in_turn
from isthmus_server.rounds.attempt_log import AttemptLog, AttemptTime
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import CohortSelector
from isthmus_server.rounds.comparisons import ComparisonRunner
from isthmus_server.rounds.measurements.evaluation import RoundEvaluator
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.rounds.readiness import Drain, Retries, RoundReadiness
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.trainer import Trainer
from isthmus_server.storage.events import (
    Event,
    EventStream,
    ModelsCompared,
    ReportedEvent,
    RunFailed,
    RunFinished,
    RunStopped,
)
from isthmus_server.storage.records import ComparisonRecord, FinalModel, PlannedAttempt
from isthmus_server.storage.store import Store
from isthmus_server.strategy.decision import Decision, decide
from isthmus_server.strategy.loading import load_policy
from isthmus_server.strategy.observation import observe
from isthmus_server.strategy.policy import CURRENT, SERVED, Compare, Observation, Plan, Stop
from isthmus_server.strategy.round_spec import RoundSpec
from isthmus_server.transport.link import Link

SAVE_ELAPSED_SECONDS = 30.0
"""Interval in which the run's elapsed time is stored."""


class Coordinator:
    """Runs one job to its end.

    Guarantees:
      * a round becomes visible with its model, optimizer state, policy state and receipts, or not
        at all; after a crash at any instant `run` continues from the last committed round;
      * the same seed and the same participants give the same bytes, with or without interruption;
      * every wait has a limit from the job's `[time]`.
    """

    def __init__(
        self,
        store: Store,
        link: Link,
        events: EventStream | None = None,
        clock: Clock | None = None,
        populations: Populations | None = None,
    ) -> None:
        """Load the task and the model, and restore the state of the run.

        Args:
            store: the run on disk.
            link: connects the participants; it may outlive the run.
            events: receives every event of the run.
            clock: measures windows, the limit on the run's time, and the duration of rounds.
            populations: privacy ledgers that runs share.

        Raises:
            UserError: the job, its task or a checkpoint cannot be used.
        """
        self.store = store
        self._link = link
        self.job = store.job
        self.events = events or EventStream()
        self.clock = clock or Clock()
        self._final = False
        self.drain = Drain()
        data = self.job.task.data_in(store.base)
        task = load_task(self.job.task.source, self.job.task.settings, base=store.base, data=data)
        strategy = self.job.strategy
        self._policy = load_policy(strategy)  # its module may be next to the task's
        self.model = GlobalModel.of(self.job, task, shared=link.shares_memory)
        check_round_length(self.job, task, self.model.module)
        self.state = store.run_state()
        self._budgets = RunBudgets.open(store, self.state, populations)
        try:
            self._assemble()
        except BaseException:
            self._budgets.close()
            raise

    def _assemble(self) -> None:
        store = self.store
        link = self._link
        layout = self.model.layout
        budgets = self._budgets
        opening = opening_of(store.run_id, self.job, store.base, self.model)
        sums = CommittedSums.of(self.job, store.attempts)
        files = (store.directory, store.unmaskings)
        privacy = budgets.devices
        context = FederatedContext(link, self.job, opening, layout, *files, privacy, sums)
        self.federated = FederatedRegime(context)
        self._datacenter = DatacenterRegime(link, self.job, store.run_id, layout, sums)
        self._versions = ModelVersions(self.model, store, self.federated.extension)
        self._versions.restore(self.state)
        availability = DeviceAvailability(self.job, self.clock, store.attempts(), budgets.devices)
        self.roster = ParticipantRoster(link, self.job, opening, availability, self._publish)
        self._cohorts = CohortSelector(
            self.job, self.roster, availability, self.clock, link.enrolments, store
        )
        self._readiness = RoundReadiness(
            self.job, self.roster, self._cohorts, self.clock, self._observe, self._publish, budgets
        )
        self._trainer = Trainer(self.model, self.federated, self._datacenter, self.roster)
        self._comparisons = ComparisonRunner(
            store, self._cohorts, context, self._versions, self.clock
        )
        self.evaluator = RoundEvaluator(
            self.model, self._cohorts, context, self.clock, lambda: self.federated.busy
        )
        self.evaluator.check_policy(self._policy)
        self._log = AttemptLog(store, availability, sums, self._publish, budgets.devices)
        self._began = self._started_at = self.clock.now()

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> FinalModel:
        """Train until the job's rounds or its limits are used up; returns the final model.

        Raises:
            UserError: the run cannot continue; it is stored as failed, with the reason.
        """
        with contextlib.closing(self._budgets):
            return await self._run()

    async def _run(self) -> FinalModel:
        status, _, final = self.store.status()
        if status == "finished" and final is not None:
            return final  # the process was killed after the last commit
        self.drain.begin()
        self.store.reopen()
        self.roster.start()
        self._began = self.clock.now() - self.state.elapsed
        saving_elapsed = asyncio.create_task(self._save_elapsed())
        try:
            await self.roster.wait_for_embedded()
            reason = "all rounds are done"
            while self.state.round < self.job.rounds:
                self.drain.check()
                await self.clock.sleep(0.0)  # first handle participants that have joined or left
                decision = await self._decide()
                stop = await self._round(decision)
                if saving_elapsed.done():
                    saving_elapsed.result()  # raises: the disk is full, for example
                if stop is not None:
                    reason = stop.reason
                    next_ = self.state.round + 1
                    self._publish(RunStopped(round=next_, reason=reason, decision=decision))
                    break
            self.drain.hold()
            final = await self._finish(reason)
            self._final = True
        except (IsthmusError, OSError, sqlite3.Error) as error:
            failure = error if isinstance(error, IsthmusError) else self.store.unusable(error)
            with contextlib.suppress(OSError, sqlite3.Error):  # a full disk cannot store it
                self.store.finish("failed", str(failure), None)
            self._publish(RunFailed(reason=str(failure)))
            raise failure from error
        finally:
            await self.federated.stop()
            saving_elapsed.cancel()
            await self.roster.stop(self._final)
        return final

    def abandon(self) -> None:
        """The run will not be resumed: datacenters may delete its checkpoints when it ends."""
        self._final = True

    async def _save_elapsed(self) -> None:
        """Store the elapsed time regularly, so that a crash does not lose long waits."""
        while True:
            await asyncio.sleep(SAVE_ELAPSED_SECONDS)
            self.store.save_elapsed(self.clock.now() - self._began)

    async def _round(self, decision: Decision) -> Stop | None:
        """Attempt a round until it is committed, or the job's attempts are used up.

        Returns the stop that ends the run instead, if the policy or a limit asks for one.

        Raises:
            CannotContinue: participants are missing, or the attempts are used up.
        """
        if isinstance(decision.answer, Stop):
            return decision.answer
        retries = Retries(self.job, self.clock)
        while True:
            plan = await self._readiness.wait(
                self.state.round + 1, decision.answer, self._start_hash
            )
            if isinstance(plan, Stop):
                return plan
            self._started_at = self.clock.now()
            try:
                with self.drain.held():
                    answered = dataclasses.replace(decision, answer=plan)
                    await self._attempt(answered, plan)
            except RoundFailed as error:
                last = retries.give_up(error)
                time = self._attempt_time()
                self.state = self._log.fail(self.state, plan, error, time=time, given_up=last)
                if last:
                    raise CannotContinue(
                        f"round {self.state.round + 1} failed {retries.failed} times; the last "
                        f"time because: {error}"
                    ) from None
                self.drain.check()
                await retries.pause(error)
            else:
                return None

    def _start_hash(self, plan: Plan) -> bytes | None:
        """SHA-256 of the model that a plan starts from; None if no device can have it."""
        if plan.start == CURRENT:
            return None if self.state.model_in_datacenter else self.model.blob.sha256
        saved = self.state.models.get(plan.start)
        return None if saved is None else bytes.fromhex(saved.sha256)

    async def _attempt(self, decision: Decision, plan: Plan) -> None:
        """One attempt at the next round, from invitations to commit."""
        assigned = resolved_in_turn(
            self.job,
            self.state,
            self.roster,
            self._cohorts,
            self.federated.busy,
            plan,
            self._start_hash(plan),
            self._link.turn,
        )
        async with self.drain.during(assigned) as spec:
            self._started_at = self.clock.now()
            with self._budgets.charged(spec):
                await self._carry_out(decision, spec)

    async def _carry_out(self, decision: Decision, spec: RoundSpec) -> None:
        planned = self._log.plan(decision, spec)
        if not (spec.single_datacenter and spec.datacenter_has_model):
            await self._load_start(spec.plan.start, planned)
        results = await self._trainer.train(spec)
        await self._trainer.merge(spec, results)
        evaluated, saved = await asyncio.gather(
            self.evaluator.evaluate(spec, results), asyncio.to_thread(self._save, spec)
        )
        saved["models"] = self._versions.with_best(saved["models"], self.state, evaluated.metrics)
        saved |= self._budgets.saved()  # with the charges of the evaluation
        self.state = self._log.commit(
            self.state,
            spec,
            results,
            evaluated=evaluated,
            saved=saved,
            averaged=self.model.averaged,
            time=self._attempt_time(),
        )

    def _attempt_time(self) -> AttemptTime:
        now = self.clock.now()
        return AttemptTime(started_at=self._started_at, ended_at=now, elapsed=now - self._began)

    # -- decide ------------------------------------------------------------------------------------

    def _observe(self) -> Observation:
        state = self.state
        available = len(self.roster.available())
        return observe(
            self.job,
            state.history,
            spent=state.spent,
            device_bytes=state.device_bytes,
            state=state.policy_state,
            clients_ready=available,
            clients_ineligible=len(self.roster.clients) - available,
            seconds_until_quorum=self._cohorts.seconds_until_quorum(),
            datacenters=self.roster.datacenters,
            groups=self.roster.groups(),
            model_bytes=self.model.layout.nbytes,
            now=self.clock.utc(),
            elapsed=self.clock.now() - self._began,
            models=self._versions.names(state.models),
            comparisons=[c.result for c in state.comparisons if c.result is not None],
            epsilon_spent=self._budgets.devices_spent,
        )

    async def _decide(self) -> Decision:
        """The next decision; one that a crash interrupted is taken from the log."""
        if (interrupted := self.state.cut_short) is not None:
            await self._cohorts.repeat(interrupted)
            self.state = dataclasses.replace(self.state, cut_short=None)
            return interrupted.decision
        name = self.job.strategy.policy
        pause = self._readiness.pause
        return await decide(self._policy, name, self._observe, self._compare, pause)

    async def _compare(self, question: Compare) -> None:
        """Have devices compare models; the result is in the next observation.

        Raises:
            RoundFailed: too few devices answered, in all attempts.
        """

        def turn() -> contextlib.AbstractAsyncContextManager[None]:
            return self._link.turn([*self.roster.clients, *filter(None, [self.state.holder])])

        await self._comparisons.answer(
            lambda: self.state, question, self._fetch_model, self.drain, turn, self._note_compared
        )

    def _note_compared(self, record: ComparisonRecord) -> None:
        self.state = self.state.after_comparison(record)
        self._publish(ModelsCompared(record=record))

    # -- the model ---------------------------------------------------------------------------------

    async def _load_start(self, start: str, planned: PlannedAttempt) -> None:
        """Load the model that a round starts from; repeated attempts load the same one."""
        if {CURRENT, SERVED} & set(start.split("+")):
            try:
                await self._fetch_model()
            except RoundFailed as error:  # only the datacenter with the model was asked
                receipts = error.receipts if isinstance(error, AttemptFailed) else ()
                asked = [receipt.participant for receipt in receipts]
                self.store.plan(dataclasses.replace(planned, invited=[], datacenters=asked))
                raise
        if start != CURRENT:
            model = await asyncio.to_thread(self._versions.read, start, self.state.models)
            await asyncio.to_thread(self.model.restart, model)

    async def _fetch_model(self) -> None:
        """Fetch the committed model from the datacenter, if only the datacenter has it."""
        if not self.state.model_in_datacenter:
            return
        name = self.state.holder
        assert name is not None
        if not await self.roster.wait_for(datacenters=[name]):
            raise RoundFailed(f"the datacenter {name!r}, which has the model, is not connected")
        async with self._link.turn([name]):
            self.model.replace(await self._datacenter.export(name, self.state.datacenter_step))
        self.state = dataclasses.replace(self.state, model_in_datacenter=False)

    def _save(self, spec: RoundSpec) -> dict[str, Any]:
        """Write the round's checkpoints; returns the fields of `RunState` that they change."""
        models = self._versions.write(
            spec.round, spec.plan, self.state.models, only_in_datacenter=spec.model_stays
        )
        if spec.single_datacenter and not spec.plan.reset_optimizer:
            return {"models": models}
        optimizer, numbers = self._versions.write_optimizer(spec.round)
        return {"models": models, "optimizer": optimizer, "optimizer_numbers": numbers}

    # -- the end -----------------------------------------------------------------------------------

    async def _finish(self, reason: str) -> FinalModel:
        """Write and evaluate the served model."""
        try:
            await self._fetch_model()
        except RoundFailed as error:
            raise CannotContinue(f"the final model could not be fetched: {error}") from None
        last = await asyncio.to_thread(self._versions.load_delivered, self.state)
        path = self.store.write_final(self.model.served_payload)
        final = FinalModel(
            metrics=(last.metrics if last else {})
            or await asyncio.to_thread(self.evaluator.central),
            model_sha256=self.model.served_sha256,
            model_path=str(path),
            round=last.round if last else 0,
            best=self.job.evaluation.deliver == "best",
        )
        self.store.finish("finished", reason, final)
        self._publish(RunFinished(reason=reason, spent=self.state.spent, final=final))
        return final

    def _publish(self, event: Event) -> None:
        if isinstance(event, ReportedEvent):
            self.store.log_event(event)
        self.events.publish(event)
