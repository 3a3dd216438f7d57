"""The round loop: observe, plan, run, merge, evaluate, commit.

Data goes one way: job -> plan -> updates -> model -> store -> views. Read `Coordinator.run` first;
everything else on this page is one of its steps. How a round is trained and merged is in
`attempt`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.errors import IsthmusError, RoundFailed, UserError
from isthmus.job import write_job
from isthmus.task import load_task
from isthmus.tensors.fingerprint import fingerprint
from isthmus.transport.requests import fingerprint_messages
from isthmus.wire import link_pb2
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.rounds.assignment import resolve_plan
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.cohort_selection import Cohorts
from isthmus_server.rounds.comparison_runner import ComparisonRunner
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.rounds.roster import Roster
from isthmus_server.rounds.trainer import Trainer, TrainingResult
from isthmus_server.storage.events import (
    Event,
    EventStream,
    ModelsCompared,
    Paused,
    ReportedEvent,
    RoundAttemptFailed,
    RoundCommitted,
    RoundPlanned,
    RunFailed,
    RunFinished,
    RunStopped,
)
from isthmus_server.storage.records import (
    Cost,
    FailedAttempt,
    FinalModel,
    Participants,
    PlannedAttempt,
    Receipt,
    RoundRecord,
)
from isthmus_server.storage.store import Store
from isthmus_server.strategy.decision import Decision, decide
from isthmus_server.strategy.limits import enforce_limits
from isthmus_server.strategy.loading import load_policy
from isthmus_server.strategy.observation import observe
from isthmus_server.strategy.policy import (
    CURRENT,
    SERVED,
    Compare,
    Observation,
    Plan,
    Stop,
    Wait,
)
from isthmus_server.strategy.round_spec import RoundSpec, evaluates
from isthmus_server.transport.link import Link

log = logging.getLogger(__name__)

NOTED_EVERY = 30.0
"""Seconds between two times that a run's time is written down."""


class Coordinator:
    """Runs one job to its end.

    Guarantees:
      * a round is visible with its model, optimizer state, policy state and receipts, or not at
        all; after a crash anywhere `run` goes on from the last committed round;
      * the same seed and the same participants give the same bytes, interrupted or not;
      * every wait has a bound from the job's `[time]`.
    """

    def __init__(
        self,
        store: Store,
        link: Link,
        events: EventStream | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Load the task and the model, and stand where the run last stood.

        Windows, the limit on the run's time and what rounds take go by `clock`.

        Raises:
            UserError: the job, its task or a checkpoint cannot be used.
        """
        self.store = store
        self.job = store.job
        self.link = link
        self.events = events or EventStream()
        self.clock = clock or Clock()
        self._began = self.clock.now()
        self.over = False
        """Nobody will go on with the run: who keeps something to do so can let go of it."""
        data = self.job.task.data_in(store.base)
        task = load_task(self.job.task.source, self.job.task.settings, base=store.base, data=data)
        strategy = self.job.strategy
        self.policy = load_policy(strategy)  # its module may lie beside the task's
        self.model = GlobalModel(
            task, self.job.seed, strategy.server_optimizer, strategy.served_average
        )
        layout = self.model.layout
        context = FederatedContext(link, self.job, store.run_id, layout, store.directory)
        self.federated = FederatedRegime(context)
        self.at = store.run_state()
        self.versions = ModelVersions(self.model, store.checkpoints, self.federated.extension)
        self.versions.restore(self.at)
        self.roster = Roster(
            link,
            self.job,
            link_pb2.OpenRun(
                run_id=store.run_id,
                job=write_job(self.job),
                base=str(store.base),
                layout=layout.header,
                frozen=fingerprint_messages(fingerprint(self.model.module)),
            ),
            self._publish,
        )
        self.cohorts = Cohorts(self.job, self.roster, self.clock, store)
        self.datacenter = DatacenterRegime(link, self.job, store.run_id, layout)
        self.trainer = Trainer(self.job, link, self.model, self.federated, self.datacenter)
        self.visitor = ComparisonRunner(store, self.roster, context, self.versions, self.clock)

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> FinalModel:
        """Train until the job's rounds or budget are used up; returns the final model.

        Raises:
            UserError: the run cannot go on; it is stored as failed, with the reason.
        """
        status, _, done = self.store.status()
        if status == "finished" and done is not None:
            return done  # it was killed before anybody else heard
        self.store.reopen()
        self.roster.start()
        self._began = self.clock.now() - self.at.elapsed
        lasting = asyncio.create_task(self._keep_time())
        try:
            await self.roster.wait_for_embedded()
            reason = "all rounds are done"
            while self.at.round < self.job.rounds:
                await self.clock.sleep(0.0)  # whoever came meanwhile is heard first
                decision = await self._decide()
                stop = await self._round(decision)
                if lasting.done():
                    lasting.result()  # it failed: the disk is full, say
                if stop is not None:
                    reason = stop.reason
                    self._publish(
                        RunStopped(round=self.at.round + 1, reason=reason, decision=decision)
                    )
                    break
            final = await self._finish(reason)
            self.over = True
        except (IsthmusError, OSError, sqlite3.Error) as error:
            failure = error if isinstance(error, IsthmusError) else self.store.unusable(error)
            with contextlib.suppress(OSError, sqlite3.Error):  # a full disk takes no note of it
                self.store.finish("failed", str(failure), None)
            self._publish(RunFailed(reason=str(failure)))
            raise failure from error
        finally:
            await self.federated.stop()
            lasting.cancel()
            await self.roster.stop(self.over)
        return final

    async def _keep_time(self) -> None:
        """Write down how long the run has gone on for, so that a crash forgets no wait."""
        while True:
            await asyncio.sleep(NOTED_EVERY)
            self.store.save_elapsed(self.clock.now() - self._began)

    async def _round(self, decision: Decision) -> Stop | None:
        """Try a round until it is committed, or the job's attempts are used up.

        Returns what ends the run instead, if the policy or a limit does.
        """
        plan, round_ = decision.answer, self.at.round + 1
        if isinstance(plan, Stop):
            return plan
        tries = 0
        while True:
            tries += 1
            stop = await self._still(plan)
            if stop is not None:
                return stop
            attempt = self.at.attempts + 1
            await self.roster.require(plan.regime)
            started = self.clock.now()
            try:
                await self._one_attempt(decision, plan, round_, attempt, started)
                return None
            except RoundFailed as error:
                receipts = error.receipts if isinstance(error, AttemptFailed) else []
                last = tries >= self.job.attempts
                self._record_failure(plan, round_, attempt, started, str(error), receipts, last)
                if last:
                    raise UserError(
                        f"round {round_} failed {tries} times; the last time because: {error}"
                    ) from None

    async def _still(self, plan: Plan) -> Stop | None:
        """Hold a plan of before to the limits of now: time has passed, and money is spent.

        The plan stays what it is; it waits, or a limit ends the run.
        """
        while True:
            answer = enforce_limits(plan, self._observe()).answer
            if isinstance(answer, Stop):
                return answer
            if not isinstance(answer, Wait):
                return None
            await self._pause(answer)

    async def _pause(self, wait: Wait) -> None:
        self._publish(Paused(round=self.at.round + 1, seconds=wait.seconds, reason=wait.reason))
        await self.clock.sleep(wait.seconds)

    async def _one_attempt(
        self, decision: Decision, plan: Plan, round_: int, attempt: int, started: float
    ) -> None:
        work = resolve_plan(
            self.job, self.at, self.roster, self.cohorts, self.federated.busy, plan, attempt
        )
        self.store.plan(
            PlannedAttempt(
                round=round_,
                attempt=attempt,
                decision=decision,
                invited=sorted(work.cohort),
                datacenters=work.datacenters,
            )
        )
        self._publish(
            RoundPlanned(
                round=round_,
                attempt=attempt,
                regime=plan.regime,
                reason=plan.reason,
                invited=len(work.cohort) + len(work.datacenters),
            )
        )
        if not work.datacenter_has_model:
            await self._stand_at(plan.start)
        trained = await self.trainer.train(work)
        await asyncio.to_thread(self.trainer.merge, work, trained)
        evaluation, saved = await asyncio.gather(
            self._evaluate(work, trained), asyncio.to_thread(self._save, work)
        )
        self._commit(work, trained, evaluation, saved, started)

    # -- plan --------------------------------------------------------------------------------------

    def _observe(self) -> Observation:
        able = len(self.roster.able())
        return observe(
            self.job,
            self.at.history,
            spent=self.at.spent,
            device_bytes=self.at.device_bytes,
            state=self.at.policy_state,
            clients_ready=able,
            clients_ineligible=len(self.roster.clients) - able,
            seconds_until_quorum=self.cohorts.enough_in(),
            datacenters=len(self.roster.datacenters),
            model_bytes=self.model.layout.nbytes,
            now=self.clock.utc(),
            elapsed=self.clock.now() - self._began,
            models=self.versions.names(self.at.models),
            comparisons=[one.result for one in self.at.comparisons if one.result is not None],
        )

    async def _decide(self) -> Decision:
        if (cut_short := self.at.cut_short) is not None:
            await self.cohorts.go_on(self.at.round + 1, cut_short.invited)
            self.at = dataclasses.replace(self.at, cut_short=None)
            return cut_short.decision
        return await decide(
            self.policy,
            self.job.strategy.policy,
            self._observe,
            self._visit,
            self._pause,
        )

    async def _visit(self, asked: Compare) -> None:
        """Have devices compare models; what they say stays in the log for this round."""
        for tries in itertools.count(1):
            last = tries >= self.job.attempts
            record = await self.visitor.visit(self.at, asked, self._bring_home, last=last)
            self.at = self.at.after_comparison(record)
            self._publish(ModelsCompared(record=record))
            if record.error is None:
                return
            if last:
                raise RoundFailed(
                    f"devices could not compare the models in {tries} tries; the last time "
                    f"because: {record.error}"
                )

    def _price(self, devices: int, steps: int) -> float:
        prices = self.job.prices
        return devices * prices.client_update + steps * prices.datacenter_step

    # -- where to start from -----------------------------------------------------------------------

    async def _stand_at(self, start: str) -> None:
        """Have the model to train from; done again before every attempt, with the same result."""
        if {CURRENT, SERVED} & set(start.split("+")):
            await self._bring_home()
        if start != CURRENT:
            model = await asyncio.to_thread(self.versions.read, start, self.at.models)
            await asyncio.to_thread(self.model.restart, model)

    async def _bring_home(self) -> None:
        """Fetch the committed model from the datacenter, if only it has it."""
        if not self.at.model_in_datacenter:
            return
        assert self.at.holder is not None
        if not await self.roster.wait_for(datacenters=[self.at.holder]):
            raise RoundFailed(f"the datacenter {self.at.holder!r}, which has the model, is away")
        self.model.replace(await self.datacenter.export(self.at.holder, self.at.datacenter_step))
        self.at = dataclasses.replace(self.at, model_in_datacenter=False)

    # -- evaluate ----------------------------------------------------------------------------------

    async def _evaluate(self, work: RoundSpec, trained: TrainingResult) -> Mapping[str, float]:
        """Figures of the served model on the central held-out data."""
        if work.evaluate:
            return trained.datacenters[0].evaluation
        if not evaluates(self.job, work.round):
            return {}
        return await asyncio.to_thread(self.model.evaluate, self.job.evaluation.batch_size)

    # -- commit ------------------------------------------------------------------------------------

    def _save(self, work: RoundSpec) -> dict[str, Any]:
        """Write what the round changed, durably; returns what `RunState` says of it."""
        models = self.versions.write(work.round, work.plan, self.at.models, away=work.model_stays)
        if work.single_datacenter and not work.plan.reset_optimizer:
            return {"models": models}
        optimizer, numbers = self.versions.write_optimizer(work.round)
        return {"models": models, "optimizer": optimizer, "optimizer_numbers": numbers}

    def _commit(
        self,
        work: RoundSpec,
        trained: TrainingResult,
        evaluation: Mapping[str, float],
        saved: dict[str, Any],
        started: float,
    ) -> None:
        comparisons, receipts, now = self.at.comparisons, trained.receipts, self.clock.now()
        devices = sum(receipt.regime == "federated" for receipt in receipts)
        price = self._price(devices, work.steps * len(work.datacenters))
        record = RoundRecord(
            round=work.round,
            attempt=work.attempt,
            regime=work.plan.regime,
            reason=work.plan.reason,
            started_at=started,
            seconds=now - started,
            elapsed=now - self._began,
            participants=Participants.of(receipts),
            receipts=receipts,
            cost=Cost.of(receipts, price, comparisons),
            metrics=dict(evaluation),
            model_sha256=None if work.model_stays else saved["models"][SERVED].sha256,
            comparisons=comparisons,
            training=trained.training,
            norms=trained.norms,
            cosine=trained.cosine,
            profile=trained.profile,
        )
        self.at = self.at.after_round(work, record, self.model.averaged, saved)
        self.store.commit(record, self.at.committed())
        self.cohorts.committed(record)
        self._publish(RoundCommitted(record=record))

    def _record_failure(
        self,
        plan: Plan,
        round_: int,
        attempt: int,
        started: float,
        reason: str,
        receipts: Sequence[Receipt],
        last: bool,
    ) -> None:
        now = self.clock.now()
        # Devices that were reached have been paid for; what the ranks did is not known.
        reached = sum(r.started for r in receipts if r.regime == "federated")
        record = FailedAttempt(
            round=round_,
            attempt=attempt,
            regime=plan.regime,
            reason=plan.reason,
            started_at=started,
            seconds=now - started,
            elapsed=now - self._began,
            participants=Participants.of(receipts),
            receipts=receipts,
            cost=Cost.of(receipts, self._price(reached, 0)),
            error=reason,
            given_up=last,
        )
        self.store.fail(record)
        self.cohorts.failed(record)
        self.at = self.at.after_failure(record)
        self._publish(RoundAttemptFailed(record=record))

    # -- beginning and end -------------------------------------------------------------------------

    async def _finish(self, reason: str) -> FinalModel:
        """Fetch the model, write the served one out and evaluate it."""
        try:
            await self._bring_home()
        except RoundFailed as error:
            raise UserError(f"the final model could not be fetched: {error}") from None
        path = self.store.write_final(self.model.served_payload)
        metrics = self.at.history[-1].metrics if self.at.history else {}
        if not metrics:
            metrics = await asyncio.to_thread(self.model.evaluate, self.job.evaluation.batch_size)
        final = FinalModel(
            metrics=metrics, model_sha256=self.model.served_sha256, model_path=str(path)
        )
        self.store.finish("finished", reason, final)
        self._publish(RunFinished(reason=reason, spent=self.at.spent, final=final))
        return final

    def _publish(self, event: Event) -> None:
        if isinstance(event, ReportedEvent):
            self.store.log_event(event)
        self.events.publish(event)
