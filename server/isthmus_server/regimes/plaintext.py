"""A federated attempt in which each device sends its update in plain.

For jobs that ask for it: to look at single updates, or with too few devices for a secure sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import ParticipantLost, RoundFailed, UpdateError
from isthmus.job.federated import FederatedSection
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_server.model.fixed_point_sum import Spool, StreamingUpdate, WeightedSum
from isthmus_server.regimes.results import AttemptFailed, FederatedResult
from isthmus_server.regimes.secure import UPLOADS_AT_ONCE
from isthmus_server.storage.receipts import UNREACHABLE, Receipt, Status, reasons
from isthmus_server.transport.sanitize import check_figures, reason_of

if TYPE_CHECKING:
    from isthmus_server.flower.strategy_adapter import UpdateCollector
    from isthmus_server.regimes.context import Federation
    from isthmus_server.transport.link import Link


class PlainAttempt:
    """One attempt of a cohort, each update in plain."""

    def __init__(
        self,
        federation: Federation,
        round_: int,
        attempt: int,
        model: link_pb2.Blob,
        cohort: Mapping[str, int],
        settings: FederatedSection,
        gathering: UpdateCollector | None = None,
        with_gradient: bool = False,
    ) -> None:
        """With `gathering`, a Flower strategy takes the place of the weighted mean."""
        self.federation = federation
        self.round = round_
        self.attempt = attempt
        self.model = model
        self.cohort = cohort
        self.settings = settings
        self.with_gradient = with_gradient
        self.total = gathering or federation.weighted_sum(sum(cohort.values()))
        self.receipts: dict[str, Receipt] = {}
        self.losses: dict[str, tuple[float, int]] = {}
        self.uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self.showing = asyncio.Lock()

    @property
    def accepted(self) -> int:
        """Updates in the sum so far."""
        return sum(receipt.status == "accepted" for receipt in self.receipts.values())

    async def run(self) -> FederatedResult:
        """Invite, wait, take what comes.

        Raises:
            AttemptFailed: fewer updates than the quorum.
        """
        settings = self.settings
        tasks = {asyncio.create_task(self._one(name)): name for name in self.cohort}
        ended_because = f"the round's {self.federation.job.time.round_seconds:g} s were over"
        try:
            async with asyncio.timeout(self.federation.job.time.round_seconds):
                for done in asyncio.as_completed(tasks):
                    await done
                    if self.accepted >= settings.cohort:
                        ended_because = "enough updates were in"
                        break
                    left = len(self.cohort) - len(self.receipts)
                    if self.accepted + left < settings.needed:
                        ended_because = UNREACHABLE
                        break
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        receipts = self.stopped(ended_because)
        if self.accepted < settings.needed:
            raise AttemptFailed(
                f"{self.accepted} of {len(receipts)} updates were accepted and the quorum is "
                f"{settings.needed} ({reasons(receipts)})",
                receipts,
            )
        return FederatedResult(
            pseudo_gradient=await self._result(receipts),
            training=self._training(),
            receipts=receipts,
            strategy_state=None if isinstance(self.total, WeightedSum) else self.total.state,
        )

    async def _result(self, receipts: list[Receipt]) -> torch.Tensor:
        if isinstance(self.total, WeightedSum):
            return await asyncio.to_thread(self.total.mean)
        try:
            return await asyncio.to_thread(self.total.aggregate)
        except RoundFailed as error:
            raise AttemptFailed(str(error), receipts) from error

    def stopped(self, reason: str) -> list[Receipt]:
        """Everyone's receipt; who has none yet was dropped for that reason."""
        for name in self.cohort:
            self.receipts.setdefault(name, self._receipt(name, "dropped", reason))
        return [self.receipts[name] for name in self.cohort]

    async def _one(self, name: str) -> None:
        """One device's part; leaves a receipt, whatever happens."""
        link = self.federation.link
        request = link_pb2.Request(
            id=link.new_id(),
            train_local=link_pb2.TrainLocal(
                run_id=self.federation.run_id,
                round=self.round,
                attempt=self.attempt,
                model=self.model,
                with_gradient=self.with_gradient,
            ),
        )
        try:
            reply = await link.ask(name, request)
        except ParticipantLost as lost:
            started = lost.reached
            self.receipts[name] = self._receipt(name, "dropped", str(lost), started=started)
            return
        if reply.WhichOneof("outcome") != "trained":
            reason = reason_of(reply)
            self.receipts[name] = self._receipt(name, "rejected", reason, sent=True)
            link.acknowledge(name, request.id, False, reason)
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
            link.acknowledge(name, request.id, accepted, reason)

    async def _take(self, name: str, trained: link_pb2.Trained) -> None:
        check_figures(trained)
        layout = self.federation.layout
        if trained.result.size != layout.nbytes:
            raise UpdateError(
                f"its update has {trained.result.size} bytes where this exchange set takes "
                f"{layout.nbytes}"
            )
        async with self.uploads:
            with Spool(self.federation.spool, expected=layout.nbytes) as spool:
                if isinstance(self.total, WeightedSum):
                    adding = StreamingUpdate(spool, self.total, layout, trained.examples)
                    async with added(self.federation.link, name, trained.result, adding):
                        self._accept(name, trained)
                else:
                    await self.federation.link.fetch(name, trained.result, spool.write)
                    await to_the_end(self._show(self.total, name, trained, spool))

    async def _show(
        self, gathering: UpdateCollector, name: str, trained: link_pb2.Trained, spool: Spool
    ) -> None:
        async with self.showing:
            self._check_wanted()
            await asyncio.to_thread(gathering.take, name, trained, spool)
            self._accept(name, trained)

    def _check_wanted(self) -> None:
        if self.accepted >= self.settings.cohort:
            raise UpdateError("enough updates were in")

    def _accept(self, name: str, trained: link_pb2.Trained) -> None:
        self._check_wanted()
        self.receipts[name] = self._receipt(
            name,
            "accepted",
            "",
            sent=True,
            examples=trained.examples,
            steps=trained.steps,
            seconds=trained.seconds,
            loss=trained.training.get("loss"),
            bytes_in=trained.result.size,
            bytes_out=self.model.size,
        )
        if "loss" in trained.training:
            self.losses[name] = (trained.training["loss"], trained.examples)

    def _receipt(self, name: str, status: Status, reason: str, **more: Any) -> Receipt:
        return Receipt(participant=name, regime="federated", status=status, reason=reason, **more)

    def _training(self) -> dict[str, float]:
        """In the cohort's order, so that the same losses give the same mean."""
        listed = [self.losses[name] for name in self.cohort if name in self.losses]
        weight = sum(examples for _, examples in listed)
        if not weight:
            return {}
        return {"loss": sum(loss * examples for loss, examples in listed) / weight}


@asynccontextmanager
async def added(
    link: Link, name: str, result: link_pb2.Blob, adding: StreamingUpdate
) -> AsyncIterator[None]:
    """An update is fetched and in its sum within the block, and stays there if the block ends well.

    Raises:
        ParticipantLost: it did not come.
        UpdateError: it is not what was named, or cannot be added.
    """
    try:
        await link.fetch(name, result, adding.write)
        assert adding.whole
        yield
    except BaseException:
        await to_the_end(asyncio.to_thread(adding.take_back))
        raise
