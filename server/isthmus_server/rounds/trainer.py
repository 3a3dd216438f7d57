"""Train one attempt at a planned round.

In a hybrid round both regimes train at the same time; if one fails the other is cancelled. With
`merge="transfer"` the datacenters compute a gradient first, which the devices then train with.
"""

from __future__ import annotations

import dataclasses

from isthmus_privacy.secagg.ranges import USUAL_CLIP
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes import gradient_measurement
from isthmus_server.regimes.attempt_result import TrainingResult, with_earlier
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec, DatacenterResult
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.rounds.concurrent_regimes import ConcurrentRegimes
from isthmus_server.rounds.gradient_transfer import GradientTransfer
from isthmus_server.rounds.model_publication import ModelPublication, Offer
from isthmus_server.rounds.running_statistics import RunningStatistics
from isthmus_server.strategy.round_spec import RoundSpec


class Trainer:
    """Runs attempts at rounds; `ModelMerger` computes the next model from their results."""

    def __init__(
        self,
        model: GlobalModel,
        federated: FederatedRegime,
        datacenter: DatacenterRegime,
        publication: ModelPublication,
        statistics: RunningStatistics,
    ) -> None:
        """Prepare.

        Args:
            model: the global model.
            federated: trains on devices.
            datacenter: trains in datacenters.
            publication: of the model.
            statistics: refuses attempts whose running statistics nobody could compute.
        """
        self._model = model
        self._federated = federated
        self._datacenter = datacenter
        self._publication = publication
        self._statistics = statistics
        self._regimes = ConcurrentRegimes(federated)
        self._transfer = GradientTransfer(
            job=federated.context.job,
            model=model,
            datacenter=datacenter,
            regimes=self._regimes,
            publication=publication,
        )

    async def train(self, spec: RoundSpec) -> TrainingResult:
        """Run one attempt.

        Raises:
            AttemptFailed: a regime failed; with the receipts of all participants.
            JobError: the plan transfers gradients to devices that cannot use them.
        """
        # Whatever can be refused is refused before a participant works, and is paid for it.
        self._statistics.check(spec)
        # A control variate is no state of an optimizer: the devices keep theirs, whose mean it is.
        keeps = spec.federated.control_variates is not None
        if self._federated.extension is not None and spec.plan.reset_optimizer and not keeps:
            self._federated.extension.reset()
        if spec.transfers:
            self._transfer.check()
        gradients = TrainingResult()
        if spec.gradient_sources:
            self._federated.check(self._attempt(spec, Offer(self._model.blob)))
            gradients = await self._transfer.gradients(spec)
        try:
            if spec.transfers:
                result = await self._train_with_transfer(spec, gradients)
            else:
                result = await self._train_at_once(spec, gradients)
        except AttemptFailed as failed:
            # The gradients were computed all the same: their receipts have the cost.
            receipts = with_earlier(gradients.receipts, failed.receipts)
            raise AttemptFailed(
                str(failed), receipts, excused=failed.excused, task_failures=failed.task_failures
            ) from failed
        result.datacenter_gradient = gradients.datacenter_gradient
        result.gradient_by_datacenter = gradients.gradient_by_datacenter
        # A participant has one receipt for an attempt. Datacenters that trained afterwards have it
        # from that; of the others the receipts stay, but not the vectors: a gradient is no model,
        # and would be merged as one.
        if result.datacenters:
            result.earlier = gradients.receipts
        else:
            result.datacenters = [
                dataclasses.replace(each, vector=None) for each in gradients.datacenters
            ]
        return result

    async def _train_at_once(self, spec: RoundSpec, gradients: TrainingResult) -> TrainingResult:
        """Devices and datacenters train at the same time, as far as the round has both."""

        async def train_datacenter(name: str) -> DatacenterResult:
            model = None if spec.datacenter_has_model else self._model.blob
            return await self._datacenter.train(name, spec, model)

        with_devices = spec.plan.regime != "datacenter"
        if not with_devices and spec.datacenter_has_model:
            return await self._regimes.run(spec.datacenters, train_datacenter, None)
        offering = self._publication.current(
            summing=with_devices, devices=with_devices, leaves=spec.model_stays
        )
        async with offering as offer:
            devices = None
            if with_devices:
                devices = self._federated.train(self._attempt(spec, offer, gradients))
            return await self._regimes.run(spec.datacenters, train_datacenter, devices)

    async def _train_with_transfer(
        self, spec: RoundSpec, gradients: TrainingResult
    ) -> TrainingResult:
        """Devices train, and add the datacenters' weighted gradient to each local step's."""
        gradient = self._transfer.weighted(spec, gradients)
        vectors = (self._model.vector, gradient)
        first = self._model.blob.sha256
        async with self._publication.bundle(vectors, 2, first) as offer:
            result = await self._federated.train(self._attempt(spec, offer, gradients))
        return TrainingResult(federated=result, gradient=gradient)

    def _attempt(
        self, spec: RoundSpec, offer: Offer, gradients: TrainingResult | None = None
    ) -> AttemptSpec:
        scale = 0.0
        if spec.plan.measure_gradients and gradients is not None:
            datacenter = gradients.datacenter_gradient
            # A range that is found takes in the gradients too: then any reference will do.
            clip = spec.federated.clip or USUAL_CLIP
            scale = gradient_measurement.scale_for(clip, datacenter, spec.last_gradients)
        return AttemptSpec(
            round=spec.round,
            attempt=spec.attempt,
            model=offer.blob,
            first_model=offer.first_model,
            changes=offer.changes,
            cohort=spec.cohort,
            settings=spec.federated,
            exact=spec.exact,
            start=None if self._federated.extension is None else self._model.vector,
            with_gradient=spec.transfers,
            gradient_scale=scale,
            position=spec.position,
            groups=spec.groups,
            group_weights=spec.plan.group_weights,
            draw=spec.draw,
            selected_ppm=spec.selected_ppm,
            shortage=spec.shortage,
        )
