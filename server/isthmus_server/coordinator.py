"""The round loop: observe, plan, run, merge, evaluate, commit.

Data goes one way: job -> plan -> updates -> model -> store -> views. Read `Coordinator.run` first;
everything else on this page is one of its steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from isthmus.errors import IsthmusError, RoundFailed, UserError
from isthmus.task import load_task
from isthmus.wire import link_pb2
from isthmus_server.clock import Clock
from isthmus_server.link import Link
from isthmus_server.model import GlobalModel
from isthmus_server.outcome import AttemptFailed, DatacenterResult, FederatedResult
from isthmus_server.receipts import Receipt, attempt_row
from isthmus_server.regimes import Datacenter, Fleet
from isthmus_server.roster import Roster
from isthmus_server.store import Resume, Store
from isthmus_server.strategy.cohort import select
from isthmus_server.strategy.decision import Decision, decide
from isthmus_server.strategy.observation import observe
from isthmus_server.strategy.policy import (
    Compare,
    Observation,
    Plan,
    Stop,
    load_policy,
)

log = logging.getLogger(__name__)

Watch = Callable[[str, Mapping[str, Any]], None]
"""Told of everything that happens, as `(kind, data)`; views are built on it."""


@dataclasses.dataclass
class Trained:
    """What the regimes of one attempt gave, before it is merged."""

    federated: FederatedResult | None = None
    datacenter: DatacenterResult | None = None
    datacenter_steps: int = 0

    @property
    def receipts(self) -> list[Receipt]:
        """Of everyone who was invited."""
        parts: list[DatacenterResult | FederatedResult | None] = [self.datacenter, self.federated]
        return [receipt for part in parts if part is not None for receipt in part.receipts]

    @property
    def training(self) -> dict[str, dict[str, float]]:
        """The figures of the training itself, by regime."""
        parts = (("federated", self.federated), ("datacenter", self.datacenter))
        return {name: dict(part.training) for name, part in parts if part is not None}


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
        watch: Watch = lambda kind, data: None,
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
        self.watch = watch
        self.clock = clock or Clock()
        self._began = self.clock.now()
        data = store.base / self.job.task.data if self.job.task.data else None
        task = load_task(self.job.task.source, self.job.task.settings, base=store.base, data=data)
        self.policy = load_policy(self.job.strategy)  # its module may lie beside the task's
        self.model = GlobalModel(task, self.job.seed, self.job.strategy.server_optimizer)
        self.at = self._restore(store.resume_point())
        self.roster = Roster(
            link,
            self.job,
            link_pb2.OpenRun(
                run_id=store.run_id,
                job=self.job.model_dump_json(),
                base=str(store.base),
                layout=self.model.layout.header,
            ),
            self._note,
        )
        layout = self.model.layout
        self.fleet = Fleet(link, self.job, store.run_id, layout, store.directory)
        self.datacenter = Datacenter(link, self.job, store.run_id, layout)

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> Mapping[str, Any]:
        """Train until the job's rounds or budget are used up; returns the final figures.

        Raises:
            UserError: the run cannot go on; it is stored as failed, with the reason.
        """
        self.store.reopen()
        self.roster.start()
        self._began = self.clock.now() - self.at.elapsed
        try:
            await self.roster.wait_for_embedded()
            reason = "all rounds are done"
            while self.at.round < self.job.rounds:
                decision = await self._decide()
                if isinstance(decision.answer, Stop):
                    reason = decision.answer.reason
                    break
                await self._round(decision, decision.answer)
            final = await self._finish(reason)
        except IsthmusError as error:
            self.store.finish("failed", str(error), None)
            self._note("failed", {"reason": str(error)})
            raise
        finally:
            await self.roster.stop()
        return final

    async def _round(self, decision: Decision, plan: Plan) -> None:
        """Try a round until it is committed, or the job's attempts are used up."""
        round_ = self.at.round + 1
        for tries in itertools.count(1):
            attempt = self.at.attempts + 1
            await self.roster.require(plan.regime)
            started = self.clock.now()
            try:
                await self._one_attempt(decision, plan, round_, attempt, started)
                return
            except RoundFailed as error:
                receipts = error.receipts if isinstance(error, AttemptFailed) else []
                self._record_failure(plan, round_, attempt, started, str(error), receipts)
                if tries >= self.job.attempts:
                    raise UserError(
                        f"round {round_} failed {tries} times; the last time because: {error}"
                    ) from None

    async def _one_attempt(
        self, decision: Decision, plan: Plan, round_: int, attempt: int, started: float
    ) -> None:
        federated = plan.regime in ("federated", "hybrid")
        cohort = self._cohort(round_, plan) if federated else {}
        self.store.plan(
            round_,
            attempt,
            {**dataclasses.asdict(plan), "invited": sorted(cohort)},
            decision.seen,
        )
        self._note(
            "round",
            {
                "round": round_,
                "attempt": attempt,
                "regime": plan.regime,
                "reason": plan.reason,
                "invited": len(cohort) + (plan.regime != "federated"),
            },
        )
        if federated and self.at.model_in_datacenter:
            await self._bring_home()
        trained = await self._train(plan, round_, attempt, cohort)
        self._merge(plan, trained)
        evaluation = await self._evaluate(plan, round_, trained)
        self._commit(plan, round_, attempt, trained, evaluation, started)

    # -- observe and plan --------------------------------------------------------------------------

    def _observe(self) -> Observation:
        now = self.clock.now()
        return observe(
            self.job,
            self.at.outcomes,
            spent=self.at.spent,
            device_bytes=self.at.device_bytes,
            state=self.at.policy_state,
            clients_ready=len(self.roster.clients),
            datacenter_ready=bool(self.roster.datacenters),
            model_bytes=self.model.layout.nbytes,
            now=now,
            elapsed=now - self._began,
        )

    async def _decide(self) -> Decision:
        if self.at.decided is not None:
            decision = Decision.from_log(self.at.decided["plan"], self.at.decided["observation"])
            self.at = dataclasses.replace(self.at, decided=None)
            return decision
        return await decide(
            self.policy,
            self.job.strategy.policy,
            self._observe,
            self._visit,
            self.clock,
            self._note,
            secure=self.job.federated.secure_aggregation,
        )

    async def _visit(self, asked: Compare) -> None:
        raise RoundFailed("visits are not wired in yet")

    def _price(self, devices: int, steps: int) -> float:
        prices = self.job.prices
        return devices * prices.client_update + steps * prices.datacenter_step

    def _cohort(self, round_: int, plan: Plan) -> dict[str, int]:
        names = select(
            self.roster.clients,
            cohort=plan.cohort or self.job.federated.cohort,
            over_selection=self.job.federated.over_selection,
            seed=self.job.seed,
            round_=round_,
        )
        return {name: self.roster.clients[name].examples for name in names}

    # -- run ---------------------------------------------------------------------------------------

    async def _train(
        self, plan: Plan, round_: int, attempt: int, cohort: Mapping[str, int]
    ) -> Trained:
        """Both regimes at once where the plan says so; if one fails the other is stopped."""
        content = self.model.content
        self.link.publish(content, self.model.payload)
        work: list[asyncio.Task[Any]] = []
        trained = Trained()
        try:
            async with asyncio.TaskGroup() as group:
                if plan.regime != "federated":
                    trained.datacenter_steps = self.job.datacenter.steps
                    ranks = self._ask_ranks(plan, round_, attempt, content)
                    work.append(group.create_task(ranks, name="datacenter"))
                if plan.regime != "datacenter":
                    devices = self.fleet.train(round_, attempt, content, cohort)
                    work.append(group.create_task(devices, name="federated"))
        except* RoundFailed as failures:
            raise _as_one(failures, work) from None
        finally:
            self.link.retract(content)
        for task in work:
            setattr(trained, task.get_name(), task.result())
        return trained

    async def _ask_ranks(
        self, plan: Plan, round_: int, attempt: int, content: link_pb2.Content
    ) -> DatacenterResult:
        return await self.datacenter.train(
            self._datacenter_name(),
            round_,
            attempt,
            from_step=self.at.datacenter_step,
            until_step=self.at.datacenter_step + self.job.datacenter.steps,
            model=None if self.at.datacenter_current else content,
            evaluate=plan.regime == "datacenter" and self._evaluates(round_),
            hand_back=plan.regime == "hybrid",
        )

    def _datacenter_name(self) -> str:
        if not self.roster.datacenters:
            raise RoundFailed("no datacenter is connected")
        return sorted(self.roster.datacenters)[0]

    async def _bring_home(self) -> None:
        """Fetch the committed model from the datacenter, where only it is."""
        vector = await self.datacenter.export(self._datacenter_name(), self.at.datacenter_step)
        self.model.replace(vector)
        self.at = dataclasses.replace(self.at, model_in_datacenter=False)

    # -- merge and evaluate ------------------------------------------------------------------------

    def _merge(self, plan: Plan, trained: Trained) -> None:
        """Make the next model.

        A datacenter round is plain training: its result *is* the next model and stays there until
        somebody else needs it. Where devices took part, the server optimizer steps on the
        pseudo-gradient, in a hybrid round on the weighted sum of both.
        """
        if trained.federated is None:
            return
        merged = trained.federated.pseudo_gradient
        if trained.datacenter is not None:
            share = self.job.strategy.datacenter_weight
            assert trained.datacenter.vector is not None
            theirs = torch.sub(
                self.model.vector, trained.datacenter.vector, out=trained.datacenter.vector
            )
            merged.mul_(1 - share).add_(theirs, alpha=share)
        self.model.step(merged)

    def _evaluates(self, round_: int) -> bool:
        return round_ % self.job.evaluation.every == 0 or round_ == self.job.rounds

    async def _evaluate(self, plan: Plan, round_: int, trained: Trained) -> Mapping[str, float]:
        if plan.regime == "datacenter":
            assert trained.datacenter is not None
            return trained.datacenter.evaluation
        if not self._evaluates(round_):
            return {}
        return await asyncio.to_thread(self.model.evaluate, self.job.evaluation.batch_size)

    # -- commit ------------------------------------------------------------------------------------

    def _commit(
        self,
        plan: Plan,
        round_: int,
        attempt: int,
        trained: Trained,
        evaluation: Mapping[str, float],
        started: float,
    ) -> None:
        away = plan.regime == "datacenter"
        row = attempt_row(plan, round_, attempt, trained.receipts, started, self.clock.now())
        row["cost"]["price"] = self._price(
            sum(receipt.regime == "federated" for receipt in trained.receipts),
            trained.datacenter_steps,
        )
        row["metrics"] = dict(evaluation)
        row["training"] = trained.training
        if trained.datacenter is not None:
            row["profile"] = dict(trained.datacenter.profile)
        row["model_sha256"] = None if away else self.model.sha256
        tensors, numbers = self.model.optimizer_state()
        self.at = dataclasses.replace(
            self.at,
            round=round_,
            attempts=0,
            model_file=self.at.model_file
            if away
            else self.store.write_model(round_, self.model.payload),
            optimizer_file=self.at.optimizer_file
            if away
            else self.store.write_tensors(round_, tensors),
            optimizer_numbers=numbers,
            datacenter_step=self.at.datacenter_step + trained.datacenter_steps,
            datacenter_current=away,
            model_in_datacenter=away,
            policy_state=dict(plan.state),
            outcomes=[*self.at.outcomes, row],
            spent=self.at.spent + row["cost"]["price"],
            device_bytes=self.at.device_bytes + row["cost"]["device_bytes"],
        )
        resume = {
            field: getattr(self.at, field)
            for field in (
                "model_file",
                "optimizer_file",
                "optimizer_numbers",
                "datacenter_step",
                "datacenter_current",
                "model_in_datacenter",
                "policy_state",
            )
        }
        row["seconds"] = self.clock.now() - started
        row["elapsed"] = self.clock.now() - self._began
        self.store.commit(round_, attempt, {"round": row, "resume": resume})
        self._note("committed", row)

    def _record_failure(
        self,
        plan: Plan,
        round_: int,
        attempt: int,
        started: float,
        reason: str,
        receipts: Sequence[Receipt],
    ) -> None:
        row = attempt_row(plan, round_, attempt, receipts, started, self.clock.now())
        # Devices that were reached have been paid for; what the ranks did is not known.
        reached = sum(r.started for r in receipts if r.regime == "federated")
        row["cost"]["price"] = self._price(reached, 0)
        row["error"] = reason
        row["elapsed"] = self.clock.now() - self._began
        self.store.fail(round_, attempt, {"round": row})
        self.at = dataclasses.replace(
            self.at,
            attempts=attempt,
            spent=self.at.spent + row["cost"]["price"],
            device_bytes=self.at.device_bytes + row["cost"]["device_bytes"],
        )
        self._note("attempt_failed", row)

    # -- beginning and end -------------------------------------------------------------------------

    def _restore(self, at: Resume) -> Resume:
        if at.model_file is not None:
            self.store.read_model(at.model_file, self.model.payload)
            self.model.forget_content()
        if at.optimizer_file is not None or at.optimizer_numbers:
            tensors = self.store.read_tensors(at.optimizer_file) if at.optimizer_file else {}
            self.model.load_optimizer_state(tensors, at.optimizer_numbers)
        return at

    async def _finish(self, reason: str) -> Mapping[str, Any]:
        """Bring the model home, write it out and say how good it is."""
        try:
            if self.at.model_in_datacenter:
                await self._bring_home()
        except RoundFailed as error:
            raise UserError(f"the final model could not be fetched: {error}") from None
        path = self.store.write_final(self.model.payload)
        last = next((row for row in reversed(self.at.outcomes) if row["metrics"]), None)
        if last is not None and last["round"] == self.at.round:
            metrics = last["metrics"]
        else:
            metrics = await asyncio.to_thread(self.model.evaluate, self.job.evaluation.batch_size)
        final = {
            "metrics": metrics,
            "model_sha256": self.model.sha256,
            "model_path": str(path),
        }
        self.store.finish("finished", reason, final)
        self._note("finished", {"reason": reason, "spent": self.at.spent, **final})
        return final

    def _note(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind in ("joined", "ready", "left", "declined"):
            self.store.event(kind, data)
        self.watch(kind, data)


def _as_one(
    failures: BaseExceptionGroup[RoundFailed], work: Sequence[asyncio.Task[Any]]
) -> AttemptFailed:
    """All failures of an attempt as one, with every receipt there is."""
    reasons: list[str] = []
    receipts: list[Receipt] = []
    for error in failures.exceptions:
        reasons.append(str(error))
        if isinstance(error, AttemptFailed):
            receipts += error.receipts
    for task in work:
        if task.done() and not task.cancelled() and task.exception() is None:
            receipts += task.result().receipts
    return AttemptFailed("; ".join(reasons), receipts)
