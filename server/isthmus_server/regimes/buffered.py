"""Asynchronous buffered aggregation (FedBuff, Nguyen et al. 2022).

Devices train at their own pace, many at once, each from the model there was when it was asked. A
round takes the first updates that come, whatever model they began with, until its buffer is full;
those who are still at work go on into the rounds after it, and whoever has delivered may be asked
again in the next one. An update that began s models ago counts (1 + s) ** -exponent of one that
began with the newest. With secure aggregation devices keep their updates, and as many as fill a
buffer become a cohort that masks and sums them (as in So et al. 2021, with our protocol).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.errors import ParticipantLost, UpdateError
from isthmus.job.federated import FederatedSection, buffer_name
from isthmus.wire import link_pb2
from isthmus_server.model.fixed_point_sum import Spool, StreamingUpdate
from isthmus_server.regimes.plaintext import added
from isthmus_server.regimes.results import AttemptFailed, FederatedResult
from isthmus_server.regimes.secure import FOR_TRAINING, SecureAggregationAttempt, agreement
from isthmus_server.storage.receipts import Receipt, Status
from isthmus_server.transport.sanitize import check_figures, reason_of

if TYPE_CHECKING:
    from isthmus_server.regimes.context import Federation


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
    reached: bool = True
    """It was here when it was asked."""


class Buffered:
    """Devices at work over many rounds of one run.

    Guarantees:
      * memory of O(model): an update is fetched when a buffer has room for it, and stays with its
        device until then;
      * a device has at most one update under way, and one in each buffer;
      * whoever is still at work after a round has its model: who had not is let go.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.working: dict[str, _Working] = {}
        self.held: dict[str, _Working] = {}
        """Devices that have trained and keep their update until it is summed securely."""
        self._came = asyncio.Event()

    async def train(
        self,
        round_: int,
        attempt: int,
        model: link_pb2.Blob,
        cohort: Mapping[str, int],
        settings: FederatedSection,
        with_gradient: bool = False,
    ) -> FederatedResult:
        """Fill one buffer; `cohort` are those who may be asked for it besides those at work.

        Raises:
            AttemptFailed: fewer updates than the quorum within the round's time.
        """
        filling = Filling(self, round_, attempt, model, cohort, settings, with_gradient)
        self.filling = filling
        return await filling.run()

    def stopped(self, reason: str) -> list[Receipt]:
        """Receipts of a buffer that was given up; who is at work stays so."""
        return self.filling.all_receipts(reason)

    async def stop(self) -> None:
        """The run is over: nobody waits for those who are still at work."""
        tasks = [one.task for one in self.working.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self.working.values():
            if one.reply is not None:
                self.federation.link.acknowledge(one.name, one.request.id, False, "the run is over")
        self.working.clear()
        self.held.clear()

    def ask(self, name: str, examples: int, round_: int, work: link_pb2.TrainLocal) -> _Working:
        """Have a device begin, for whichever buffer it will be in time for."""
        request = link_pb2.Request(id=self.federation.link.new_id(), train_local=work)
        one = _Working(name, round_, examples, request, work.model.size)
        one.task = asyncio.create_task(self._wait(one))
        self.working[name] = one
        return one

    async def _wait(self, one: _Working) -> None:
        try:
            one.reply = await self.federation.link.ask(one.name, one.request)
        except ParticipantLost as lost:
            one.lost, one.reached = str(lost), lost.reached
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
        model: link_pb2.Blob,
        cohort: Mapping[str, int],
        settings: FederatedSection,
        with_gradient: bool,
    ) -> None:
        self.devices = devices
        self.federation = devices.federation
        self.round = round_
        self.attempt = attempt
        self.model = model
        self.settings = settings
        self.with_gradient = with_gradient
        busy = (*devices.working.values(), *devices.held.values())
        at_work = {one.name: one.examples for one in busy}
        self.idle = {name: count for name, count in cohort.items() if name not in at_work}
        self.order = sorted(self.idle)
        seed = f"isthmus/buffer/{self.federation.job.seed}/{round_}"
        random.Random(seed).shuffle(self.order)  # noqa: S311 - chosen, not secret
        declared = sum(at_work.values()) + sum(self.idle.values())
        self.total = self.federation.weighted_sum(declared)
        self.receipts: dict[str, Receipt] = {}
        self.losses: list[tuple[float, int]] = []
        self.asked: list[_Working] = []
        self.summing: SecureAggregationAttempt | None = None
        self.summed: dict[str, int] = {}
        """How stale those are whose updates are being summed securely."""

    @property
    def filled(self) -> int:
        """Updates in the buffer so far."""
        if self.settings.secure_aggregation:
            return len(self.devices.held)
        return sum(receipt.status == "accepted" for receipt in self.receipts.values())

    async def run(self) -> FederatedResult:
        """Keep as many at work as the job says, and take who comes."""
        secure = self.settings.secure_aggregation
        seconds = self.federation.job.time.round_seconds
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout(seconds * (FOR_TRAINING if secure else 1.0)):
                while self.filled < self.settings.cohort:
                    self._top_up()
                    if not self.devices.working:
                        break  # everybody who may be asked has delivered or failed
                    await self._take(await self.devices.next())
        except TimeoutError:
            pass
        if self.filled < self.settings.needed:
            receipts = self._with_mine(())
            reasons = sorted({f"{r.participant}: {r.reason}" for r in receipts if r.reason})
            why = f" ({'; '.join(reasons[:3])})" if reasons else ""
            raise AttemptFailed(
                f"{self.filled} updates came into the buffer and the quorum is "
                f"{self.settings.needed}{why}",
                receipts,
            )
        if secure:
            return await self._sum_securely(deadline)
        return FederatedResult(
            pseudo_gradient=await asyncio.to_thread(self.total.mean),
            training=self._training(),
            receipts=self._with_mine(()),
        )

    async def _sum_securely(self, deadline: float) -> FederatedResult:
        """The finished devices as a cohort; each discounts its own update before it masks it."""
        federation, held = self.federation, self.devices.held
        taken = [held.pop(name) for name in list(held)[: self.settings.cohort]]
        self.summed = {one.name: self.round - one.version for one in taken}
        name = buffer_name(federation.run_id, self.round)
        about = link_pb2.Blob(sha256=name, size=self.model.size)
        config = agreement(federation, self.round, self.attempt, about, self.settings)

        def begin(agreed: bytes) -> link_pb2.Request:
            agree = link_pb2.Agree(
                run_id=federation.run_id, round=self.round, attempt=self.attempt, secure=agreed
            )
            return link_pb2.Request(agree=agree)

        self.summing = SecureAggregationAttempt(federation, config, about, self.summed, begin)
        try:
            result = await self.summing.run(deadline)
        except AttemptFailed as error:
            raise AttemptFailed(str(error), self._with_mine(error.receipts)) from error
        stale = {"staleness": sum(self.summed.values()) / len(self.summed)}
        return dataclasses.replace(
            result,
            training={**result.training, **stale},
            receipts=self._with_mine(result.receipts),
        )

    def all_receipts(self, reason: str) -> list[Receipt]:
        """When the buffer is given up for a reason."""
        return self._with_mine([] if self.summing is None else self.summing.stopped(reason))

    def _with_mine(self, theirs: Sequence[Receipt]) -> list[Receipt]:
        self._let_go()
        known = [
            dataclasses.replace(receipt, staleness=self.summed[receipt.participant], started=True)
            for receipt in theirs
        ]
        return [*self.receipts.values(), *known]

    def _let_go(self) -> None:
        """Of those asked here who still lack the model: nobody holds it for them after this."""
        for one in self.asked:
            peer = self.federation.link.peers.get(one.name)
            lacks = peer is not None and peer.given != self.model.sha256
            if lacks and one.reply is None and self.devices.working.get(one.name) is one:
                del self.devices.working[one.name]
                assert one.task is not None
                one.task.cancel()
                reason = "the round was over before it had the model"
                self._note(one, "dropped", reason, started=False)

    def _top_up(self) -> None:
        while self.order and len(self.devices.working) < self.settings.concurrency:
            name = self.order.pop(0)
            work = link_pb2.TrainLocal(
                run_id=self.federation.run_id,
                round=self.round,
                attempt=self.attempt,
                model=self.model,
                keep=self.settings.secure_aggregation,
                with_gradient=self.with_gradient,
            )
            self.asked.append(self.devices.ask(name, self.idle[name], self.round, work))

    async def _take(self, one: _Working) -> None:
        """What became of one device that finished; leaves a receipt."""
        if one.reply is None:
            self._note(one, "dropped", one.lost, started=one.reached)
            return
        try:
            await self._add(one, one.reply)
        except ParticipantLost as lost:
            self._note(one, "dropped", str(lost))
        except UpdateError as error:
            self._note(one, "rejected", str(error), sent=True)
        except asyncio.CancelledError:
            if one.name not in self.receipts:
                self._note(one, "dropped", "the round's time was over before its update was here")
            raise
        finally:
            receipt = self.receipts.get(one.name)
            refused = receipt is not None and receipt.status != "accepted"
            reason = receipt.reason if receipt is not None else ""
            self.federation.link.acknowledge(one.name, one.request.id, not refused, reason)

    async def _add(self, one: _Working, reply: link_pb2.Reply) -> None:
        if reply.WhichOneof("outcome") != "trained":
            raise UpdateError(reason_of(reply))
        trained, layout = reply.trained, self.federation.layout
        check_figures(trained)
        most = self.settings.buffer.max_staleness
        stale = self.round - one.version
        if stale > most:
            raise UpdateError(f"it began {stale} rounds ago, and at most {most} are taken")
        if self.settings.secure_aggregation:
            self.devices.held[one.name] = one
            return
        if trained.result.size != layout.nbytes:
            raise UpdateError(
                f"its update has {trained.result.size} bytes where this exchange set takes "
                f"{layout.nbytes}"
            )
        scale = self.settings.buffer.discount(stale)
        with Spool(self.federation.spool, expected=layout.nbytes) as spool:
            adding = StreamingUpdate(spool, self.total, layout, trained.examples, scale)
            async with added(self.federation.link, one.name, trained.result, adding):
                self._accept(one, trained, stale)

    def _accept(self, one: _Working, trained: link_pb2.Trained, stale: int) -> None:
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

    def _note(self, one: _Working, status: Status, reason: str, **more: Any) -> None:
        self.receipts[one.name] = Receipt(
            participant=one.name,
            regime="federated",
            status=status,
            reason=reason,
            **more,
        )

    def _training(self) -> dict[str, float]:
        """Mean loss, and of how many models ago the updates began."""
        taken = [r.staleness for r in self.receipts.values() if r.status == "accepted"]
        found = {"staleness": sum(taken) / len(taken)}
        weight = sum(examples for _, examples in self.losses)
        if weight:
            found["loss"] = sum(loss * examples for loss, examples in self.losses) / weight
        return found
