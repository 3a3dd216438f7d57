"""Train one attempt at a planned round, and merge the results into the next model.

In a hybrid round both regimes train at the same time; if one fails the other is cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from isthmus.errors import JobError, RoundFailed
from isthmus.transport.blobs import InFile
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_server.model import merge
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.model.mmap_buffer import LARGE_BYTES
from isthmus_server.regimes import gradient_measurement
from isthmus_server.regimes.attempt_result import (
    TrainingResult,
    group_sums,
    measured_gradients,
    vectors_by_name,
    with_earlier,
)
from isthmus_server.regimes.base import (
    AttemptFailed,
    AttemptSpec,
    DatacenterResult,
    FederatedResult,
)
from isthmus_server.regimes.call import ReceiptBook
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.storage.records import Receipt
from isthmus_server.strategy.policy import Plan
from isthmus_server.strategy.round_spec import RoundSpec
from isthmus_server.transport.bundle import offered, published


class Trainer:
    """Runs attempts at rounds, and computes the next model from their results."""

    def __init__(
        self,
        model: GlobalModel,
        federated: FederatedRegime,
        datacenter: DatacenterRegime,
        roster: ParticipantRoster,
    ) -> None:
        """`roster` knows the datacenters that are ready."""
        self._job = federated.context.job
        self._link = federated.context.link
        self._model = model
        self._federated = federated
        self._datacenter = datacenter
        self._roster = roster

    async def train(self, spec: RoundSpec) -> TrainingResult:
        """Run one attempt.

        Raises:
            AttemptFailed: a regime failed; with the receipts of all participants.
        """
        if self._recomputes(spec):
            self._statistics_source()
        if self._federated.extension is not None and spec.plan.reset_optimizer:
            self._federated.extension.reset()
        if spec.transfers:
            self._check_transfer()
        gradients = TrainingResult()
        if spec.gradient_sources:
            gradients = await self._gradients(spec)
        try:
            if spec.transfers:
                result = await self._train_with_transfer(spec, gradients)
            else:
                result = await self._train_at_once(spec, gradients)
        except AttemptFailed as failed:
            receipts = with_earlier(gradients.receipts, failed.receipts)
            raise AttemptFailed(
                str(failed), receipts, excused=failed.excused, task_failures=failed.task_failures
            ) from failed
        result.datacenter_gradient = gradients.datacenter_gradient
        result.gradient_by_datacenter = gradients.gradient_by_datacenter
        if result.datacenters:
            result.earlier = gradients.receipts
        else:
            result.datacenters = [
                dataclasses.replace(each, vector=None) for each in gradients.datacenters
            ]
        return result

    async def _train_at_once(self, spec: RoundSpec, gradients: TrainingResult) -> TrainingResult:
        """Devices and datacenters train at the same time, as far as the round has both."""
        with_devices = spec.plan.regime != "datacenter"
        async with self._published(summing=with_devices) as blob:
            devices = None
            changes = self._model.offered_changes if with_devices else []
            with offered(self._link, [(each.message.blob, each.payload) for each in changes]):
                if with_devices:
                    attempt = self._attempt(spec, blob, gradients)
                    messages = [each.message for each in changes]
                    devices = self._federated.train(dataclasses.replace(attempt, changes=messages))
                train = self._train_datacenter
                return await self._run_together(spec.datacenters, spec, train, devices)

    async def _gradients(self, spec: RoundSpec) -> TrainingResult:
        """Have the datacenters compute their mean gradient at the round's model.

        Raises:
            AttemptFailed: one of them could not, or too few devices are ready.
        """
        if not self._federated.may_start_below_quorum:
            self._attempt(spec, self._model.blob).check_quorum()
        async with self._published(summing=False):
            sources = spec.gradient_sources
            result = await self._run_together(sources, spec, self._mean_gradient, None)
        parts = vectors_by_name(result.datacenters)
        merged = list(parts.values())
        if spec.plan.measure_gradients or spec.plan.datacenter_weights:
            result.gradient_by_datacenter = parts
            if len(merged) > 1:  # the mean is computed in the memory of the first
                merged[0] = merged[0][0].clone(), merged[0][1]
        result.datacenter_gradient = merge.mean_by_examples(merged)
        return result

    async def _train_with_transfer(
        self, spec: RoundSpec, gradients: TrainingResult
    ) -> TrainingResult:
        """One-way gradient transfer of Mixed FL (Augenstein et al. 2022).

        The datacenters have computed their mean gradient at the round's model, which is multiplied
        by the transfer weight. Devices train, and add it to the gradient of each local step.
        """
        gradient = gradients.datacenter_gradient
        weight = spec.plan.transfer_weight
        weight = self._job.strategy.transfer_weight if weight is None else weight
        if spec.plan.datacenter_weights:
            parts = {
                name: (vector.clone() if spec.plan.measure_gradients else vector, examples)
                for name, (vector, examples) in gradients.gradient_by_datacenter.items()
                if name in spec.datacenters
            }
            gradient, weight = merge.weighted_mean(parts, _weights(spec.plan, parts, weight))
        elif spec.plan.measure_gradients and gradient is not None:
            gradient = gradient.clone()  # the measurement is of the gradient without the weight
        assert gradient is not None
        gradient.mul_(weight)
        vectors = (self._model.vector, gradient)
        spool = self._federated.context.spool
        async with published(self._link, self._model.layout, spool, vectors, 2) as blob:
            result = await self._federated.train(self._attempt(spec, blob, gradients))
        return TrainingResult(federated=result, gradient=gradient)

    def _check_transfer(self) -> None:
        """Refuse a transfer that cannot work before a datacenter computes for it.

        Raises:
            JobError: devices run a Flower app, whose training Isthmus does not control.
        """
        flower = self._job.federated.flower
        if flower is not None and flower.app is not None:
            raise JobError(
                'merge="transfer" has devices add a gradient to their own, which a Flower app '
                "(federated.flower.app) cannot do; use another merge, or remove the app"
            )

    def _attempt(
        self, spec: RoundSpec, blob: link_pb2.Blob, gradients: TrainingResult | None = None
    ) -> AttemptSpec:
        scale = 0.0
        if spec.plan.measure_gradients and gradients is not None:
            datacenter = gradients.datacenter_gradient
            clip = spec.federated.clip
            scale = gradient_measurement.scale_for(clip, datacenter, spec.last_gradients)
        return AttemptSpec(
            round=spec.round,
            attempt=spec.attempt,
            model=blob,
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

    @asynccontextmanager
    async def _published(self, *, summing: bool) -> AsyncIterator[link_pb2.Blob]:
        """Publish the model for participants to fetch, for the duration of the block.

        While updates are summed, a large model is spilled to disk and sent from its file, so that
        the sum can use its memory. Extensions need the model in memory.
        """
        model = self._model
        blob = await asyncio.to_thread(lambda: model.blob)
        try:
            if summing and blob.size >= LARGE_BYTES and self._federated.extension is None:
                await to_the_end(asyncio.to_thread(model.spill, self._federated.context.spool))
            file = model.spilled
            self._link.publish(blob, model.payload if file is None else InFile(file, blob.size))
            yield blob
        finally:
            self._link.retract(blob)
            await to_the_end(asyncio.to_thread(model.restore))

    async def _run_together(
        self,
        names: Sequence[str],
        spec: RoundSpec,
        train_datacenter: Callable[[str, RoundSpec], Coroutine[Any, Any, DatacenterResult]],
        train_devices: Coroutine[Any, Any, FederatedResult] | None,
    ) -> TrainingResult:
        """Run all regimes of a round at the same time; if one fails, cancel the others.

        Raises:
            AttemptFailed: all that failed can be tried again; with all receipts.
            Exception: that of the first that failed in a way which no other attempt changes.
        """
        datacenters = [
            asyncio.create_task(train_datacenter(name, spec), name=name) for name in names
        ]
        devices = None if train_devices is None else asyncio.create_task(train_devices)
        tasks: list[asyncio.Task[Any]] = [*datacenters, *([devices] if devices else [])]
        # A TaskGroup would do the same, but leaves this task marked as cancelled when one of the
        # others fails (until Python 3.13). Before Python 3.11.4 every later time limit of the task
        # then ends in CancelledError.
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await _end_of(tasks)
        # What failed first comes before what then failed because it was cancelled.
        tasks.sort(key=lambda task: task not in finished)
        errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
        final = [error for error in errors if not isinstance(error, RoundFailed)]
        if final:
            raise final[0]
        if errors:
            raise self._combined(errors, datacenters, devices)
        return TrainingResult(
            federated=devices.result() if devices is not None else None,
            datacenters=[task.result() for task in datacenters],
        )

    async def _mean_gradient(self, name: str, spec: RoundSpec) -> DatacenterResult:
        return await self._datacenter.mean_gradient(name, spec, self._model.blob)

    async def _train_datacenter(self, name: str, spec: RoundSpec) -> DatacenterResult:
        model = None if spec.datacenter_has_model else self._model.blob
        return await self._datacenter.train(name, spec, model)

    def _combined(
        self,
        failures: Sequence[BaseException],
        datacenters: Sequence[asyncio.Task[DatacenterResult]],
        devices: asyncio.Task[FederatedResult] | None,
    ) -> AttemptFailed:
        """All failures of an attempt as one, with the receipts of cancelled participants too."""
        reasons: list[str] = []
        receipts: list[Receipt] = []
        task_failures: set[str] = set()
        for error in failures:
            reasons.append(str(error))
            if isinstance(error, AttemptFailed):
                receipts += error.receipts
                task_failures |= error.task_failures
        cancelled_because = "the attempt failed elsewhere"
        for task in datacenters:
            if task.cancelled():
                book = ReceiptBook([task.get_name()], "datacenter")
                receipts += book.complete(cancelled_because)
        if devices is not None and devices.cancelled():
            receipts += self._federated.cancelled(cancelled_because)
        tasks: list[asyncio.Task[Any]] = [*datacenters, *([devices] if devices else [])]
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                receipts += task.result().receipts
        excused = all(isinstance(error, AttemptFailed) and error.excused for error in failures)
        return AttemptFailed(
            "; ".join(reasons), receipts, excused=excused, task_failures=task_failures
        )

    # -- running statistics --------------------------------------------------------------------

    async def _recompute_statistics(self, spec: RoundSpec, results: TrainingResult) -> None:
        """Replace the model's running statistics by those of a datacenter's data."""
        name = self._statistics_source()
        model = self._model
        async with self._published(summing=False) as blob:
            result = await self._datacenter.statistics(name, spec, blob)
        assert result.vector is not None
        trained = model.layout.trained_size
        model.vector[trained:] = result.vector[trained:]
        model.mark_changed()
        results.earlier = with_earlier(results.earlier, result.receipts)

    def _recomputes(self, spec: RoundSpec) -> bool:
        """A datacenter's own round has statistics of its data."""
        recomputed = self._job.exchange.buffers == "recompute"
        return recomputed and spec.plan.regime != "datacenter"

    def _statistics_source(self) -> str:
        names = sorted(self._roster.datacenters)
        if not names:
            raise AttemptFailed(
                "exchange.buffers='recompute' computes running statistics on a datacenter's data, "
                "and no datacenter is connected; start one, or use buffers = 'average'",
                [],
            )
        return names[0]

    # -- merge -------------------------------------------------------------------------------------

    async def merge(self, spec: RoundSpec, results: TrainingResult) -> None:
        """Compute the next model; also sets the norms and other measurements of `results`.

        Raises:
            AttemptFailed: no datacenter could compute the running statistics, if the job asks for
                them.
        """
        await asyncio.to_thread(self._merge, spec, results)
        if self._recomputes(spec):
            await self._recompute_statistics(spec, results)

    def _merge(self, spec: RoundSpec, results: TrainingResult) -> None:
        """Compute the next model from the results.

        A round of one datacenter is ordinary training: its result is the next model, and stays
        there until another participant needs it. With devices or several datacenters the server
        optimizer steps on the merged pseudo-gradient.
        """
        plan = spec.plan
        model = self._model
        results.gradients = measured_gradients(results)
        results.groups = group_sums(results)
        extension = self._federated.extension
        state = None if results.federated is None else results.federated.extension_state
        if extension is not None and state is not None:
            extension.commit(state)
        one_datacenter = results.federated is None and len(results.datacenters) == 1
        models = [r.vector for r in results.datacenters if r.vector is not None]
        datacenter = None
        weight = self._job.strategy.datacenter_weight
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
        if plan.reset_optimizer:
            model.reset_optimizer()
        if not one_datacenter:
            merged = self._merged(plan, federated, datacenter, weight)
            if plan.step_scale != 1:
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
        if not any(result.is_update for result in results.datacenters):
            for name, (vector, examples) in parts.items():
                difference = torch.sub(self._model.vector, vector, out=None if keep else vector)
                parts[name] = difference, examples
        weight = self._job.strategy.datacenter_weight
        if plan.datacenter_weights:
            return merge.weighted_mean(parts, _weights(plan, parts, weight))
        return merge.mean_by_examples(list(parts.values())), weight

    def _merged(
        self,
        plan: Plan,
        federated: torch.Tensor | None,
        datacenter: torch.Tensor | None,
        datacenter_weight: float,
    ) -> torch.Tensor:
        if federated is None or datacenter is None:
            merged = federated if federated is not None else datacenter
            assert merged is not None
            return merged
        if (plan.merge or self._job.strategy.merge) == "projected":
            trained = self._model.layout.trained_size
            merge.remove_conflict(datacenter[:trained], federated[:trained])
        return merge.interpolate(federated, datacenter, datacenter_weight=datacenter_weight)


async def _end_of(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until tasks have ended, so that nothing of an attempt goes on after it.

    A cancellation of the waiting task, and another one, is raised after that.
    """
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _weights(plan: Plan, names: Iterable[str], default: float) -> dict[str, float]:
    """The weight of each named datacenter by the plan, or that of all."""
    return {name: plan.datacenter_weights.get(name, default) for name in names}
