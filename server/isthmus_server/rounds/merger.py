"""Merge the results of an attempt into the next model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import torch

from isthmus.job.strategy import StrategySection
from isthmus_server.model import merge
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes.attempt_result import (
    TrainingResult,
    group_sums,
    measured_gradients,
    vectors_by_name,
    with_earlier,
)
from isthmus_server.regimes.base import AttemptFailed, FederatedExtension
from isthmus_server.rounds.running_statistics import RunningStatistics
from isthmus_server.storage.records import UpdateNoise
from isthmus_server.strategy.policy import Plan
from isthmus_server.strategy.round_spec import RoundSpec


class ModelMerger:
    """Computes the next model from the pseudo-gradients of devices and datacenters."""

    def __init__(
        self,
        strategy: StrategySection,
        model: GlobalModel,
        statistics: RunningStatistics,
        extension: FederatedExtension | None = None,
    ) -> None:
        """Prepare.

        Args:
            strategy: the job's table, with how the two sides are merged.
            model: the global model.
            statistics: of the merged model.
            extension: what replaces the aggregation of devices; None for the built-in one.
        """
        self._strategy = strategy
        self._model = model
        self._statistics = statistics
        self._extension = extension

    async def merge(self, spec: RoundSpec, results: TrainingResult) -> None:
        """Compute the next model; also sets the norms and other measurements of `results`.

        It takes the place of the model before, in the same memory, before it is committed; see
        `ModelVersions.undo`.

        Raises:
            AttemptFailed: no datacenter could compute the running statistics, if the job asks for
                them.
        """
        await asyncio.to_thread(self._merge, spec, results)
        # They are those of the merged parameters, so they come after the server optimizer's step.
        try:
            await self._statistics.recompute(spec, results)
        except AttemptFailed as failed:
            # The others have trained all the same: their receipts have the cost.
            receipts = with_earlier(results.receipts, failed.receipts)
            raise AttemptFailed(
                str(failed), receipts, excused=failed.excused, task_failures=failed.task_failures
            ) from failed

    def _merge(self, spec: RoundSpec, results: TrainingResult) -> None:
        """Compute the next model from the results.

        A round of one datacenter is ordinary training: its result is the next model, and stays
        there until another participant needs it. With devices or several datacenters the server
        optimizer steps on the merged pseudo-gradient.
        """
        plan = spec.plan
        model = self._model
        # First: merging works in the memory of the vectors that are measured here.
        results.gradients = measured_gradients(results)
        results.groups = group_sums(results)
        if self._extension is not None and results.federated is not None:
            self._extension.commit(results.federated.extension_state)
        one_datacenter = results.federated is None and len(results.datacenters) == 1
        models = [r.vector for r in results.datacenters if r.vector is not None]
        datacenter = None
        weight = self._strategy.datacenter_weight
        if models:
            datacenter, weight = self._pseudo_gradient(plan, results, keep=one_datacenter)
        federated = results.federated.pseudo_gradient if results.federated is not None else None
        transferred = results.gradient
        vectors = {
            "federated": federated,
            "datacenter": datacenter if transferred is None else transferred,
        }
        present = {name: vector for name, vector in vectors.items() if vector is not None}
        trained = model.layout.trained_size  # lengths and angles are those of parameters
        results.norms, results.cosine = merge.norms_and_cosine(
            {name: vector[:trained] for name, vector in present.items()}
        )
        if results.federated is not None and results.federated.noise:
            results.noise = UpdateNoise(deviation=results.federated.noise, elements=trained)
        if plan.reset_optimizer:
            model.reset_optimizer()
        if not one_datacenter:
            merged = self._merged(plan, federated, datacenter, weight)
            if plan.step_scale != 1:
                # Statistics are not stepped on: they become the participants' mean.
                merged[:trained].mul_(plan.step_scale)
            model.step(merged)
        elif models:
            model.replace(models[0])
        model.average()

    def _pseudo_gradient(
        self, plan: Plan, results: TrainingResult, *, keep: bool
    ) -> tuple[torch.Tensor, float]:
        """The datacenters' mean, float32 (N), in their models' memory unless `keep`; its weight."""
        parts = vectors_by_name(results.datacenters)
        # Compressed updates are differences already.
        if not any(result.is_update for result in results.datacenters):
            for name, (vector, examples) in parts.items():
                difference = torch.sub(self._model.vector, vector, out=None if keep else vector)
                parts[name] = difference, examples
        weight = self._strategy.datacenter_weight
        if plan.datacenter_weights:
            return merge.weighted_mean(parts, weights_of_datacenters(plan, parts, weight))
        return merge.mean_by_examples(list(parts.values())), weight

    def _merged(
        self,
        plan: Plan,
        federated: torch.Tensor | None,
        datacenter: torch.Tensor | None,
        datacenter_weight: float,
    ) -> torch.Tensor:
        """The pseudo-gradient of both sides, float32 (N), in the memory of one of them."""
        if federated is None or datacenter is None:
            merged = federated if federated is not None else datacenter
            assert merged is not None
            return merged
        if (plan.merge or self._strategy.merge) == "projected":
            # Statistics have no direction that could be in conflict.
            trained = self._model.layout.trained_size
            merge.remove_conflict(datacenter[:trained], federated[:trained])
        return merge.interpolate(federated, datacenter, datacenter_weight=datacenter_weight)


def weights_of_datacenters(plan: Plan, names: Iterable[str], default: float) -> dict[str, float]:
    """The weight of each named datacenter by the plan, or that of all."""
    return {name: plan.datacenter_weights.get(name, default) for name in names}
