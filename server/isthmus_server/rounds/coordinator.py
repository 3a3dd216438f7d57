"""The round loop: observe, plan, train, merge, evaluate, commit.

Data flows one way: job -> plan -> updates -> model -> store -> views. Read `Coordinator.run`
first; every other method is one of its steps. What does the work of a step is in `RunParts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

from isthmus.errors import CannotContinue, RoundFailed
from isthmus_server.regimes.attempt_result import TrainingResult
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.rounds.assignment import resolved_in_turn
from isthmus_server.rounds.cohort_selection import MEND_SUM
from isthmus_server.rounds.drain import Drain
from isthmus_server.rounds.measurements.evaluation import Evaluated
from isthmus_server.rounds.retries import GivenUp, Retries
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RunStopped
from isthmus_server.storage.records import FinalModel, PlannedAttempt
from isthmus_server.storage.run_state import RunState
from isthmus_server.strategy.decision import Decision, decide
from isthmus_server.strategy.policy import BEST, CURRENT, INITIAL, SERVED, Compare, Plan, Stop
from isthmus_server.strategy.round_spec import RoundSpec

MEND_TASK = (
    "; mend the task, in the same way on the server and on each device that has its code, and "
    "continue the run: it goes on after its last committed round"
)
"""What a run needs whose round failed because of its task."""

SAVE_ELAPSED_SECONDS = 30.0
"""Interval in which the run's elapsed time is stored."""


class Coordinator:
    """Runs one job to its end.

    Guarantees:
      * a round becomes visible with its model, optimizer state, policy state and receipts, or not
        at all; after a crash at any instant, and after an attempt that failed at any of its steps,
        `run` continues from the last committed round;
      * the same seed and the same participants give the same bytes, with or without interruption;
      * every wait has a limit from the job's `[time]`.
    """

    def __init__(self, parts: RunParts) -> None:
        """`parts` are those of the run; its budgets are closed when `run` ends."""
        self.parts = parts
        self.store = parts.store
        self.events = parts.events
        self.roster = parts.roster
        self.model = parts.model
        self.drain = Drain()
        self._progress = parts.progress
        self._final = False
        """Whether the run will not be continued."""
        self._uncommitted = False
        """Whether an attempt has changed the model, or what is committed with it."""

    @property
    def state(self) -> RunState:
        """The state of the run after its last attempt or comparison."""
        return self._progress.state

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> FinalModel:
        """Train until the job's rounds or its limits are used up; returns the final model.

        Raises:
            UserError: the run cannot continue; it is stored as failed, with the reason.
        """
        with contextlib.closing(self.parts.budgets):
            return await self._run()

    async def _run(self) -> FinalModel:
        parts = self.parts
        status, _, final = self.store.status()
        if status == "finished" and final is not None:
            return final  # the process was killed after the last commit
        self.drain.begin()
        self.store.reopen()
        self.roster.start()
        self._progress.begin()
        saving_elapsed = asyncio.create_task(self._save_elapsed())
        try:
            with parts.journal.failure_noted():
                await self.roster.wait_for_embedded()
                await self.roster.wait_for_datacenters()
                reason = "all rounds are done"
                while self.state.round < parts.job.rounds:
                    self.drain.check()
                    # First handle participants that have joined or left.
                    await parts.clock.sleep(0.0)
                    await self._account()
                    decision = await self._decide()
                    stop = await self._round(decision)
                    if saving_elapsed.done():
                        saving_elapsed.result()  # raises: the disk is full, for example
                    if stop is not None:
                        reason = stop.reason
                        next_ = self.state.round + 1
                        parts.journal.publish(
                            RunStopped(round=next_, reason=reason, decision=decision)
                        )
                        break
                # All rounds are committed, and what is left ends by itself.
                self.drain.hold()
                final = await self._finish(reason)
                self._final = True
        finally:
            await parts.federated.stop()
            saving_elapsed.cancel()
            await self.roster.stop(self._final)
        return final

    def abandon(self) -> None:
        """The run will not be resumed: datacenters may delete its checkpoints when it ends."""
        self._final = True

    async def _account(self) -> None:
        """Have the epsilons of all devices that are connected found before they are asked for.

        A charge has changed them; those of a device that joins are found while it opens the run.
        """
        if (budget := self.parts.budgets.devices) is not None:
            await budget.account(list(self.parts.link.peers))

    async def _save_elapsed(self) -> None:
        """Store the elapsed time regularly, so that a crash does not lose long waits."""
        while True:
            await asyncio.sleep(SAVE_ELAPSED_SECONDS)
            self.store.save_elapsed(self._progress.elapsed)

    # -- decide ------------------------------------------------------------------------------------

    async def _decide(self) -> Decision:
        """The next decision; one that a crash interrupted is taken from the log."""
        parts = self.parts
        if (interrupted := self.state.cut_short) is not None:
            # Deciding anew could give another plan, and devices may have unmasked a sum
            # for this one.
            await parts.cohorts.repeat(interrupted)
            self._progress.state = dataclasses.replace(self.state, cut_short=None)
            return interrupted.decision
        return await decide(parts.policy, parts.job.strategy.policy, parts.limits, self._compare)

    async def _compare(self, question: Compare) -> None:
        """Have devices compare models; the result is in the next observation.

        Raises:
            RoundFailed: too few devices answered, in all attempts.
        """
        try:
            await self.parts.comparisons.answer(question, self.drain)
        except RoundFailed:
            await self._account()  # it was charged all the same
            raise
        await self._account()

    # -- one round ---------------------------------------------------------------------------------

    async def _round(self, decision: Decision) -> Stop | None:
        """Attempt a round until it is committed, or the job's attempts are used up.

        Returns the stop that ends the run instead, if the policy or a limit asks for one.

        Raises:
            CannotContinue: participants are missing, or the attempts are used up.
        """
        decided = decision.answer
        if isinstance(decided, Stop):
            return decided
        parts = self.parts
        plan: Plan = decided

        async def attempt() -> Stop | None:
            nonlocal plan
            await self._undo()
            await self._account()
            # Each attempt begins with the plan as it was decided: what took its place when only
            # the datacenter could change the model need not be needed again.
            ready = await parts.readiness.wait(self.state.round + 1, decided, self._start_hash)
            if isinstance(ready, Stop):
                return ready
            plan = ready
            self._progress.begin_attempt()
            with self.drain.held():
                await self._attempt(dataclasses.replace(decision, answer=plan), plan)
            return None

        def note_failure(error: RoundFailed, last: bool) -> None:
            self._progress.state = parts.log.fail(
                self.state, plan, error, time=self._progress.attempt_time(), given_up=last
            )

        try:
            return await Retries(parts.job, parts.clock).until_done(
                attempt, note_failure, self.drain
            )
        except GivenUp as given_up:
            mend = ""
            if isinstance(given_up.failure, AttemptFailed) and given_up.failure.task_failures:
                mend = MEND_TASK
            elif self._has_refused_sum(given_up.failure):
                mend = f"; devices have unmasked a sum that was refused: {MEND_SUM}"
            raise CannotContinue(
                f"round {self.state.round + 1} failed {given_up.attempts} times; the last "
                f"time because: {given_up}{mend}"
            ) from None

    def _has_refused_sum(self, failure: RoundFailed) -> bool:
        """Whether attempts have failed that bind devices: the server refused what they unmasked."""
        log = self.store.unmaskings
        refused = log.has_refused_sum(self.store.run_id, self.state.round + 1)
        return refused and isinstance(failure, AttemptFailed)

    def _start_hash(self, plan: Plan) -> bytes | None:
        """SHA-256 of the model that a plan starts from; None if no device can have it."""
        versions = self.parts.versions
        # The checkpoints of these two are older, after a round whose model only a datacenter has.
        if plan.start in (CURRENT, SERVED):
            if self.state.model_in_datacenter:
                return None
            return versions.sha256(plan.start, self.state.models)
        if plan.start == INITIAL:
            return versions.initial_sha256
        return versions.sha256(plan.start, self.state.models) or None

    async def _undo(self) -> None:
        """Return to the last commit, if an attempt has failed after its first change.

        From disk, as a resumed run does: a copy in memory would be as large as the model and the
        state of its optimizer, in each round, for what hardly ever happens.

        Raises:
            UserError: a checkpoint of the last commit is damaged.
        """
        if not self._uncommitted:
            return
        await asyncio.to_thread(self.parts.versions.undo, self.state)
        self.parts.held.forget()
        self._uncommitted = False

    async def _attempt(self, decision: Decision, plan: Plan) -> None:
        """One attempt at the next round, from invitations to commit."""
        parts = self.parts
        assigned = resolved_in_turn(
            job=parts.job,
            state=self.state,
            roster=self.roster,
            cohorts=parts.cohorts,
            busy=parts.federated.busy,
            plan=plan,
            model_hash=self._start_hash(plan),
            turn=parts.link.turn,
        )
        async with self.drain.during(assigned) as spec:
            self._progress.begin_attempt()  # the wait for other jobs is not the attempt's
            self._refuse_too_few(decision, spec)
            # Epsilon is charged before anybody is asked: a crash may lose work, but no charge.
            with parts.budgets.charged(spec):
                await self._carry_out(decision, spec)

    def _refuse_too_few(self, decision: Decision, spec: RoundSpec) -> None:
        """Refuse an attempt that has too few devices; by the log, too, it has asked nobody.

        Raises:
            AttemptFailed: it has.
        """
        if spec.plan.regime == "datacenter":
            return
        try:
            self.parts.federated.check_devices(spec)
        except AttemptFailed:
            self.parts.log.plan(decision, dataclasses.replace(spec, cohort={}, datacenters=[]))
            raise

    async def _carry_out(self, decision: Decision, spec: RoundSpec) -> None:
        parts = self.parts
        # In the log before anybody is asked, so that a crash is followed by the same attempt.
        planned = parts.log.plan(decision, spec)
        if not (spec.single_datacenter and spec.datacenter_has_model):
            await self._load_start(spec.plan.start, planned)
        results = await parts.trainer.train(spec)
        try:
            await self._merge_and_commit(spec, results)
        except AttemptFailed:
            raise
        except RoundFailed as failed:
            # The participants have trained all the same: their receipts have the cost.
            raise AttemptFailed(str(failed), results.receipts) from failed

    async def _merge_and_commit(self, spec: RoundSpec, results: TrainingResult) -> None:
        parts = self.parts
        self._uncommitted = True
        await parts.merger.merge(spec, results)
        evaluated, saved = await self._evaluate_and_save(spec, results)
        saved["models"] = parts.versions.with_best(saved["models"], self.state, evaluated.metrics)
        saved |= parts.budgets.saved()  # with the charges of the evaluation
        self._progress.state = parts.log.commit(
            self.state,
            spec,
            results,
            evaluated=evaluated,
            saved=saved,
            averaged=self.model.averaged,
            time=self._progress.attempt_time(),
        )
        self._uncommitted = False
        if spec.model_stays:
            self.model.leave()

    async def _evaluate_and_save(
        self, spec: RoundSpec, results: TrainingResult
    ) -> tuple[Evaluated, dict[str, Any]]:
        """Evaluate the next model while its checkpoints are written."""
        evaluating = asyncio.create_task(self.parts.evaluator.evaluate(spec, results))
        saving = asyncio.create_task(asyncio.to_thread(self._save, spec))
        try:
            evaluated, saved = await asyncio.gather(evaluating, asyncio.shield(saving))
        except BaseException:
            # Nothing of an attempt goes on after it. A thread cannot be cancelled, and what it
            # writes could meet the files of the next attempt.
            evaluating.cancel()
            await asyncio.gather(evaluating, saving, return_exceptions=True)
            raise
        return evaluated, saved

    # -- the model ---------------------------------------------------------------------------------

    async def _load_start(self, start: str, planned: PlannedAttempt) -> None:
        """Load the model that a round starts from; repeated attempts load the same one."""
        parts = self.parts
        if {CURRENT, SERVED} & set(start.split("+")):
            try:
                await parts.held.fetch()
            except RoundFailed as error:  # only the datacenter with the model was asked
                receipts = error.receipts if isinstance(error, AttemptFailed) else ()
                asked = [receipt.participant for receipt in receipts]
                self.store.plan(dataclasses.replace(planned, invited=[], datacenters=asked))
                raise
        if start != CURRENT:
            model = await asyncio.to_thread(parts.versions.read, start, self.state.models)
            self._uncommitted = True
            await asyncio.to_thread(self.model.restart, model)

    def _save(self, spec: RoundSpec) -> dict[str, Any]:
        """Write the round's checkpoints; returns the fields of `RunState` that they change."""
        versions = self.parts.versions
        models = versions.write(
            spec.round, spec.plan, self.state.models, only_in_datacenter=spec.model_stays
        )
        # A datacenter trains with an optimizer of its own; the server's has not stepped.
        if spec.single_datacenter and not spec.plan.reset_optimizer:
            return {"models": models}
        optimizer, numbers = versions.write_optimizer(spec.round)
        return {"models": models, "optimizer": optimizer, "optimizer_numbers": numbers}

    # -- the end -----------------------------------------------------------------------------------

    async def _finish(self, reason: str) -> FinalModel:
        """Write and evaluate the served model."""
        parts = self.parts
        try:
            await parts.held.fetch()
        except RoundFailed as error:
            raise CannotContinue(f"the final model could not be fetched: {error}") from None
        last = await asyncio.to_thread(parts.versions.load_delivered, self.state)
        keep = parts.job.evaluation.keep_best
        wanted = parts.job.evaluation.deliver == "best"
        chosen = wanted and BEST in self.state.models
        if wanted and not chosen and keep is not None:
            reason += f"; no round had a value of {keep.name}, so the last model is delivered"
        path = self.store.write_final(self.model.served_payload)
        final = FinalModel(
            metrics=(last.metrics if last else {})
            or await asyncio.to_thread(parts.evaluator.central),
            model_sha256=self.model.served_sha256,
            model_path=str(path),
            round=last.round if last else 0,
            best=chosen,
        )
        parts.journal.finish(reason, spent=self.state.spent, final=final)
        return final
