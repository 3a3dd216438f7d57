"""One try at a planned round: everyone is asked, and what comes back is merged.

Both regimes work at once where the plan says so; if one fails the other is stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from isthmus.errors import RoundFailed, UserError
from isthmus.job import Job
from isthmus_server import merge
from isthmus_server.link import Link
from isthmus_server.model import GlobalModel
from isthmus_server.outcome import AttemptFailed, DatacenterResult, FederatedResult
from isthmus_server.receipts import Receipt
from isthmus_server.regimes import Datacenter, Fleet
from isthmus_server.strategy.policy import Plan
from isthmus_server.work import Work


@dataclasses.dataclass
class Trained:
    """What the regimes of one attempt gave."""

    federated: FederatedResult | None = None
    datacenters: list[DatacenterResult] = dataclasses.field(default_factory=list)
    norms: dict[str, float] = dataclasses.field(default_factory=dict)
    """2-norm of each regime's pseudo-gradient that came here."""
    cosine: float | None = None
    """Between the two."""

    @property
    def receipts(self) -> list[Receipt]:
        """Of everyone who was invited."""
        parts: list[DatacenterResult | FederatedResult] = [*self.datacenters]
        if self.federated is not None:
            parts.append(self.federated)
        return [receipt for part in parts for receipt in part.receipts]

    @property
    def training(self) -> dict[str, dict[str, float]]:
        """The figures of the training itself, by regime; of several datacenters, their mean."""
        found = {}
        if self.federated is not None:
            found["federated"] = dict(self.federated.training)
        if self.datacenters:
            names = set.intersection(*(set(one.training) for one in self.datacenters))
            found["datacenter"] = {
                name: sum(one.training[name] for one in self.datacenters) / len(self.datacenters)
                for name in sorted(names)
            }
        return found


class Trainer:
    """Has rounds trained, and makes the next model of what comes back."""

    def __init__(
        self, job: Job, link: Link, model: GlobalModel, fleet: Fleet, datacenter: Datacenter
    ) -> None:
        self.job = job
        self.link = link
        self.model = model
        self.fleet = fleet
        self.datacenter = datacenter

    async def train(self, work: Work) -> Trained:
        """Ask everyone and wait.

        Raises:
            AttemptFailed: somebody without whom there is no round failed; with all receipts.
            UserError: the plan asks for a merge that this version cannot do.
        """
        if work.plan.regime == "hybrid":
            self._how(work.plan)
        guest = self.fleet.guest
        if guest is not None and work.plan.reset_optimizer:
            guest.forget()
        content = self.model.content
        self.link.publish(content, self.model.payload)
        ranks: list[asyncio.Task[DatacenterResult]] = []
        devices: asyncio.Task[FederatedResult] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                ranks += [
                    group.create_task(self._ask_ranks(name, work), name=name)
                    for name in work.datacenters
                ]
                if work.plan.regime != "datacenter":
                    devices = group.create_task(self._ask_devices(work))
        except* RoundFailed as failures:
            raise self._as_one(failures, ranks, devices) from None
        finally:
            self.link.retract(content)
        return Trained(
            federated=devices.result() if devices is not None else None,
            datacenters=[task.result() for task in ranks],
        )

    async def _ask_devices(self, work: Work) -> FederatedResult:
        return await self.fleet.train(
            work.round,
            work.attempt,
            self.model.content,
            work.cohort,
            work.federated,
            self.model.vector,
        )

    async def _ask_ranks(self, name: str, work: Work) -> DatacenterResult:
        return await self.datacenter.train(
            name,
            work.round,
            work.attempt,
            from_step=work.from_step,
            until_step=work.from_step + work.steps,
            model=None if work.model_is_there else self.model.content,
            evaluate=work.evaluate,
            hand_back=work.hand_back,
        )

    def _as_one(
        self,
        failures: BaseExceptionGroup[RoundFailed],
        ranks: Sequence[asyncio.Task[DatacenterResult]],
        devices: asyncio.Task[FederatedResult] | None,
    ) -> AttemptFailed:
        """All failures of an attempt as one, with the receipts of those that were stopped too."""
        reasons: list[str] = []
        receipts: list[Receipt] = []
        for error in failures.exceptions:
            reasons.append(str(error))
            if isinstance(error, AttemptFailed):
                receipts += error.receipts
        stopped = "the attempt failed elsewhere"
        for task in ranks:
            if task.cancelled():
                receipts.append(
                    Receipt(
                        participant=task.get_name(),
                        regime="datacenter",
                        status="dropped",
                        reason=stopped,
                    )
                )
        if devices is not None and devices.cancelled():
            receipts += self.fleet.stopped(stopped)
        finished: list[asyncio.Task[Any]] = [*ranks, *([devices] if devices is not None else [])]
        for task in finished:
            if task.done() and not task.cancelled() and task.exception() is None:
                receipts += task.result().receipts
        return AttemptFailed("; ".join(reasons), receipts)

    # -- merge -------------------------------------------------------------------------------------

    def merge(self, work: Work, trained: Trained) -> None:
        """Make the next model.

        A round of one datacenter is plain training: its result *is* the next model, and stays
        there until somebody else needs it. Where devices took part, or several datacenters, the
        server optimizer steps on the pseudo-gradient that theirs are merged to.
        """
        plan, model = work.plan, self.model
        if trained.federated is not None and trained.federated.strategy_state is not None:
            assert self.fleet.guest is not None
            self.fleet.guest.state = trained.federated.strategy_state
        alone = trained.federated is None and len(trained.datacenters) == 1
        ends = [one.vector for one in trained.datacenters if one.vector is not None]
        theirs = self._of_datacenters(trained, keep=alone) if ends else None
        fleet = trained.federated.pseudo_gradient if trained.federated is not None else None
        vectors = {"federated": fleet, "datacenter": theirs}
        present = {name: vector for name, vector in vectors.items() if vector is not None}
        trained.norms, trained.cosine = merge.geometry(present)
        if plan.reset_optimizer:
            model.reset_optimizer()
        if not alone:
            merged = self._merged(plan, fleet, theirs)
            if plan.step_scale != 1:
                merged.mul_(plan.step_scale)
            model.step(merged)
        elif ends:
            model.replace(ends[0])
        model.average()

    def _how(self, plan: Plan) -> str:
        """How the two sides of a hybrid round are joined.

        Raises:
            UserError: in a way that this version cannot.
        """
        how = plan.merge or self.job.strategy.merge
        if how == "transfer":
            raise UserError(
                'merge="transfer" needs devices that add the datacenter\'s gradient to their '
                'steps, and these do not yet; use merge="weighted" or "projected"'
            )
        return how

    def _of_datacenters(self, trained: Trained, *, keep: bool) -> torch.Tensor:
        """Their mean pseudo-gradient by examples, float32 (N); in their memory unless `keep`."""
        parts = []
        for one in trained.datacenters:
            assert one.vector is not None  # where one hands its model back, all do
            out = None if keep else one.vector
            examples = sum(receipt.examples for receipt in one.receipts)
            parts.append((torch.sub(self.model.vector, one.vector, out=out), examples))
        return merge.mean(parts)

    def _merged(
        self, plan: Plan, fleet: torch.Tensor | None, theirs: torch.Tensor | None
    ) -> torch.Tensor:
        if fleet is None or theirs is None:
            merged = fleet if fleet is not None else theirs
            assert merged is not None
            return merged
        if self._how(plan) == "projected":
            theirs = merge.project(theirs, fleet)
        return merge.weigh(fleet, theirs, share=self.job.strategy.datacenter_weight)
