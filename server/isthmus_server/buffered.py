"""Asynchronous buffered aggregation (FedBuff, Nguyen et al. 2022).

Devices train at their own pace, many at once, each from the model there was when it was asked. A
round takes the first updates that come, whatever model they began with, until its buffer is full;
those who are still at work go on into the rounds after it, and whoever has delivered may be asked
again in the next one. An update that began s models ago counts (1 + s) ** -exponent of one that
began with the newest. With secure aggregation a full buffer of finished devices, which keep their
updates, becomes a cohort: see `_secure_sum`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from isthmus.errors import ParticipantLost, UpdateError
from isthmus.federated import FederatedSection
from isthmus.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_server.aggregate import Spool, WeightedSum
from isthmus_server.outcome import AttemptFailed, FederatedResult
from isthmus_server.receipts import Receipt

if TYPE_CHECKING:
    from isthmus_server.regimes import Fleet


@dataclasses.dataclass
class _Working:
    """One device that was asked and whose update is in no buffer yet."""

    name: str
    version: int
    """The round in which it was asked."""
    examples: int
    request: link_pb2.Request
    model_bytes: int
    task: asyncio.Task[None] | None = None
    reply: link_pb2.Reply | None = None
    lost: str = ""
    """Why it will not answer any more."""


class Buffered:
    """Devices at work over many rounds of one run.

    Guarantees:
      * memory of O(model): an update is fetched when a buffer has room for it, and stays with its
        device until then;
      * a device has at most one update under way, and one in each buffer.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.working: dict[str, _Working] = {}
        self._came = asyncio.Event()

    async def train(
        self,
        round_: int,
        attempt: int,
        model: link_pb2.Content,
        cohort: Mapping[str, int],
        settings: FederatedSection,
    ) -> FederatedResult:
        """Fill one buffer; `cohort` are those who may be asked for it besides those at work.

        Raises:
            AttemptFailed: fewer updates than the quorum within the round's time.
        """
        filling = Filling(self, round_, attempt, model, cohort, settings)
        self.filling = filling
        return await filling.run()

    def stopped(self, reason: str) -> list[Receipt]:
        """Receipts of a buffer that was given up; who is at work stays so."""
        return list(self.filling.receipts.values())

    async def stop(self) -> None:
        """The run is over: nobody waits for those who are still at work."""
        tasks = [one.task for one in self.working.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self.working.values():
            if one.reply is not None:
                self.fleet.link.settle(one.name, one.request.id, False, "the run is over")
        self.working.clear()

    def ask(self, name: str, examples: int, round_: int, work: link_pb2.TrainLocal) -> None:
        """Have a device begin, for whichever buffer it will be in time for."""
        request = link_pb2.Request(id=self.fleet.link.new_id(), train_local=work)
        one = _Working(name, round_, examples, request, work.model.size)
        one.task = asyncio.create_task(self._wait(one))
        self.working[name] = one

    async def _wait(self, one: _Working) -> None:
        try:
            one.reply = await self.fleet.link.ask(one.name, one.request)
        except ParticipantLost as lost:
            one.lost = str(lost)
        finally:
            self._came.set()

    async def next(self) -> _Working:
        """The next device that has finished or is lost, in the order in which they began."""
        while True:
            for name, one in self.working.items():
                if one.reply is not None or one.lost:
                    return self.working.pop(name)
            self._came.clear()
            await self._came.wait()


class Filling:
    """One buffer."""

    def __init__(
        self,
        devices: Buffered,
        round_: int,
        attempt: int,
        model: link_pb2.Content,
        cohort: Mapping[str, int],
        settings: FederatedSection,
    ) -> None:
        self.devices = devices
        self.fleet = devices.fleet
        self.round = round_
        self.attempt = attempt
        self.model = model
        self.settings = settings
        at_work = {one.name: one.examples for one in devices.working.values()}
        self.idle = {name: count for name, count in cohort.items() if name not in at_work}
        self.order = sorted(self.idle)
        seed = f"isthmus/buffer/{self.fleet.job.seed}/{round_}"
        random.Random(seed).shuffle(self.order)  # noqa: S311 - chosen, not secret
        self.total = WeightedSum(
            self.fleet.layout.size, sum(at_work.values()) + sum(self.idle.values())
        )
        self.receipts: dict[str, Receipt] = {}
        self.losses: list[tuple[float, int]] = []

    @property
    def accepted(self) -> int:
        """Updates in the buffer so far."""
        return sum(receipt.status == "accepted" for receipt in self.receipts.values())

    async def run(self) -> FederatedResult:
        """Keep as many at work as the job says, and take who comes."""
        try:
            async with asyncio.timeout(self.fleet.job.time.round_seconds):
                while self.accepted < self.settings.cohort:
                    self._top_up()
                    if not self.devices.working:
                        break  # everybody who may be asked has delivered or failed
                    await self._take(await self.devices.next())
        except TimeoutError:
            pass
        receipts = list(self.receipts.values())
        if self.accepted < self.settings.needed:
            reasons = sorted({f"{r.participant}: {r.reason}" for r in receipts if r.reason})
            why = f" ({'; '.join(reasons[:3])})" if reasons else ""
            raise AttemptFailed(
                f"{self.accepted} updates came into the buffer and the quorum is "
                f"{self.settings.needed}{why}",
                receipts,
            )
        return FederatedResult(
            pseudo_gradient=self.total.mean(), training=self._training(), receipts=receipts
        )

    def _top_up(self) -> None:
        while self.order and len(self.devices.working) < self.settings.concurrency:
            name = self.order.pop(0)
            work = link_pb2.TrainLocal(
                run_id=self.fleet.run_id, round=self.round, attempt=self.attempt, model=self.model
            )
            self.devices.ask(name, self.idle[name], self.round, work)

    async def _take(self, one: _Working) -> None:
        """What became of one device that finished; leaves a receipt."""
        if one.reply is None:
            self._note(one, "dropped", one.lost)
            return
        try:
            await self._add(one, one.reply)
        except ParticipantLost as lost:
            self._note(one, "dropped", str(lost))
        except UpdateError as error:
            self._note(one, "rejected", str(error), sent=True)
        except asyncio.CancelledError:
            self._note(one, "dropped", "the round's time was over before its update was here")
            raise
        finally:
            receipt = self.receipts[one.name]
            accepted = receipt.status == "accepted"
            self.fleet.link.settle(one.name, one.request.id, accepted, receipt.reason)

    async def _add(self, one: _Working, reply: link_pb2.Reply) -> None:
        if reply.WhichOneof("outcome") != "trained":
            raise UpdateError(reply.failure.reason or "it answered something else than was asked")
        trained, layout = reply.trained, self.fleet.layout
        most = self.settings.buffer.most_staleness
        stale = self.round - one.version
        if stale > most:
            raise UpdateError(f"it began {stale} rounds ago, and at most {most} are taken")
        if trained.result.size != layout.nbytes:
            raise UpdateError(
                f"its update has {trained.result.size} bytes where this exchange set takes "
                f"{layout.nbytes}"
            )
        scale = self.settings.buffer.discount(stale)
        with Spool(self.fleet.spool) as spool:
            await self.fleet.link.fetch(one.name, trained.result, spool.write)
            await to_the_end(
                asyncio.to_thread(spool.add_to, self.total, layout, trained.examples, scale)
            )
        self._note(
            one,
            "accepted",
            "",
            sent=True,
            examples=trained.examples,
            steps=trained.steps,
            seconds=trained.seconds,
            staleness=stale,
            loss=trained.training.get("loss"),
            bytes_in=trained.result.size,
            bytes_out=one.model_bytes,
        )
        if "loss" in trained.training:
            self.losses.append((trained.training["loss"], trained.examples))

    def _note(self, one: _Working, status: str, reason: str, **more: object) -> None:
        self.receipts[one.name] = Receipt(
            participant=one.name,
            regime="federated",
            status=status,  # type: ignore[arg-type]
            reason=reason,
            **more,  # type: ignore[arg-type]
        )

    def _training(self) -> dict[str, float]:
        """Mean loss, and of how many models ago the updates began."""
        taken = [r.staleness for r in self.receipts.values() if r.status == "accepted"]
        found = {"staleness": sum(taken) / len(taken)}
        weight = sum(examples for _, examples in self.losses)
        if weight:
            found["loss"] = sum(loss * examples for loss, examples in self.losses) / weight
        return found
