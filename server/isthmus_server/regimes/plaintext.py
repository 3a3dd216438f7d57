"""A federated attempt in which each device sends its update in plaintext.

For jobs that switch secure aggregation off: to inspect single updates, or with too few devices
for a secure sum.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import RoundFailed, UpdateError
from isthmus.transport.requests import position_message
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_privacy.slots import OTHER_WEIGHT
from isthmus_server.model.fixed_point_sum import SUM_BYTES, TILE, Part
from isthmus_server.model.update_decoding import StreamingUpdate, UpdateSpool
from isthmus_server.regimes.base import Aggregator, AttemptFailed, AttemptSpec, FederatedResult
from isthmus_server.regimes.call import ANSWER_SECONDS, CallFailed, NotUsed, ReceiptBook, call
from isthmus_server.regimes.partial_sums import PartialSums
from isthmus_server.regimes.reasons import UNREACHABLE, summarize_failures
from isthmus_server.regimes.received_update import decoded_update
from isthmus_server.regimes.round_times import TrainingTime
from isthmus_server.regimes.transfer_allowance import TransferAllowance
from isthmus_server.regimes.upload_places import NO_PLACE, UploadPlaces
from isthmus_server.storage.records import Receipt
from isthmus_server.transport.sanitize import check_figures

if TYPE_CHECKING:
    from isthmus_server.mirror.stored_updates import ExpectedUpdate
    from isthmus_server.regimes.context import FederatedContext
    from isthmus_server.transport.link import Link
    from isthmus_server.transport.peer import Place

ENOUGH = "enough updates were in"
"""Reason for refusing an update beyond the requested cohort."""


class PlaintextAttempt:
    """One attempt of a cohort whose updates the server receives individually."""

    def __init__(
        self, context: FederatedContext, spec: AttemptSpec, aggregator: Aggregator
    ) -> None:
        self._context = context
        self._spec = spec
        self._aggregator = aggregator
        self._receipts = ReceiptBook(spec.cohort, "federated")
        self._losses: dict[str, tuple[float, int]] = {}
        self._other_weights = 0
        self._weighed: dict[str, bool] = {}
        """Whether each accepted device has another weight than its examples."""
        self._seconds = context.round_times.seconds(spec.cohort, spec.settings.needed)
        self._places = UploadPlaces(context.link, least_rate=context.job.time.least_rate)

    async def run(self) -> FederatedResult:
        """Invite the cohort and aggregate what arrives in time.

        Raises:
            AttemptFailed: fewer updates than the quorum.
        """
        needed = self._spec.settings.needed
        try:
            over = await self._collect()
            for name, why in (await self._aggregator.settle()).items():
                self._lose(name, why)
        except BaseException:
            self._aggregator.end()
            raise
        receipts = self.cancelled(over)
        if self._receipts.accepted < needed:
            raise AttemptFailed(
                f"{self._receipts.accepted} of {len(receipts)} updates were accepted and the "
                f"quorum is {needed} ({summarize_failures(receipts)})",
                receipts,
                excused=self._receipts.excused,
                task_failures=self._receipts.task_failures,
            )
        try:
            pseudo_gradient, state = await self._aggregator.result()
        # What was sent cannot be combined: all devices did their work.
        except RoundFailed as error:
            raise AttemptFailed(str(error), receipts) from error
        return FederatedResult(
            pseudo_gradient=pseudo_gradient,
            training={**self._mean_loss(), **counted_weights(self._other_weights)},
            receipts=receipts,
            extension_state=state,
        )

    async def _collect(self) -> str:
        """Wait for the updates; returns why the wait ended."""
        settings = self._spec.settings
        limits = self._context.job.time
        seconds = self._seconds
        allowance = TransferAllowance(self._context.link, self._spec.cohort, limits.least_rate)
        tasks = [asyncio.create_task(self._train(name)) for name in self._spec.cohort]
        unreachable = False
        no_place: set[str] = set()
        try:
            async with asyncio.timeout(seconds) as limit:
                with allowance.extending(limit, self._outstanding):
                    # It ends early in both ways: with all that are wanted, and without hope for the
                    # quorum.
                    for task in asyncio.as_completed(tasks):
                        await task
                        if self._receipts.accepted >= settings.cohort:
                            return ENOUGH
                        outstanding = len(self._spec.cohort) - len(self._receipts)
                        if self._receipts.accepted + outstanding >= settings.needed:
                            continue
                        if not self._receipts.is_refused:
                            return UNREACHABLE
                        if not unreachable:
                            unreachable = True
                            now = asyncio.get_running_loop().time()
                            limit.reschedule(min(limit.when() or now, now + ANSWER_SECONDS))
        except TimeoutError:
            if not limit.expired():
                raise  # of another origin, such as a network file system
            no_place.update(filter(self._places.has_lacked, self._outstanding()))
        finally:
            # Waited for as well: a device that is cancelled subtracts what was added of its update.
            for pending in tasks:
                pending.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if unreachable:
            return UNREACHABLE
        for name in self._spec.cohort:
            if name in self._receipts:
                continue
            if name in no_place:
                self._receipts.record(name, "dropped", NO_PLACE, late=False)
            else:
                self._receipts.blame(name)
                self._context.round_times.late(name, seconds)
        return f"the round's {seconds:g} s were over"

    def _outstanding(self) -> list[str]:
        """Devices that have neither delivered nor failed."""
        return [name for name in self._spec.cohort if name not in self._receipts]

    def cancelled(self, reason: str) -> list[Receipt]:
        """Receipts of the whole cohort; devices without one were dropped for `reason`."""
        return self._receipts.complete(reason)

    async def _train(self, name: str) -> None:
        """Have one device train, and add its update."""
        spec = self._spec
        work = link_pb2.TrainLocal(
            run_id=self._context.run_id,
            round=spec.round,
            attempt=spec.attempt,
            model=spec.model,
            with_gradient=spec.with_gradient,
            gradient_scale=spec.gradient_scale,
            position=position_message(spec.position),
            changes=spec.changes,
            first_model=spec.first_model,
            seconds=self._seconds,
        )
        request = link_pb2.Request(train_local=work)
        self._context.sums.tell(name, request)
        link = self._context.link
        spent = TrainingTime(link, name, self._context.job.time.least_rate)
        times = self._context.round_times
        try:
            async with call(link, name, request, "trained", self._receipts) as reply:
                trained = reply.trained
                times.took(name, spent.seconds)
                messages = self._context.messages
                if messages is None:
                    check_update(trained, spec.result_layout(self._context.layout).nbytes)
                else:
                    check_encoded_update(trained, messages.max_bytes)

                def accept() -> None:
                    self._accept(name, trained)

                await self._aggregator.add(name, trained, accept, self._places)
            times.used(name)
        except CallFailed as failed:
            if failed.reason != ENOUGH:  # no round waits for more than it wants
                times.failed(name, spent.seconds - self._places.waited.get(name, 0.0))

    # Called when the whole update is in the sum. If it is refused here, it is subtracted again,
    # which leaves no trace in fixed point.
    def _accept(self, name: str, trained: link_pb2.Trained) -> None:
        if self._receipts.accepted >= self._spec.settings.cohort:
            raise NotUsed(ENOUGH)
        fields = accepted_fields(trained)
        if self._context.privacy is not None:
            # Not of whom the task failed: such a device has made no steps with no examples.
            fields |= {"examples": 1, "steps": 0}
        self._receipts.record(name, "accepted", **fields)
        if "loss" in trained.training:
            self._losses[name] = (trained.training["loss"], trained.examples)
        self._other_weights += trained.other_weight
        self._weighed[name] = trained.other_weight

    def _lose(self, name: str, why: str) -> None:
        """An update that was accepted is in no sum after all."""
        self._receipts.record(name, "dropped", why, sent=True, late=False)
        self._losses.pop(name, None)
        self._other_weights -= self._weighed.pop(name, False)

    def _mean_loss(self) -> dict[str, float]:
        """Mean loss, summed in the cohort's order so that the same losses give the same mean."""
        return mean_loss([self._losses[name] for name in self._spec.cohort if name in self._losses])


class WeightedMeanAggregator:
    """The mean of the updates, weighted by examples, exact in any order of arrival.

    Devices whose updates have noise, or a change of a control variate, count the same.
    """

    def __init__(self, context: FederatedContext, spec: AttemptSpec) -> None:
        self._context = context
        self._round = spec.round
        self._layout = spec.result_layout(context.layout)
        controlled = context.job.federated.control_variates is not None
        self._counts_devices = controlled or context.privacy is not None
        """Whether each device has the weight 1."""
        self._declared = spec.cohort
        # The precision of the sum follows from the weights, not from the numbers of examples.
        weights = len(spec.cohort) if self._counts_devices else sum(spec.cohort.values())
        self._total = context.weighted_sum(weights, self._layout.size)
        self._weights: dict[str, int] = {}
        """Weights of the updates that are at aggregators."""
        self._parts = PartialSums(
            context.link,
            link_pb2.OpenSum(
                updates=link_pb2.UpdateSum(
                    layout=self._layout.header,
                    declared_weight=weights,
                    clip=0.0 if context.privacy is None else context.privacy.clip,
                    fraction_bits=self._total.fraction_bits,
                ),
                about=f"{context.run_id}, round {spec.round}, attempt {spec.attempt}",
            ),
            SUM_BYTES * self._layout.size,
            least_rate=context.job.time.least_rate,
        )

    async def add(
        self,
        name: str,
        trained: link_pb2.Trained,
        accept: Callable[[], None],
        places: UploadPlaces,
    ) -> None:
        """Add an update while it arrives; see `Aggregator.add`."""
        layout = self._layout
        check_weight(trained.examples, self._declared[name])
        weight = 1 if self._counts_devices else trained.examples
        encoded = self._context.messages is not None
        if not encoded and (place := self._parts.place(name)) is not None:
            await self._add_there(place, name, trained.result, weight, accept, places)
            return
        blob = trained.result
        link = self._context.link
        async with link.stored(name, blob, self._context.spool) as stored, places.place(name):
            with UpdateSpool(self._context.spool, expected_bytes=blob.size) as spool:
                if encoded:
                    await link.fetch(name, blob, spool.write, spool.take, stored)
                    await to_the_end(self._add_decoded(spool, weight, accept))
                    return
                update = StreamingUpdate(spool, self._total, layout, weight)
                async with added(link, name, blob, update, stored):
                    accept()

    async def _add_there(
        self,
        place: Place,
        name: str,
        vector: link_pb2.Blob,
        weight: int,
        accept: Callable[[], None],
        places: UploadPlaces,
    ) -> None:
        """Have the aggregator of a device add its update."""
        added = await self._parts.add(place, vector, name, weight, places)
        try:
            accept()
        except UpdateError as error:
            self._parts.refuse(added, str(error))
            raise
        self._weights[name] = weight
        self._parts.keep(added)

    def end(self) -> None:
        """Have aggregators forget their sums; see `Aggregator.end`."""
        self._parts.end()

    async def settle(self) -> Mapping[str, str]:
        """Merge the sums of aggregators; see `Aggregator.settle`."""
        lost: dict[str, str] = {}
        async for part in self._parts.collected():
            weight = sum(self._weights[name] for name in part.devices)
            why = part.lost
            if not why and part.weight != weight:
                why = (
                    f"the sum of the aggregator {part.aggregator} has weight={part.weight} and not "
                    f"{weight}"
                )
            if not why:
                sums = Part(part.elements, weight, len(part.devices), part.has_small)
                try:
                    await to_the_end(asyncio.to_thread(self._total.merge, sums))
                except UpdateError as error:
                    why = f"the sum of the aggregator {part.aggregator} was refused: {error}"
            if why:
                lost.update(dict.fromkeys(part.devices, why))
        self._parts.end()
        return lost

    async def _add_decoded(
        self, spool: UpdateSpool, weight: int, accept: Callable[[], None]
    ) -> None:
        """Decode an encoded update and add it, unless it is not accepted any more."""
        vector = await asyncio.to_thread(decoded_update, self._context, self._round, spool)
        self._total.reserve(weight)
        tiles = [(start, vector[start : start + TILE]) for start in range(0, len(vector), TILE)]
        await asyncio.to_thread(self._add_tiles, tiles, weight)
        try:
            accept()
        except UpdateError:
            await asyncio.to_thread(self._total.withdraw, tiles, weight)
            raise

    def _add_tiles(self, tiles: list[tuple[int, torch.Tensor]], weight: int) -> None:
        for start, tile in tiles:
            self._total.add(start, tile, weight)

    async def result(self) -> tuple[torch.Tensor, Any]:
        """The weighted mean; there is no state."""
        return await asyncio.to_thread(self._total.mean), None


@contextlib.asynccontextmanager
async def added(
    link: Link,
    name: str,
    blob: link_pb2.Blob,
    update: StreamingUpdate,
    stored: ExpectedUpdate | None,
) -> AsyncIterator[None]:
    """Fetch an update into its sum; it stays there only if the block ends without an error.

    `stored` is what is in the store of it, see `Link.stored`.

    Raises:
        ParticipantLost: the device was lost before the update was complete.
        UpdateError: the bytes are not the announced ones, or cannot be added.
    """
    try:
        await link.fetch(name, blob, update.write, update.take, stored)
        assert update.complete
        yield
    except BaseException:
        # After a cancellation, too: what has arrived of an update that does not count is in the
        # sum.
        await to_the_end(asyncio.to_thread(update.withdraw))
        raise


def check_weight(examples: int, declared: int) -> None:
    """Check that an update counts as many examples as its device had when it opened the run.

    The server has chosen devices and the precision of their sum by what they declared, and shows
    it: a device that counts more would have a share of the model that nobody was told of.

    Raises:
        UpdateError: it counts more, or nothing.
    """
    if not 1 <= examples <= max(declared, 1):
        raise UpdateError(
            f"its weight={examples} does not fit: it must be at least 1 and at most "
            f"{max(declared, 1)}, the examples that it declared when it opened the run"
        )


def check_update(trained: link_pb2.Trained, nbytes: int) -> None:
    """Check a device's reply before its update is fetched.

    Raises:
        UpdateError: figures that are not finite, or an update of another size than `nbytes`.
    """
    check_figures(trained)
    if trained.result.size != nbytes:
        raise UpdateError(
            f"its update has {trained.result.size} bytes where this exchange set takes {nbytes}"
        )


def check_encoded_update(trained: link_pb2.Trained, max_bytes: int) -> None:
    """Check a device's reply before its encoded update is fetched.

    Raises:
        UpdateError: figures that are not finite, or an update of more than `max_bytes`.
    """
    check_figures(trained)
    if trained.result.size > max_bytes:
        raise UpdateError(
            f"its encoded update has {trained.result.size} bytes where federated.codec takes at "
            f"most {max_bytes}"
        )


def accepted_fields(trained: link_pb2.Trained) -> dict[str, Any]:
    """Fields of an accepted receipt that come from the device's reply."""
    return {
        "sent": True,
        "examples": trained.examples,
        "steps": trained.steps,
        "seconds": trained.seconds,
        "loss": trained.training.get("loss"),
    }


def counted_weights(others: int) -> dict[str, float]:
    """The figure for devices whose owners give another weight than the number of examples."""
    return {OTHER_WEIGHT.name: float(others)} if others else {}


def mean_loss(losses: list[tuple[float, int]]) -> dict[str, float]:
    """Mean of (loss, examples) pairs weighted by examples; empty without examples."""
    weight = sum(examples for _, examples in losses)
    if not weight:
        return {}
    return {"loss": sum(loss * examples for loss, examples in losses) / weight}
