"""How a round is trained in each regime: requests out, one result back, a receipt for everyone.

The coordinator says from which model and with whom; what comes back is a pseudo-gradient (from
the fleet) or a model (from the datacenter), or `RoundFailed` with the receipts so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from isthmus.errors import ParticipantLost, UpdateError
from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import into
from isthmus.wire import link_pb2
from isthmus_server.regimes.buffered import Buffered
from isthmus_server.regimes.context import Federation
from isthmus_server.regimes.plaintext import PlainAttempt
from isthmus_server.regimes.results import AttemptFailed, DatacenterResult, FederatedResult
from isthmus_server.regimes.secure import SecureAggregationAttempt, agreement
from isthmus_server.storage.receipts import Receipt, Status
from isthmus_server.transport.link import Link
from isthmus_server.transport.sanitize import check_figures, in_a_line, reason_of

if TYPE_CHECKING:
    from isthmus_server.flower.attempt import FlowerAttempt
    from isthmus_server.flower.strategy_adapter import FlowerStrategyAdapter


class FederatedRegime:
    """The federated regime."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.guest: FlowerStrategyAdapter | None = None
        """The Flower strategy, where the job names one."""
        settings = federation.job.federated
        if settings.flower is not None:
            from isthmus_server.flower.strategy_adapter import FlowerStrategyAdapter

            self.guest = FlowerStrategyAdapter(settings, federation.layout)
        self.buffered = Buffered(federation) if settings.mode == "buffered" else None
        self._running: FlowerAttempt | PlainAttempt | SecureAggregationAttempt | Buffered | None = (
            None
        )

    async def train(
        self,
        round_: int,
        attempt: int,
        model: link_pb2.Blob,
        cohort: Mapping[str, int],
        settings: FederatedSection | None = None,
        start: torch.Tensor | None = None,
        with_gradient: bool = False,
    ) -> FederatedResult:
        """Have a cohort (names with their declared examples) train from a published model.

        Ends when enough updates are in, when too few can still come, or at the deadline.
        `settings` are the job's, or those of a round with another cohort. `start` is the same
        model as a vector (N): a Flower strategy is shown it. `with_gradient`: behind the model, in
        the same content, a gradient follows that devices add to their own.

        Raises:
            AttemptFailed: fewer updates than the quorum.
        """
        settings = settings or self.federation.job.federated
        if self.buffered is not None:
            self._running = self.buffered
            return await self.buffered.train(
                round_, attempt, model, cohort, settings, with_gradient
            )
        if len(cohort) < settings.needed:
            raise AttemptFailed(
                f"{len(cohort)} devices are ready and the quorum is {settings.needed}", []
            )
        if settings.secure_aggregation:

            def begin(agreed: bytes) -> link_pb2.Request:
                work = link_pb2.TrainLocal(
                    run_id=self.federation.run_id,
                    round=round_,
                    attempt=attempt,
                    model=model,
                    secure=agreed,
                    with_gradient=with_gradient,
                )
                return link_pb2.Request(train_local=work)

            config = agreement(self.federation, round_, attempt, model, settings)
            self._running = SecureAggregationAttempt(self.federation, config, model, cohort, begin)
        else:
            gathering = None
            if self.guest is not None:
                assert start is not None
                if self.guest.settings.app is not None:
                    return await self._train_app(round_, start, cohort, settings)
                from isthmus_server.flower.strategy_adapter import UpdateCollector

                begun = self.guest.begin(round_, start, settings)
                gathering = UpdateCollector(begun, self.federation.layout, cohort)
            self._running = PlainAttempt(
                self.federation, round_, attempt, model, cohort, settings, gathering, with_gradient
            )
        return await self._running.run()

    async def _train_app(
        self,
        round_: int,
        start: torch.Tensor,
        cohort: Mapping[str, int],
        settings: FederatedSection,
    ) -> FederatedResult:
        """Have devices train with the job's Flower app."""
        from isthmus_server.flower.attempt import FlowerAttempt

        assert self.guest is not None
        running = FlowerAttempt(self.federation, self.guest, round_, start, cohort, settings)
        self._running = running
        return await running.run()

    @property
    def at_work(self) -> list[str]:
        """Devices that go on over the rounds' ends; see `Buffered`."""
        return [] if self.buffered is None else [*self.buffered.working, *self.buffered.held]

    async def stop(self) -> None:
        """The run is over."""
        if self.buffered is not None:
            await self.buffered.stop()

    def stopped(self, reason: str) -> list[Receipt]:
        """Receipts of an attempt that was cancelled before its end."""
        return [] if self._running is None else list(self._running.stopped(reason))


class DatacenterRegime:
    """The datacenter regime."""

    def __init__(self, link: Link, job: Job, run_id: str, layout: TensorLayout) -> None:
        self.link = link
        self.job = job
        self.run_id = run_id
        self.layout = layout

    async def train(
        self,
        name: str,
        round_: int,
        attempt: int,
        *,
        from_step: int,
        until_step: int,
        model: link_pb2.Blob | None,
        evaluate: bool,
        hand_back: bool,
    ) -> DatacenterResult:
        """Have the ranks train on to `until_step`, from their own state or from a published model.

        Raises:
            AttemptFailed: they could not, or not in time.
        """
        work = link_pb2.TrainSteps(
            run_id=self.run_id,
            round=round_,
            attempt=attempt,
            from_step=from_step,
            until_step=until_step,
            model=model,
            evaluate=evaluate,
            hand_back=hand_back,
        )
        request = link_pb2.Request(id=self.link.new_id(), train_steps=work)
        return await self._result(name, request, "model" if hand_back else "", model)

    async def mean_gradient(
        self,
        name: str,
        round_: int,
        attempt: int,
        *,
        from_step: int,
        until_step: int,
        model: link_pb2.Blob,
    ) -> DatacenterResult:
        """The mean gradient at a published model over the batches of some steps, as the `vector`.

        The ranks' own training stays where it is.

        Raises:
            AttemptFailed: they could not, or not in time.
        """
        work = link_pb2.MeanGradient(
            run_id=self.run_id,
            round=round_,
            attempt=attempt,
            from_step=from_step,
            until_step=until_step,
            model=model,
        )
        request = link_pb2.Request(id=self.link.new_id(), mean_gradient=work)
        return await self._result(name, request, "gradient", model)

    async def _result(
        self, name: str, request: link_pb2.Request, what: str, model: link_pb2.Blob | None
    ) -> DatacenterResult:
        """What came of work that was sent with `model`."""
        reply, vector = await self._ask(name, request, what)
        trained = reply.trained
        receipt = Receipt(
            participant=name,
            regime="datacenter",
            status="accepted",
            reason=in_a_line("; ".join(trained.events)),
            sent=True,
            examples=trained.examples,
            steps=trained.steps,
            seconds=trained.seconds,
            bytes_in=trained.result.size,
            bytes_out=model.size if model is not None else 0,
        )
        return DatacenterResult(
            vector=vector,
            training=dict(trained.training),
            evaluation=dict(trained.evaluation),
            profile=dict(trained.profile),
            receipts=[receipt],
        )

    async def export(self, name: str, step: int) -> torch.Tensor:
        """The model as the datacenter has it at a step, float32 (N).

        Raises:
            AttemptFailed: it does not hold it, or not in time.
        """
        request = link_pb2.Request(
            id=self.link.new_id(), export=link_pb2.Export(run_id=self.run_id, step=step)
        )
        _, vector = await self._ask(name, request, "model")
        assert vector is not None
        return vector

    async def _ask(
        self, name: str, request: link_pb2.Request, what: str
    ) -> tuple[link_pb2.Reply, torch.Tensor | None]:
        """Its reply, and the model or gradient that comes with it; nothing comes for ""."""
        reply: link_pb2.Reply | None = None
        accepted, reason = False, "the round is over"
        try:
            async with asyncio.timeout(self.job.time.round_seconds):
                reply = await self.link.ask(name, request)
                outcome = reply.WhichOneof("outcome")
                if outcome not in ("trained", "exported"):
                    raise UpdateError(reason_of(reply))
                vector = None
                check_figures(reply.trained)
                if what:
                    blob = reply.trained.result if outcome == "trained" else reply.exported.model
                    vector = await self._fetch(name, blob, what)
            accepted, reason = True, ""
        except TimeoutError:
            reason = f"it did not answer within the round's {self.job.time.round_seconds:g} s"
            raise self._failed(name, "dropped", reason) from None
        except ParticipantLost as lost:
            raise self._failed(name, "dropped", str(lost)) from lost
        except UpdateError as error:
            reason = str(error)
            raise self._failed(name, "rejected", reason) from error
        finally:
            if reply is not None:
                self.link.acknowledge(name, request.id, accepted, reason)
        return reply, vector

    async def _fetch(self, name: str, blob: link_pb2.Blob, what: str) -> torch.Tensor:
        if blob.size != self.layout.nbytes:
            raise UpdateError(
                f"its {what} has {blob.size} bytes where this exchange set takes "
                f"{self.layout.nbytes}"
            )
        payload = bytearray(blob.size)
        await self.link.fetch(name, blob, into(payload))
        vector = self.layout.decode(payload)
        if not bool(torch.isfinite(vector).all()):
            raise UpdateError(f"its {what} is not finite")
        return vector

    def _failed(self, name: str, status: Status, reason: str) -> AttemptFailed:
        receipt = Receipt(
            participant=name,
            regime="datacenter",
            status=status,
            reason=reason,
            sent=status == "rejected",
        )
        return AttemptFailed(f"{name}: {reason}", [receipt])
