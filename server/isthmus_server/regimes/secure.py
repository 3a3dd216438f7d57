"""A federated attempt in which the server learns the sum of the updates and no single one.

The protocol is `isthmus_privacy.secagg`; this is its way through the link. A device trains first
and only then takes part in it, so that those who drop out in training, most of all who do, cost
nothing. Then each step is one request to everybody who is left:

    TrainLocal -> keys | roster -> sealed shares | inbox -> masked vector
    | survivors -> signature | signatures -> released shares | the sum
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from isthmus.errors import (
    AdmissionRefused,
    AggregationAborted,
    ParticipantLost,
    PeerMisbehaved,
    UpdateError,
)
from isthmus.job.federated import FederatedSection
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_privacy.secagg import (
    AdvertiseKeys,
    ConsistencySignature,
    MaskedInput,
    RoundConfig,
    ServerSession,
    ShareKeys,
    Slot,
    UnmaskingShares,
    decode,
)
from isthmus_server.model.fixed_point_sum import Spool
from isthmus_server.regimes.results import AttemptFailed, FederatedResult
from isthmus_server.storage.receipts import UNREACHABLE, Receipt, Status, reasons
from isthmus_server.transport.sanitize import check_figures, reason_of

if TYPE_CHECKING:
    from isthmus_server.regimes.context import Federation

UPLOADS_AT_ONCE = 8
"""Masked vectors under way at the same time; each takes a file, not memory."""

LARGEST_LOSS = 1000.0
"""A device's average loss is clipped to this inside the masked vector."""

_CORRUPT_PERMILLE = 100

FOR_TRAINING = 0.75
"""Share of the round's time after which the protocol begins with those who have trained."""


class Margins(TypedDict):
    """Fields of an agreement; see `RoundConfig`."""

    clients_max: int
    clients_min: int
    corrupt_permille: int
    dropout_permille: int


def margins(settings: FederatedSection) -> Margins:
    """How many take part, and how many of them may be missing or corrupt."""
    missing = 1000 * (settings.cohort - settings.needed) / settings.cohort
    return {
        "clients_max": settings.cohort,
        "clients_min": settings.needed,
        "corrupt_permille": _CORRUPT_PERMILLE,
        "dropout_permille": math.ceil(missing),
    }


def agreement(
    federation: Federation,
    round_: int,
    attempt: int,
    model: link_pb2.Blob,
    settings: FederatedSection,
) -> RoundConfig:
    """What every device of the attempt agrees to; see `RoundConfig`."""
    return RoundConfig(
        run_id=federation.run_id,
        round=round_,
        attempt=attempt,
        model_hash=model.sha256,
        size=federation.layout.size,
        slots=(Slot(name="loss", maximum=LARGEST_LOSS),),
        **margins(settings),
        clip=settings.clip,
        weight_max=settings.max_examples,
    )


Begin = Callable[[bytes], link_pb2.Request]
"""From the agreement to the first request of an attempt: training, or scoring."""


class SecureAggregationAttempt:
    """One attempt of a cohort.

    Guarantees:
      * whoever drops out, whenever, the sum is exactly that of those in `accepted` receipts, or
        the attempt fails;
      * masked vectors are added as they come and none is kept.
    """

    def __init__(
        self,
        federation: Federation,
        config: RoundConfig,
        model: link_pb2.Blob,
        cohort: Collection[str],
        begin: Begin,
    ) -> None:
        """`begin` makes the request in which a device computes what is summed up."""
        self.federation = federation
        self.model = model
        self.cohort = sorted(cohort)
        self.config = config
        self.begin = begin
        self.session = ServerSession(config, federation.directory, invited=cohort)
        self.receipts: dict[str, Receipt] = {}
        self.seconds: dict[str, float] = {}
        self.uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self.adding = asyncio.Lock()

    async def run(self, deadline: float | None = None) -> FederatedResult:
        """All steps, to the mean of the survivors' updates.

        `deadline` (loop time) is until when vectors may come; without one, a round's time from now.

        Raises:
            AttemptFailed: too few were left at some step.
        """
        times = self.federation.job.time
        session = self.session
        start = asyncio.get_running_loop().time()
        if deadline is None:
            deadline = start + times.round_seconds
        trained_by = start + FOR_TRAINING * (deadline - start)
        try:
            await self._step(
                "training", self.cohort, self._train, trained_by, self.config.clients_max
            )
            roster = session.roster().to_bytes()
            await self._quick("sharing keys", {"roster": roster}, self._take_shares)
            boxes = session.inboxes()
            inboxes = {name: {"inbox": inbox.to_bytes()} for name, inbox in boxes.items()}

            async def mask(name: str) -> None:
                await self._upload(name, inboxes[name])

            await self._step("sending", session.missing, mask, deadline)
            survivors = session.survivors().to_bytes()
            await self._quick("signing", {"survivors": survivors}, self._take_consent)
            consistency_signatures = session.consistency_signatures().to_bytes()
            await self._quick(
                "releasing", {"consistency_signatures": consistency_signatures}, self._take_release
            )
            total = await asyncio.to_thread(session.unmask)
            aggregate = decode(self.config, total.vector, clients=len(total.clients))
        except AggregationAborted as error:
            raise AttemptFailed(self._explain(error), self._all_receipts(())) from error
        finally:
            session.close()
        receipts = self._all_receipts(total.clients)
        training = {
            **aggregate.figures,
            "examples": float(aggregate.weight),
            "clipped": aggregate.clipped,
        }
        return FederatedResult(
            pseudo_gradient=aggregate.vector, training=training, receipts=receipts
        )

    # -- steps -------------------------------------------------------------------------------------

    async def _quick(
        self, what: str, message: dict[str, bytes], take: Callable[[str, bytes], None]
    ) -> None:
        """A step without training or vectors: everybody who is left, within a lease."""

        async def one(name: str) -> None:
            request, stepped = await self._ask(name, message)
            self.federation.link.acknowledge(name, request.id, True)
            take(name, stepped.message)

        deadline = asyncio.get_running_loop().time() + self.federation.job.time.lease_seconds
        await self._step(what, self.session.missing, one, deadline)

    async def _step(
        self,
        what: str,
        names: Collection[str],
        one: Callable[[str], Awaitable[None]],
        deadline: float,
        wanted: int | None = None,
    ) -> None:
        """Everyone's part in a step; who fails has a receipt and is out of the next ones.

        Ends when all are done, when `wanted` are heard, or at the deadline (loop time).
        """
        tasks: dict[asyncio.Task[None], str] = {
            asyncio.create_task(self._part(name, one)): name
            for name in sorted(names)
            if name not in self.receipts
        }
        pending: set[asyncio.Task[None]] = set(tasks)
        why = f"it did not finish {what} in time"
        try:
            while pending:
                left = deadline - asyncio.get_running_loop().time()
                _, pending = await asyncio.wait(
                    pending, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
                )
                if wanted is not None and self.session.heard >= wanted:
                    why = "enough devices had come"
                    break
                if self.session.heard + len(pending) < self.config.clients_min:
                    why = UNREACHABLE
                    break
                if left <= 0:
                    break
            for task in pending:
                self._drop(tasks[task], why)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    async def _part(self, name: str, one: Callable[[str], Awaitable[None]]) -> None:
        try:
            await one(name)
        except ParticipantLost as lost:
            # Who has trained was reached, even if it is gone when the next step begins.
            self._drop(name, str(lost), started=lost.reached or name in self.seconds)
        except (PeerMisbehaved, AdmissionRefused, UpdateError) as error:
            self.receipts[name] = self._receipt(name, "rejected", str(error), sent=True)

    async def _train(self, name: str) -> None:
        request = self.begin(self.config.to_bytes())
        request.id = self.federation.link.new_id()
        reply = await self._reply(name, request, "trained")
        self.federation.link.acknowledge(name, request.id, True)
        check_figures(reply.trained)
        advert = AdvertiseKeys.from_bytes(reply.trained.secure)
        _same(name, advert.name)
        if self.session.heard >= self.config.clients_max:
            raise UpdateError("enough devices had come")
        self.session.take_advert(advert)
        self.seconds[name] = reply.trained.seconds

    async def _ask(
        self, name: str, message: dict[str, bytes]
    ) -> tuple[link_pb2.Request, link_pb2.SecureStepped]:
        step = link_pb2.SecureStep(
            run_id=self.config.run_id,
            round=self.config.round,
            attempt=self.config.attempt,
            **message,
        )
        request = link_pb2.Request(id=self.federation.link.new_id(), secure_step=step)
        return request, (await self._reply(name, request, "secure_stepped")).secure_stepped

    async def _reply(self, name: str, request: link_pb2.Request, kind: str) -> link_pb2.Reply:
        reply = await self.federation.link.ask(name, request)
        if reply.WhichOneof("outcome") != kind:
            reason = reason_of(reply)
            self.federation.link.acknowledge(name, request.id, False, reason)
            raise AdmissionRefused(reason)
        return reply

    async def _upload(self, name: str, message: dict[str, bytes]) -> None:
        """The one step with a large answer: the masked vector, spooled, checked, added."""
        request, stepped = await self._ask(name, message)
        accepted, reason = False, "the round is over"
        try:
            await self._add(name, stepped)
            accepted, reason = True, ""
        except (PeerMisbehaved, UpdateError) as error:
            reason = str(error)
            raise
        finally:
            # Also when it was too slow: until it is told, a device keeps its vector.
            self.federation.link.acknowledge(name, request.id, accepted, reason)

    async def _add(self, name: str, stepped: link_pb2.SecureStepped) -> None:
        masked = MaskedInput.from_bytes(stepped.message)
        _same(name, masked.name)
        if stepped.masked.size != self.config.payload_bytes:
            raise UpdateError(
                f"its masked vector has {stepped.masked.size} bytes where this agreement takes "
                f"{self.config.payload_bytes}"
            )
        async with self.uploads:
            with Spool(self.federation.spool, expected=stepped.masked.size) as spool:
                await self.federation.link.fetch(name, stepped.masked, spool.write)
                async with self.adding:
                    with spool.view() as payload:
                        await to_the_end(
                            asyncio.to_thread(self.session.take_masked, masked, payload)
                        )

    def _take_shares(self, name: str, message: bytes) -> None:
        shares = ShareKeys.from_bytes(message)
        _same(name, shares.name)
        self.session.take_shares(shares)

    def _take_consent(self, name: str, message: bytes) -> None:
        consent = ConsistencySignature.from_bytes(message)
        _same(name, consent.name)
        self.session.take_consistency_signature(consent)

    def _take_release(self, name: str, message: bytes) -> None:
        release = UnmaskingShares.from_bytes(message)
        _same(name, release.name)
        self.session.take_unmasking_shares(release)

    # -- receipts ----------------------------------------------------------------------------------

    def stopped(self, reason: str) -> Sequence[Receipt]:
        """Receipts of an attempt that was cancelled; whoever has none was dropped for that."""
        for name in self.cohort:
            if name not in self.receipts:
                self._drop(name, reason)
        return self._all_receipts(())

    def _drop(self, name: str, reason: str, *, started: bool = True) -> None:
        self.receipts[name] = self._receipt(name, "dropped", reason, started=started)

    def _receipt(self, name: str, status: Status, reason: str, **more: Any) -> Receipt:
        return Receipt(
            participant=name,
            regime="federated",
            status=status,
            reason=reason,
            seconds=self.seconds.get(name, 0.0),
            **more,
        )

    def _all_receipts(self, accepted: Collection[str]) -> Sequence[Receipt]:
        """For everybody invited; who is in the sum is accepted, even if it left after that."""
        found = []
        for name in self.cohort:
            known = self.receipts.get(name)
            if name in accepted:
                reason = f"its update is in; later: {known.reason}" if known else ""
                sizes = {"bytes_in": self.config.payload_bytes, "bytes_out": self.model.size}
                found.append(self._receipt(name, "accepted", reason, sent=True, **sizes))
            else:
                why = "the attempt ended before its update was in"
                found.append(known or self._receipt(name, "dropped", why))
        return found

    def _explain(self, error: AggregationAborted) -> str:
        said = reasons(self.receipts.values())
        tail = f" ({said})" if said else ""
        return f"secure aggregation stopped: {error}{tail}"


def _same(name: str, claimed: str) -> None:
    """A message belongs to the participant on whose stream it came."""
    if name != claimed:
        raise UpdateError(f"it sent a message of {claimed!r}")
