"""One try at a planned round: everyone is asked, and what comes back is merged.

Both regimes work at once where the plan says so; if one fails the other is stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from isthmus.errors import IsthmusError, JobError, RoundFailed
from isthmus.job import Job
from isthmus.transport.blobs import InFile
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_server.model import merge
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.model.mmap_buffer import LARGE_BYTES
from isthmus_server.regimes.datacenter import DatacenterRegime, FederatedRegime
from isthmus_server.regimes.results import AttemptFailed, DatacenterResult, FederatedResult
from isthmus_server.storage.receipts import Receipt
from isthmus_server.strategy.policy import Plan
from isthmus_server.strategy.round_spec import RoundSpec
from isthmus_server.transport.bundle import published
from isthmus_server.transport.link import Link


@dataclasses.dataclass
class Trained:
    """What the regimes of one attempt gave."""

    federated: FederatedResult | None = None
    datacenters: list[DatacenterResult] = dataclasses.field(default_factory=list)
    norms: dict[str, float] = dataclasses.field(default_factory=dict)
    """2-norm of each regime's pseudo-gradient that came here."""
    cosine: float | None = None
    """Between the two."""
    gradient: torch.Tensor | None = None
    """What devices added to their gradients, float32 (N)."""

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

    def to_json(self) -> dict[str, Any]:
        """What the log and the report say of the training; a profile for each datacenter."""
        found: dict[str, Any] = {
            "training": self.training,
            "norms": self.norms,
            "cosine": self.cosine,
        }
        if self.datacenters:
            profiles = {one.receipts[0].participant: dict(one.profile) for one in self.datacenters}
            found["profile"] = profiles
        return found


class Trainer:
    """Has rounds trained, and makes the next model of what comes back."""

    def __init__(
        self,
        job: Job,
        link: Link,
        model: GlobalModel,
        fleet: FederatedRegime,
        datacenter: DatacenterRegime,
    ) -> None:
        self.job = job
        self.link = link
        self.model = model
        self.fleet = fleet
        self.datacenter = datacenter

    async def train(self, work: RoundSpec) -> Trained:
        """Ask everyone and wait.

        Raises:
            AttemptFailed: somebody without whom there is no round failed; with all receipts.
        """
        guest = self.fleet.guest
        if guest is not None and work.plan.reset_optimizer:
            guest.forget()
        if work.transfers:
            return await self._transfer(work)
        alone = work.plan.regime == "datacenter"
        async with self._published(summing=not alone) as blob:
            devices = None if alone else self._ask_devices(work, blob)
            return await self._together(work, self._ask_ranks, devices)

    async def _transfer(self, work: RoundSpec) -> Trained:
        """One-way gradient transfer of Mixed FL (Augenstein et al. 2022).

        The datacenters' mean gradient at the round's model comes first, times the transfer weight;
        then devices train, and add it to the gradient of each of their steps.
        """
        self._check_transfer()
        async with self._published(summing=False):
            first = await self._together(work, self._ask_gradient, None)
        weight = work.plan.transfer_weight
        parts = [(one.vector, one.examples) for one in first.datacenters if one.vector is not None]
        gradient = merge.mean(parts)
        gradient.mul_(self.job.strategy.transfer_weight if weight is None else weight)
        vectors, spool = (self.model.vector, gradient), self.fleet.federation.spool
        async with published(self.link, self.model.layout, spool, vectors, 2) as blob:
            try:
                found = await self._ask_devices(work, blob)
            except AttemptFailed as failed:
                receipts = [*first.receipts, *failed.receipts]
                raise AttemptFailed(str(failed), receipts) from failed
        ranks = [dataclasses.replace(one, vector=None) for one in first.datacenters]
        return Trained(federated=found, datacenters=ranks, gradient=gradient)

    def _check_transfer(self) -> None:
        """Refuse the transfer of gradients to a Flower app.

        Raises:
            JobError: the devices run a Flower app, which cannot add a gradient to its own.
        """
        if self.job.federated.flower is not None and self.job.federated.flower.app is not None:
            raise JobError(
                'merge="transfer" has devices add a gradient to their own, which a Flower app '
                "(federated.flower.app) knows nothing of; use another merge, or leave the app out"
            )

    @asynccontextmanager
    async def _published(self, *, summing: bool) -> AsyncIterator[link_pb2.Blob]:
        """Have the model for participants to fetch, for as long as the block lasts.

        A large one rests where updates are added up meanwhile, and is sent from its file: their sum
        has the memory. A Flower strategy is shown the model itself.
        """
        model = self.model
        blob = await asyncio.to_thread(lambda: model.blob)
        try:
            if summing and blob.size >= LARGE_BYTES and self.fleet.guest is None:
                await to_the_end(asyncio.to_thread(model.rest, self.fleet.federation.spool))
            resting = model.resting
            payload = model.payload if resting is None else InFile(resting, blob.size)
            self.link.publish(blob, payload)
            yield blob
        finally:
            self.link.retract(blob)
            await to_the_end(asyncio.to_thread(model.wake))

    async def _together(
        self,
        work: RoundSpec,
        ask: Callable[[str, RoundSpec], Coroutine[Any, Any, DatacenterResult]],
        fleet: Coroutine[Any, Any, FederatedResult] | None,
    ) -> Trained:
        """Everyone at once; if one fails the others are stopped."""
        ranks: list[asyncio.Task[DatacenterResult]] = []
        devices: asyncio.Task[FederatedResult] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                ranks += [
                    group.create_task(ask(name, work), name=name) for name in work.datacenters
                ]
                if fleet is not None:
                    devices = group.create_task(fleet)
        except* RoundFailed as failures:
            raise self._as_one(failures, ranks, devices) from None
        except* (IsthmusError, OSError) as others:
            raise others.exceptions[0] from None
        return Trained(
            federated=devices.result() if devices is not None else None,
            datacenters=[task.result() for task in ranks],
        )

    async def _ask_devices(self, work: RoundSpec, blob: link_pb2.Blob) -> FederatedResult:
        return await self.fleet.train(
            work.round,
            work.attempt,
            blob,
            work.cohort,
            work.federated,
            None if self.fleet.guest is None else self.model.vector,
            work.transfers,
        )

    async def _ask_gradient(self, name: str, work: RoundSpec) -> DatacenterResult:
        return await self.datacenter.mean_gradient(
            name,
            work.round,
            work.attempt,
            from_step=work.gradient_step,
            until_step=work.gradient_step + work.steps,
            model=self.model.blob,
        )

    async def _ask_ranks(self, name: str, work: RoundSpec) -> DatacenterResult:
        return await self.datacenter.train(
            name,
            work.round,
            work.attempt,
            from_step=work.from_step,
            until_step=work.from_step + work.steps,
            model=None if work.datacenter_has_model else self.model.blob,
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

    def merge(self, work: RoundSpec, trained: Trained) -> None:
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
        if trained.gradient is not None:
            vectors["datacenter"] = trained.gradient
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

    def _of_datacenters(self, trained: Trained, *, keep: bool) -> torch.Tensor:
        """Their mean pseudo-gradient by examples, float32 (N); in their memory unless `keep`."""
        parts = []
        for one in trained.datacenters:
            assert one.vector is not None  # where one hands its model back, all do
            out = None if keep else one.vector
            parts.append((torch.sub(self.model.vector, one.vector, out=out), one.examples))
        return merge.mean(parts)

    def _merged(
        self, plan: Plan, fleet: torch.Tensor | None, theirs: torch.Tensor | None
    ) -> torch.Tensor:
        if fleet is None or theirs is None:
            merged = fleet if fleet is not None else theirs
            assert merged is not None
            return merged
        if (plan.merge or self.job.strategy.merge) == "projected":
            theirs = merge.project(theirs, fleet)
        return merge.weigh(fleet, theirs, share=self.job.strategy.datacenter_weight)
