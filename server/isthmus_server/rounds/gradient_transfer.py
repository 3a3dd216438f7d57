"""The datacenters' gradient at a round's model, and its transfer to devices.

One-way gradient transfer is that of Mixed FL (Augenstein et al. 2022).
"""

from __future__ import annotations

import torch

from isthmus.errors import JobError
from isthmus.job import Job
from isthmus_server.model import merge
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes.attempt_result import TrainingResult, vectors_by_name
from isthmus_server.regimes.base import DatacenterResult
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.rounds.concurrent_regimes import ConcurrentRegimes
from isthmus_server.rounds.merger import weights_of_datacenters
from isthmus_server.rounds.model_publication import ModelPublication
from isthmus_server.strategy.round_spec import RoundSpec


class GradientTransfer:
    """Has datacenters compute their mean gradient, and weighs it for the devices."""

    def __init__(
        self,
        job: Job,
        model: GlobalModel,
        datacenter: DatacenterRegime,
        regimes: ConcurrentRegimes,
        publication: ModelPublication,
    ) -> None:
        self._job = job
        self._model = model
        self._datacenter = datacenter
        self._regimes = regimes
        self._publication = publication

    def check(self) -> None:
        """Refuse a transfer that cannot work before a datacenter computes for it.

        Raises:
            JobError: devices run a Flower app, whose training Isthmus does not control, or add
                control variates.
        """
        if self._job.federated.control_variates is not None:
            raise JobError(
                'merge="transfer" has devices add a gradient to their own, where '
                "federated.control_variates adds another vector; remove one of them"
            )
        if self._job.federated.app is not None:
            raise JobError(
                'merge="transfer" has devices add a gradient to their own, which a Flower app '
                "(federated.flower.app) cannot do; use another merge, or remove the app"
            )

    async def gradients(self, spec: RoundSpec) -> TrainingResult:
        """Have the datacenters compute their mean gradient at the round's model.

        Raises:
            AttemptFailed: one of them could not.
        """

        async def mean_gradient(name: str) -> DatacenterResult:
            return await self._datacenter.mean_gradient(name, spec, self._model.blob)

        async with self._publication.current(summing=False, devices=False):
            result = await self._regimes.run(spec.gradient_sources, mean_gradient)
        parts = vectors_by_name(result.datacenters)
        merged = list(parts.values())
        if spec.plan.measure_gradients or spec.plan.datacenter_weights:
            result.gradient_by_datacenter = parts
            if len(merged) > 1:  # the mean is computed in the memory of the first
                merged[0] = merged[0][0].clone(), merged[0][1]
        result.datacenter_gradient = merge.mean_by_examples(merged)
        return result

    def weighted(self, spec: RoundSpec, gradients: TrainingResult) -> torch.Tensor:
        """The mean gradient times the transfer weight, float32 (N), which devices add to theirs.

        It is in the memory of `gradients`, unless the plan measures those.
        """
        plan = spec.plan
        gradient = gradients.datacenter_gradient
        weight = plan.transfer_weight
        weight = self._job.strategy.transfer_weight if weight is None else weight
        if plan.datacenter_weights:
            # Datacenters whose weight is 0 only have their gradient measured.
            parts = {
                name: (vector.clone() if plan.measure_gradients else vector, examples)
                for name, (vector, examples) in gradients.gradient_by_datacenter.items()
                if name in spec.datacenters
            }
            weights = weights_of_datacenters(plan, parts, weight)
            gradient, weight = merge.weighted_mean(parts, weights)
        elif plan.measure_gradients and gradient is not None:
            gradient = gradient.clone()  # the measurement is of the gradient without the weight
        assert gradient is not None
        gradient.mul_(weight)
        return gradient
