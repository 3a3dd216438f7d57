"""The datacenter regime: the ranks train, report a gradient or export their model."""

from __future__ import annotations

import asyncio
import contextlib

import torch

from isthmus.errors import UpdateError
from isthmus.job import Job
from isthmus.printable import in_a_line
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.tensors.finite import is_finite
from isthmus.transport.blobs import into
from isthmus.wire import link_pb2
from isthmus_privacy.compression.single_updates import DatacenterMessages
from isthmus_server.regimes.base import AttemptFailed, DatacenterResult
from isthmus_server.regimes.call import CallFailed, ReceiptBook, call
from isthmus_server.regimes.committed_sums import CommittedSums
from isthmus_server.storage.records import StepFigures
from isthmus_server.strategy.round_spec import RoundSpec
from isthmus_server.transport.link import Link
from isthmus_server.transport.sanitize import check_figures


class DatacenterRegime:
    """Trains rounds on the ranks of one run's datacenters."""

    def __init__(
        self,
        link: Link,
        job: Job,
        run_id: str,
        layout: TensorLayout,
        sums: CommittedSums | None = None,
    ) -> None:
        """`sums` tell which compressed updates counted."""
        self._link = link
        self._job = job
        self._run_id = run_id
        self._layout = layout
        self._sums = sums or CommittedSums()
        self._messages = DatacenterMessages.of(job, layout)

    async def train(
        self, name: str, spec: RoundSpec, model: link_pb2.Blob | None
    ) -> DatacenterResult:
        """Train to the round's last step, from a published model or (None) from the ranks' own.

        Raises:
            AttemptFailed: the datacenter could not, or not in time.
        """
        work = link_pb2.TrainSteps(
            run_id=self._run_id,
            round=spec.round,
            attempt=spec.attempt,
            from_step=spec.from_step,
            until_step=spec.from_step + spec.steps,
            model=model,
            evaluate=spec.evaluate,
            hand_back=spec.hand_back,
            position=spec.position.start,
            compressed=self._messages is not None and spec.compressed,
        )
        request = link_pb2.Request(train_steps=work)
        self._sums.tell(name, request)
        return await self._result(name, request, "model" if spec.hand_back else None)

    async def mean_gradient(
        self, name: str, spec: RoundSpec, model: link_pb2.Blob
    ) -> DatacenterResult:
        """The mean gradient at a published model over the round's batches, as the `vector`.

        The state of the ranks' own training does not change.

        Raises:
            AttemptFailed: the datacenter could not, or not in time.
        """
        work = link_pb2.MeanGradient(
            run_id=self._run_id,
            round=spec.round,
            attempt=spec.attempt,
            from_step=spec.gradient_step,
            until_step=spec.gradient_step + spec.gradient_steps,
            model=model,
        )
        return await self._result(name, link_pb2.Request(mean_gradient=work), "gradient")

    async def statistics(
        self, name: str, spec: RoundSpec, model: link_pb2.Blob
    ) -> DatacenterResult:
        """Have a datacenter compute running statistics at a model, with its mean gradient.

        Over the batches of the run's first round, so that they depend on the model only.

        Raises:
            AttemptFailed: it could not, or not in time.
        """
        work = link_pb2.MeanGradient(
            run_id=self._run_id,
            round=spec.round,
            attempt=spec.attempt,
            from_step=0,
            until_step=self._job.datacenter.steps,
            model=model,
            statistics=True,
        )
        request = link_pb2.Request(mean_gradient=work)
        return await self._result(name, request, "running statistics")

    async def export(self, name: str, step: int, payload: memoryview) -> None:
        """Write the datacenter's model at a step into `payload`, in its encoded form.

        If that fails, some of it may be there.

        Raises:
            AttemptFailed: the datacenter does not have it, or not in time.
        """
        request = link_pb2.Request(export=link_pb2.Export(run_id=self._run_id, step=step))
        receipts = ReceiptBook([name], "datacenter")
        try:
            async with self._call(name, request, "exported", receipts) as reply:
                await self._fetch_into(name, reply.exported.model, "model", payload)
        except CallFailed as failed:
            raise _attempt_failed(name, failed, receipts) from failed

    def _call(
        self, name: str, request: link_pb2.Request, outcome: str, receipts: ReceiptBook
    ) -> contextlib.AbstractAsyncContextManager[link_pb2.Reply]:
        time = self._job.time
        return call(
            self._link,
            name,
            request,
            outcome,
            receipts,
            seconds=time.first_round_seconds,
            least_rate=time.least_rate,
            between_steps=time.round_seconds is None,
        )

    async def _result(
        self,
        name: str,
        request: link_pb2.Request,
        vector_kind: str | None,
    ) -> DatacenterResult:
        """Send work; `vector_kind` names the vector that the reply must come with, if any."""
        receipts = ReceiptBook([name], "datacenter")
        vector = None
        compressed = request.train_steps.compressed
        try:
            async with self._call(name, request, "trained", receipts) as reply:
                trained = reply.trained
                # Before anything is fetched: figures that are not finite are in no receipt and no
                # record.
                check_figures(trained)
                if compressed:
                    vector = await self._fetch_update(
                        name, trained.result, request.train_steps.round
                    )
                elif vector_kind is not None:
                    vector = await self._fetch(name, trained.result, vector_kind)
                receipts.record(
                    name,
                    "accepted",
                    in_a_line("; ".join(trained.events)),
                    sent=True,
                    examples=trained.examples,
                    steps=trained.steps,
                    seconds=trained.seconds,
                )
        except CallFailed as failed:
            raise _attempt_failed(name, failed, receipts) from failed
        return DatacenterResult(
            vector=vector,
            is_update=compressed,
            training=dict(trained.training),
            evaluation=dict(trained.evaluation),
            profile=dict(trained.profile),
            step_figures=[StepFigures.of(each) for each in trained.step_figures],
            receipts=receipts.complete(""),
        )

    async def _fetch(self, name: str, blob: link_pb2.Blob, kind: str) -> torch.Tensor:
        # The other side cannot choose how much memory there is.
        return await self._fetch_into(name, blob, kind, bytearray(self._layout.nbytes))

    async def _fetch_into(
        self, name: str, blob: link_pb2.Blob, kind: str, payload: bytearray | memoryview
    ) -> torch.Tensor:
        """Fetch a vector into `payload`, which has the size of an encoded model; a view of it."""
        if blob.size != len(payload):
            raise UpdateError(
                f"its {kind} has {blob.size} bytes where this exchange set takes {len(payload)}"
            )
        await self._link.fetch(name, blob, into(payload))
        vector = self._layout.decode(payload)
        if not is_finite(vector):
            raise UpdateError(f"its {kind} is not finite")
        return vector

    async def _fetch_update(self, name: str, blob: link_pb2.Blob, round_: int) -> torch.Tensor:
        assert self._messages is not None
        # Before there is memory for it, as above; the codec says how long a message may be.
        self._messages.check_size(blob.size)
        payload = bytearray(blob.size)
        await self._link.fetch(name, blob, into(payload))
        return await asyncio.to_thread(self._messages.decode, payload, round_)


def _attempt_failed(name: str, failed: CallFailed, receipts: ReceiptBook) -> AttemptFailed:
    reason = f"{name}: {failed.reason}"
    failures = receipts.task_failures
    return AttemptFailed(reason, receipts.complete(""), task_failures=failures)
