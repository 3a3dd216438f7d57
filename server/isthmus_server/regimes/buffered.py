"""Asynchronous buffered aggregation (FedBuff, Nguyen et al. 2022).

Devices train at their own pace, many at once, each from the model that was current when it was
asked. A round takes the first updates that arrive, whichever model they started from, until its
buffer is full. Devices that still train continue into the following rounds; a device that has
delivered may be asked again in the next one. An update that started s rounds ago has weight
(1 + s) ** -exponent relative to one from the current model. With secure aggregation devices keep
their updates, and as many as fill a buffer form a cohort that masks and sums them (as in So et
al. 2021, with the protocol of `isthmus_privacy.secagg`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from isthmus.errors import ParticipantLost, RoundFailed
from isthmus.job.learning_rate import RoundPosition
from isthmus.transport.requests import position_message, position_of
from isthmus.wire import link_pb2
from isthmus_privacy.purpose import BufferedPurpose, buffer_name, ranges_run_id
from isthmus_server.model.update_decoding import StreamingUpdate, UpdateSpool
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec, FederatedResult
from isthmus_server.regimes.call import CallFailed, NotUsed, ReceiptBook, call
from isthmus_server.regimes.plaintext import (
    accepted_fields,
    added,
    check_update,
    check_weight,
    counted_weights,
    mean_loss,
)
from isthmus_server.regimes.round_times import TrainingTime
from isthmus_server.regimes.secure_sums.attempt import (
    TRAINING_SHARE,
    SecureAggregationAttempt,
    SecureSum,
)
from isthmus_server.regimes.secure_sums.ranged import RangedAttempt, RangedSum
from isthmus_server.regimes.secure_sums.round_configs import range_config, training_config
from isthmus_server.regimes.secure_sums.unmasked import secure_attempt
from isthmus_server.regimes.transfer_allowance import TransferAllowance
from isthmus_server.storage.records import Moved, Receipt
from isthmus_server.transport.sanitize import check_figures

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext

_BOUND = (
    "its device was in a sum about updates to the same model in an earlier attempt, and takes part "
    "again only with the same devices"
)

_TAKE_SECONDS = 120.0
"""Time in which one update is received and added, besides that of its transfer at the job's least
rate: the next one waits for it."""
_TIME_OVER = "the round's time was over before its update was here"
_RUN_OVER = "the run is over"


@dataclasses.dataclass
class LocalTraining:
    """A device that was invited and whose update is in no buffer yet."""

    name: str
    round: int
    """The round in which it was invited."""
    examples: int
    request: link_pb2.Request
    task: asyncio.Task[None] | None = None
    reply: link_pb2.Reply | None = None
    lost: ParticipantLost | None = None
    """Why there will be no reply."""
    seconds: float = 0.0
    """Time until the reply, as the server measures it."""
    moved: Moved = dataclasses.field(default_factory=Moved)
    """Bytes from and to it for the training, if its update is summed later."""


class BufferedDevices:
    """Devices that train across the rounds of one run.

    Guarantees:
      * memory of O(model): an update is fetched when a buffer has room for it, and stays on its
        device until then;
      * a device has at most one update in progress, and one in each buffer;
      * every device that still trains after a round has fetched its model: others are cancelled.
    """

    def __init__(self, context: FederatedContext) -> None:
        self.context = context
        self.training: dict[str, LocalTraining] = {}
        """Devices that train, in the order of their invitations."""
        self.trained: dict[str, LocalTraining] = {}
        """Devices that keep a finished update until it is summed securely."""
        self.current: BufferAttempt | None = None
        self._finished = asyncio.Event()

    @property
    def busy(self) -> list[str]:
        """Devices that cannot be invited now."""
        return [*self.training, *self.trained]

    def attempt(self, spec: AttemptSpec) -> BufferAttempt:
        """An attempt that fills one buffer; `spec.cohort` are the devices that may be invited."""
        self.current = BufferAttempt(self, spec)
        return self.current

    async def stop(self) -> None:
        """End the run: refuse the updates of devices that still train."""
        tasks = [training.task for training in self.training.values() if training.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for training in self.training.values():
            if training.reply is not None:
                self.context.link.acknowledge(training.name, training.request.id, False, _RUN_OVER)
        self.training.clear()
        self.trained.clear()

    def start(
        self, name: str, examples: int, round_: int, work: link_pb2.TrainLocal
    ) -> LocalTraining:
        """Have a device train, for the first buffer that its update reaches."""
        request = link_pb2.Request(id=self.context.link.new_id(), train_local=work)
        training = LocalTraining(name, round_, examples, request)
        training.task = asyncio.create_task(self._wait(training))
        self.training[name] = training
        return training

    async def _wait(self, training: LocalTraining) -> None:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        spent = TrainingTime(self.context.link, training.name, self.context.job.time.least_rate)
        try:
            training.reply = await self.context.link.ask(training.name, training.request)
            training.seconds = loop.time() - asked
            share = TRAINING_SHARE if training.request.train_local.keep else 1.0
            self.context.round_times.took(training.name, spent.seconds / share)
            self.context.round_times.used(training.name)  # in this buffer, or in a later one
        except ParticipantLost as lost:
            training.lost = lost
        finally:
            self._finished.set()

    async def next_finished(self) -> LocalTraining:
        """The next device that has replied or is lost; the one invited earliest comes first."""
        while True:
            for name, training in self.training.items():
                if training.reply is not None or training.lost is not None:
                    return self.training.pop(name)
            self._finished.clear()
            await self._finished.wait()


class BufferAttempt:
    """An attempt at a round that fills one buffer."""

    def __init__(self, devices: BufferedDevices, spec: AttemptSpec) -> None:
        self._devices = devices
        self._context = devices.context
        self._spec = spec
        busy = {
            training.name: training.examples
            for training in (*devices.training.values(), *devices.trained.values())
        }
        self._idle = {name: count for name, count in spec.cohort.items() if name not in busy}
        self._queue = sorted(self._idle)
        seed = f"isthmus/buffer/{self._context.job.seed}/{spec.round}"
        # With more devices than may train at once, the first of the alphabet would train in every
        # round. The seed has no attempt in it, so that a repeated one invites in the same order.
        random.Random(seed).shuffle(self._queue)  # noqa: S311 - a choice, not a secret
        # The most weight that can reach this buffer: the precision of the sum follows from it.
        declared = sum(busy.values()) + sum(self._idle.values())
        self.total = self._context.weighted_sum(declared, self._context.layout.size)
        """Sum of the buffer's updates; unused with secure aggregation."""
        self._receipts = ReceiptBook((), "federated")
        self._losses: list[tuple[float, int]] = []
        self._other_weights = 0
        self._started: list[LocalTraining] = []
        self._secure: SecureAggregationAttempt | RangedAttempt | None = None
        self._summed: dict[str, LocalTraining] = {}
        """The devices whose updates are summed securely."""
        # A sum that is repeated is that of the same devices.
        exact = len(spec.cohort) if spec.exact else None
        self._full = exact or spec.settings.cohort
        """Number of updates in a full buffer."""
        self._needed = exact or spec.settings.needed
        """Number of updates without which the attempt fails."""

    @property
    def _filled(self) -> int:
        """Number of updates in the buffer."""
        if self._spec.settings.secure_aggregation:
            return len(self._kept)
        return self._receipts.accepted

    @property
    def _kept(self) -> list[LocalTraining]:
        """Updates that devices keep for a secure sum, and that this one may contain."""
        trained = self._devices.trained.values()
        return [each for each in trained if not self._spec.exact or each.name in self._spec.cohort]

    async def run(self) -> FederatedResult:
        """Keep `concurrency` devices training, and take their updates until the buffer is full.

        Raises:
            AttemptFailed: fewer updates than the quorum within the round's time.
        """
        settings = self._spec.settings
        # Not less than usual: a device may have to train several times until a buffer is full.
        seconds = max(
            self._context.job.time.first_round_seconds,
            self._context.round_times.seconds(
                {*self._spec.cohort, *self._devices.training}, settings.needed
            ),
        )
        deadline = asyncio.get_running_loop().time() + seconds
        # A secure sum begins after the training, and has the rest of the round.
        share = TRAINING_SHARE if settings.secure_aggregation else 1.0
        for name, training in list(self._devices.trained.items()):
            if self._is_bound(training):
                del self._devices.trained[name]
                self._receipts.record(name, "dropped", _BOUND)
        link = self._context.link
        allowance = TransferAllowance(link, link.peers, self._context.job.time.least_rate)
        try:
            async with asyncio.timeout(seconds * share) as limit:
                with allowance.extending(limit, lambda: list(self._devices.training)):
                    while self._filled < self._full:
                        self._start_devices()
                        if not self._devices.training:
                            break  # every device has delivered or failed
                        await self._take(await self._devices.next_finished())
        except TimeoutError:
            if not limit.expired():
                raise  # of another origin, such as a network file system
            for name, training in self._devices.training.items():
                # One that has replied waits until the updates before are here.
                if training.round == self._spec.round and training.reply is None:
                    self._context.round_times.late(name, seconds)
        if self._filled < self._needed:
            receipts = self._all_receipts(())
            causes = sorted({f"{r.participant}: {r.reason}" for r in receipts if r.reason})
            explained = f" ({'; '.join(causes[:3])})" if causes else ""
            raise AttemptFailed(
                f"{self._filled} updates came into the buffer and {self._wanted}{explained}",
                receipts,
            )
        if settings.secure_aggregation:
            return await self._sum_securely(deadline)
        try:
            mean = await asyncio.to_thread(self.total.mean)
        except RoundFailed as error:
            raise AttemptFailed(str(error), self._all_receipts(())) from error
        return FederatedResult(
            pseudo_gradient=mean,
            training=self._training(),
            receipts=self._all_receipts(()),
        )

    @property
    def _wanted(self) -> str:
        if self._spec.exact:
            return f"the sum that is repeated is of {self._needed} devices"
        return f"the quorum is {self._needed}"

    def cancelled(self, reason: str) -> list[Receipt]:
        """Receipts after `run` was cancelled; devices that train continue."""
        return self._all_receipts([] if self._secure is None else self._secure.cancelled(reason))

    async def _sum_securely(self, deadline: float) -> FederatedResult:
        """Sum finished updates; each device applies its own staleness weight before masking."""
        context = self._context
        spec = self._spec
        trained = self._devices.trained
        # The first that have finished; those that do not fit into this buffer wait for the next
        # one.
        cohort = self._summable(self._kept[: self._full])
        for training in cohort:
            # Whatever becomes of this sum: a device puts a kept update into one unmasked sum only.
            del trained[training.name]
        self._summed = {training.name: training for training in cohort}
        starts = sorted({_start_of(training) for training in cohort})
        # The updates began at several models, so that the sum is named after its buffer and not a
        # model.
        buffer = buffer_name(context.run_id, spec.round)

        def agreeing(secure: bytes = b"", ranges: bytes = b"") -> link_pb2.Request:
            agree = link_pb2.Agree(
                secure=secure,
                ranges=ranges,
                run_id=context.run_id,
                round=spec.round,
                attempt=spec.attempt,
                starts=[
                    link_pb2.BufferedStart(
                        round=round_,
                        model=model,
                        with_gradient=with_gradient,
                        position=position_message(position),
                    )
                    for round_, model, with_gradient, position in starts
                ],
            )
            return link_pb2.Request(agree=agree)

        def send(config: bytes) -> link_pb2.Request:
            return agreeing(secure=config)

        purpose = context.signed_sums.named(BufferedPurpose(context.purpose, tuple(starts)))
        if context.job.finds_ranges:
            self._secure = RangedAttempt(
                context,
                RangedSum(
                    name=buffer,
                    cohort=self._summed,
                    exact=spec.exact,
                    group="",
                    ranges=range_config(context, spec, buffer, purpose),
                    find=lambda config: agreeing(ranges=config),
                    send=send,
                    at_once=send,
                    config=lambda ranges, wider: training_config(
                        context, spec, buffer, purpose, ranges, wider=wider
                    ),
                ),
            )
        else:
            config = training_config(context, spec, buffer, purpose)
            wanted = SecureSum(
                config=config, cohort=self._summed, first_request=send, exact=spec.exact
            )
            self._secure = secure_attempt(context, wanted)
        try:
            result = await self._secure.run(deadline)
        except AttemptFailed as error:
            raise AttemptFailed(str(error), self._all_receipts(error.receipts)) from error
        staleness = sum(spec.round - training.round for training in cohort) / len(cohort)
        return dataclasses.replace(
            result,
            training={**result.training, "staleness": staleness},
            receipts=self._all_receipts(result.receipts),
        )

    def _is_bound(self, training: LocalTraining) -> bool:
        """Whether a device would refuse the sum of this buffer because of an earlier one.

        It trained again on a model after an attempt whose ranges it has unmasked: in that round
        these are known, and its update is summed with any others. A later round has ranges of its
        own, and would sum those of that model once more, with other devices.
        """
        if training.round == self._spec.round:
            return False
        run_id = self._context.run_id
        log = self._context.unmaskings
        return any(
            training.name in entry.devices and entry.round == training.round
            for run in (run_id, ranges_run_id(run_id))
            for entry in log.about(run, training.round, None)
        )

    def _summable(self, trained: list[LocalTraining]) -> list[LocalTraining]:
        """The updates that one sum can contain: no older than allowed, one start in each round.

        A round that was tried again without its gradient has two. Devices accept one, the later.
        """
        starts = {training.round: _start_of(training) for training in trained}
        chosen = []
        for training in trained:
            stale = self._spec.round - training.round
            if stale > self._spec.settings.buffer.max_staleness:
                reason = f"it began {stale} rounds ago"
            elif _start_of(training) != starts[training.round]:
                reason = f"round {training.round} was tried again from another model"
            else:
                chosen.append(training)
                continue
            del self._devices.trained[training.name]
            self._receipts.record(training.name, "dropped", reason)
        return chosen

    def _all_receipts(self, secure: Iterable[Receipt]) -> list[Receipt]:
        self._cancel_devices_without_model()
        return [*self._receipts.recorded, *map(self._with_training, secure)]

    def _with_training(self, receipt: Receipt) -> Receipt:
        """The receipt of a secure sum, with what is known of the training before it."""
        training = self._summed[receipt.participant]
        return dataclasses.replace(
            receipt,
            staleness=self._spec.round - training.round,
            seconds=training.seconds,
            started=True,
        ).with_moved(receipt.moved + training.moved)

    def _cancel_devices_without_model(self) -> None:
        """Cancel devices asked here that lack the model: it is not published after the round."""
        for training in self._started:
            peer = self._context.link.peers.get(training.name)
            lacks_model = peer is not None and peer.last_blob != self._spec.model.sha256
            active = self._devices.training.get(training.name) is training
            if lacks_model and training.reply is None and active:
                del self._devices.training[training.name]
                assert training.task is not None
                training.task.cancel()
                reason = "the round was over before it had the model"
                self._receipts.record(training.name, "dropped", reason, started=False)

    def _start_devices(self) -> None:
        spec = self._spec
        while self._queue and len(self._devices.training) < spec.settings.concurrency:
            name = self._queue.pop(0)
            work = link_pb2.TrainLocal(
                run_id=self._context.run_id,
                round=spec.round,
                attempt=spec.attempt,
                model=spec.model,
                keep=spec.settings.secure_aggregation,
                with_gradient=spec.with_gradient,
                position=position_message(spec.position),
                first_model=spec.first_model,
            )
            self._started.append(self._devices.start(name, self._idle[name], spec.round, work))

    async def _take(self, training: LocalTraining) -> None:
        """Add the update of a finished device, or record why it is not in the buffer."""
        name = training.name
        lost = training.lost
        if lost is not None:
            self._receipts.record(name, "dropped", str(lost), started=lost.reached, late=False)
            return
        try:
            async with call(
                self._context.link,
                name,
                training.request,
                "trained",
                self._receipts,
                seconds=_TAKE_SECONDS,
                least_rate=self._context.job.time.least_rate,
                reply=training.reply,
                late=_TIME_OVER,
            ) as reply:
                await self._add(training, reply.trained)
            if name in self._devices.trained:
                # The receipt is written by the sum that has its update, perhaps in a later round.
                training.moved = self._receipts.take_bytes(name)
        except CallFailed:
            return
        except asyncio.CancelledError:
            # The training belongs to no round any more, so that no later one would write its
            # receipt.
            if name not in self._receipts:
                self._receipts.record(name, "dropped", _TIME_OVER)
            raise

    async def _add(self, training: LocalTraining, trained: link_pb2.Trained) -> None:
        settings = self._spec.settings
        layout = self._context.layout
        check_figures(trained)
        staleness = self._spec.round - training.round
        if staleness > settings.buffer.max_staleness:
            raise NotUsed(
                f"it began {staleness} rounds ago, and at most {settings.buffer.max_staleness} "
                "are taken"
            )
        if settings.secure_aggregation:
            if self._is_bound(training):
                raise NotUsed(_BOUND)
            self._devices.trained[training.name] = training
            return
        check_update(trained, layout.nbytes)
        check_weight(trained.examples, training.examples)
        scale = settings.buffer.discount(staleness)
        link = self._context.link
        name = training.name
        blob = trained.result
        async with link.stored(name, blob, self._context.spool) as stored:
            with UpdateSpool(self._context.spool, expected_bytes=layout.nbytes) as spool:
                update = StreamingUpdate(spool, self.total, layout, trained.examples, scale)
                async with added(link, name, blob, update, stored):
                    self._accept(training, trained, staleness)

    def _accept(self, training: LocalTraining, trained: link_pb2.Trained, staleness: int) -> None:
        self._receipts.record(
            training.name,
            "accepted",
            **accepted_fields(trained),
            staleness=staleness,
        )
        if "loss" in trained.training:
            self._losses.append((trained.training["loss"], trained.examples))
        self._other_weights += trained.other_weight

    def _training(self) -> dict[str, float]:
        """Mean loss, and mean staleness in rounds."""
        staleness = [r.staleness for r in self._receipts.recorded if r.status == "accepted"]
        return {
            "staleness": sum(staleness) / len(staleness),
            **mean_loss(self._losses),
            **counted_weights(self._other_weights),
        }


def _start_of(training: LocalTraining) -> tuple[int, bytes, bool, RoundPosition]:
    """What a device trained from: see `isthmus_privacy.purpose.Start`."""
    work = training.request.train_local
    return work.round, work.model.sha256, work.with_gradient, position_of(work.position)
