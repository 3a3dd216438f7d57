"""How a round is trained in each regime: requests out, one result back, a receipt for everyone.

The coordinator says from which model and with whom; what comes back is a pseudo-gradient (from
the fleet) or a model (from the datacenter), or `RoundFailed` with the receipts so far.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isthmus.contents import into
from isthmus.errors import ParticipantLost, RoundFailed, UpdateError
from isthmus.exchange import Layout
from isthmus.job import Job
from isthmus.wire import link_pb2
from isthmus_server.aggregate import Spool, WeightedSum
from isthmus_server.link import Link
from isthmus_server.receipts import Receipt

UPLOADS_AT_ONCE = 8
"""Updates under way at the same time; each takes a file, not memory."""


class AttemptFailed(RoundFailed):
    """An attempt that came to nothing, with what became of everyone in it."""

    def __init__(self, reason: str, receipts: Sequence[Receipt]) -> None:
        super().__init__(reason)
        self.receipts = receipts


@dataclasses.dataclass(frozen=True, kw_only=True)
class FederatedResult:
    """What a cohort came to."""

    pseudo_gradient: torch.Tensor
    """Weighted mean of start minus end, float32 (N)."""
    training: Mapping[str, float]
    """Weighted means of the devices' own figures: loss."""
    receipts: Sequence[Receipt]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatacenterResult:
    """What the ranks came to."""

    vector: torch.Tensor | None
    """The model at the new step, float32 (N), if it was asked for."""
    training: Mapping[str, float]
    evaluation: Mapping[str, float]
    events: Sequence[str]
    receipts: Sequence[Receipt]


class Fleet:
    """The federated regime."""

    def __init__(self, link: Link, job: Job, run_id: str, layout: Layout, spool: Path) -> None:
        """`spool` is a directory for updates that are too large to hold while they arrive."""
        self.link = link
        self.job = job
        self.run_id = run_id
        self.layout = layout
        self.spool = spool

    async def train(
        self, round_: int, attempt: int, model: link_pb2.Content, cohort: Mapping[str, int]
    ) -> FederatedResult:
        """Have a cohort (names with their declared examples) train from a published model.

        Ends when enough updates are in, when too few can still come, or at the deadline.

        Raises:
            AttemptFailed: fewer updates than the quorum.
        """
        attempt_ = _Attempt(self, round_, attempt, model, cohort)
        return await attempt_.run()


class _Attempt:
    """One attempt of a cohort."""

    def __init__(
        self,
        fleet: Fleet,
        round_: int,
        attempt: int,
        model: link_pb2.Content,
        cohort: Mapping[str, int],
    ) -> None:
        self.fleet = fleet
        self.round = round_
        self.attempt = attempt
        self.model = model
        self.cohort = cohort
        self.total = WeightedSum(fleet.layout.size, sum(cohort.values()))
        self.receipts: dict[str, Receipt] = {}
        self.losses: dict[str, tuple[float, int]] = {}
        self.uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self.adding = asyncio.Lock()

    @property
    def accepted(self) -> int:
        return sum(receipt.status == "accepted" for receipt in self.receipts.values())

    async def run(self) -> FederatedResult:
        settings = self.fleet.job.federated
        if len(self.cohort) < settings.needed:
            raise AttemptFailed(
                f"{len(self.cohort)} devices are ready and the quorum is {settings.needed}", []
            )
        tasks = {asyncio.create_task(self._one(name)): name for name in self.cohort}
        ended_because = f"the round's {self.fleet.job.time.round_seconds:g} s were over"
        try:
            async with asyncio.timeout(self.fleet.job.time.round_seconds):
                for done in asyncio.as_completed(tasks):
                    await done
                    if self.accepted >= settings.cohort:
                        ended_because = "enough updates were in"
                        break
                    left = len(self.cohort) - len(self.receipts)
                    if self.accepted + left < settings.needed:
                        ended_because = "the quorum could not be reached any more"
                        break
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for name in self.cohort:
            self.receipts.setdefault(name, self._receipt(name, "dropped", ended_because))
        receipts = [self.receipts[name] for name in self.cohort]
        if self.accepted < settings.needed:
            reasons = sorted({f"{r.participant}: {r.reason}" for r in receipts if r.reason})
            raise AttemptFailed(
                f"{self.accepted} of {len(receipts)} updates were accepted and the quorum is "
                f"{settings.needed} ({'; '.join(reasons[:3])})",
                receipts,
            )
        return FederatedResult(
            pseudo_gradient=self.total.mean(), training=self._training(), receipts=receipts
        )

    async def _one(self, name: str) -> None:
        """One device's part; leaves a receipt, whatever happens."""
        link = self.fleet.link
        request = link_pb2.Request(
            id=link.new_id(),
            train_local=link_pb2.TrainLocal(
                run_id=self.fleet.run_id, round=self.round, attempt=self.attempt, model=self.model
            ),
        )
        try:
            reply = await link.ask(name, request)
        except ParticipantLost as lost:
            self.receipts[name] = self._receipt(name, "dropped", str(lost))
            return
        if reply.WhichOneof("outcome") != "trained":
            reason = reply.failure.reason or "it answered something else than was asked"
            self.receipts[name] = self._receipt(name, "rejected", reason, sent=True)
            link.settle(name, request.id, False, reason)
            return
        try:
            await self._take(name, reply.trained)
        except ParticipantLost as lost:
            self.receipts[name] = self._receipt(name, "dropped", str(lost))
        except UpdateError as error:
            self.receipts[name] = self._receipt(name, "rejected", str(error), sent=True)
        finally:
            # Also when the round has ended meanwhile: the device may let go of its update.
            receipt = self.receipts.get(name)
            accepted = receipt is not None and receipt.status == "accepted"
            reason = receipt.reason if receipt is not None else "the round is over"
            link.settle(name, request.id, accepted, reason)

    async def _take(self, name: str, trained: link_pb2.Trained) -> None:
        layout = self.fleet.layout
        if trained.result.size != layout.nbytes:
            raise UpdateError(
                f"its update has {trained.result.size} bytes where this exchange set takes "
                f"{layout.nbytes}"
            )
        async with self.uploads:
            with Spool(self.fleet.spool) as spool:
                await self.fleet.link.fetch(name, trained.result, spool.write)
                await _to_the_end(self._add(name, trained, spool))

    async def _add(self, name: str, trained: link_pb2.Trained, spool: Spool) -> None:
        async with self.adding:
            if self.accepted >= self.fleet.job.federated.cohort:
                raise UpdateError("enough updates were in")
            await asyncio.to_thread(spool.add_to, self.total, self.fleet.layout, trained.examples)
            self.receipts[name] = self._receipt(
                name,
                "accepted",
                "",
                sent=True,
                examples=trained.examples,
                steps=trained.steps,
                seconds=trained.seconds,
                bytes_in=trained.result.size,
                bytes_out=self.model.size,
            )
            if "loss" in trained.training:
                self.losses[name] = (trained.training["loss"], trained.examples)

    def _receipt(self, name: str, status: str, reason: str, **more: object) -> Receipt:
        return Receipt(participant=name, regime="federated", status=status, reason=reason, **more)  # type: ignore[arg-type]

    def _training(self) -> dict[str, float]:
        """In the cohort's order, so that the same losses give the same mean."""
        listed = [self.losses[name] for name in self.cohort if name in self.losses]
        weight = sum(examples for _, examples in listed)
        if not weight:
            return {}
        return {"loss": sum(loss * examples for loss, examples in listed) / weight}


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish what must not be left half done, and only then pass a cancellation on."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


class Datacenter:
    """The datacenter regime."""

    def __init__(self, link: Link, job: Job, run_id: str, layout: Layout) -> None:
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
        model: link_pb2.Content | None,
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
        reply, vector = await self._ask(name, request, hand_back)
        trained = reply.trained
        receipt = Receipt(
            participant=name,
            regime="datacenter",
            status="accepted",
            reason="; ".join(trained.events),
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
            events=list(trained.events),
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
        _, vector = await self._ask(name, request, True)
        assert vector is not None
        return vector

    async def _ask(
        self, name: str, request: link_pb2.Request, with_model: bool
    ) -> tuple[link_pb2.Reply, torch.Tensor | None]:
        reply: link_pb2.Reply | None = None
        accepted, reason = False, "the round is over"
        try:
            async with asyncio.timeout(self.job.time.round_seconds):
                reply = await self.link.ask(name, request)
                outcome = reply.WhichOneof("outcome")
                if outcome not in ("trained", "exported"):
                    raise UpdateError(reply.failure.reason or "it answered something else")
                vector = None
                if with_model:
                    content = reply.trained.result if outcome == "trained" else reply.exported.model
                    vector = await self._fetch(name, content)
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
                self.link.settle(name, request.id, accepted, reason)
        return reply, vector

    async def _fetch(self, name: str, content: link_pb2.Content) -> torch.Tensor:
        if content.size != self.layout.nbytes:
            raise UpdateError(
                f"its model has {content.size} bytes where this exchange set takes "
                f"{self.layout.nbytes}"
            )
        payload = bytearray(content.size)
        await self.link.fetch(name, content, into(payload))
        vector = self.layout.decode(payload)
        if not bool(torch.isfinite(vector).all()):
            raise UpdateError("its model is not finite")
        return vector

    def _failed(self, name: str, status: str, reason: str) -> AttemptFailed:
        receipt = Receipt(
            participant=name,
            regime="datacenter",
            status=status,  # type: ignore[arg-type]
            reason=reason,
            sent=status == "rejected",
        )
        return AttemptFailed(f"{name}: {reason}", [receipt])
