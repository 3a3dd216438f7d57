"""A federated attempt in which the server learns the sum of the updates and no single one.

The protocol is `isthmus_privacy.secagg`; this module runs it over the link. A device trains first
and joins the protocol afterwards, so that devices lost during training, the most frequent loss,
cost nothing. Each later step is one request to every remaining device:

    TrainLocal -> keys | roster -> sealed shares | inbox -> masked vector
    | survivors -> signature | signatures -> unmasking shares | the sum

A sum that was set up for two spares the next one, of its devices, the first two requests:

    Agree -> masked vector | survivors -> signature | signatures -> unmasking shares | the sum
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from isthmus.errors import AggregationAborted, PeerMisbehaved, UpdateError
from isthmus.transport.blobs import describe
from isthmus.transport.stream import to_the_end
from isthmus.wire import link_pb2
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.config import RoundConfig, SetUpBefore
from isthmus_privacy.secagg.encoding import Aggregate, decode
from isthmus_privacy.secagg.messages import (
    MASKED_INPUT,
    SHARE_KEYS,
    AdvertiseKeys,
    ConsistencySignature,
    MaskedInput,
    Roster,
    UnmaskingShares,
)
from isthmus_privacy.secagg.ranges import Ranges
from isthmus_privacy.secagg.server import RingSum, ServerSession
from isthmus_privacy.slots import UNUSABLE
from isthmus_server.model.summed_evaluation import attempt_in_words
from isthmus_server.model.update_decoding import UpdateSpool
from isthmus_server.regimes.base import AttemptFailed, FederatedResult
from isthmus_server.regimes.call import (
    ANSWER_SECONDS,
    PRIVACY_REFUSALS,
    CallFailed,
    NotUsed,
    ReceiptBook,
    call,
)
from isthmus_server.regimes.partial_sums import PartialSums
from isthmus_server.regimes.reasons import UNREACHABLE, anonymous, group_reasons, summarize_failures
from isthmus_server.regimes.round_times import TrainingTime
from isthmus_server.regimes.secure_sums.departures import Departures
from isthmus_server.regimes.secure_sums.local_logs import LocalLogs
from isthmus_server.regimes.secure_sums.round_configs import AttemptUnmaskings, BeforeUnmasking
from isthmus_server.regimes.secure_sums.stated_draw import StatedDraw
from isthmus_server.regimes.secure_sums.step_limits import StepLimits
from isthmus_server.regimes.transfer_allowance import TransferAllowance
from isthmus_server.regimes.upload_places import NO_PLACE, UploadPlaces
from isthmus_server.storage.records import Receipt, Status
from isthmus_server.transport.bundle import offered

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext
    from isthmus_server.transport.peer import Place

TRAINING_SHARE = 0.75
"""Share of the round's time for training; then the protocol starts with those who have trained. The
rest of the round is for their vectors, and `StepLimits` extend it: the time of the protocol does
not depend on how long training took."""

ENOUGH = "enough devices had finished training"
"""Reason for refusing a vector beyond the requested cohort."""
_ATTEMPT_OVER = "the attempt ended before its update was in"
_LOGS_SAY_WHY = "the devices' own logs say why"
_TRAINING = "training"
"""The first step, also where devices compute something else in it."""


FirstRequest = Callable[[bytes], link_pb2.Request]
"""Builds the first request of an attempt (training or scoring) from the encoded configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecureSum:
    """What an attempt sums, and of whom."""

    config: RoundConfig
    """The round's configuration."""
    cohort: Collection[str]
    """Names of the invited devices."""
    first_request: FirstRequest
    """Makes the request in which a device computes its vector."""
    exact: bool = False
    """Whether the sum must be that of the whole cohort, because its devices may have unmasked an
    earlier one of the same model; without one of them the attempt fails before any of them signs.
    """
    alone: FirstRequest | None = None
    """Makes the request with which a device would join without a sum of ranges before; None for
    `first_request`. The log of unmaskings has it."""
    ranges: Ranges | None = None
    """Ranges of the updates of the cohort, which say how much they can weigh; None if they are not
    known."""
    group: RandomGroup | None = None
    """The random group that is summed, if a lottery has drawn it."""
    before: SecureAggregationAttempt | None = None
    """The attempt at a sum of the same devices that was set up for two, and has ended; None if
    there is none. This sum has a set-up of its own if it allows another cohort."""
    question: str = ""
    """What devices do for it, such as "evaluate the model"; empty if it is of a round."""

    @property
    def about(self) -> str:
        """What it is of, for people."""
        config = self.config
        what = f"round {config.round}"
        if self.question:
            what = f"question {config.round} ({self.question})"
        return f"{config.run_id}, {what}, {attempt_in_words(config.attempt)}"


class SecureAggregationAttempt:
    """One attempt of a cohort.

    Guarantees:
      * whichever devices drop out at whichever step, the sum is exactly that of the devices with
        `accepted` receipts, or the attempt fails;
      * masked vectors are added as they arrive and none is kept;
      * a device without a usable vector sends zeros of weight 0: the server learns only how many
        did, and the attempt fails if the quorum of usable ones is not reached.
    """

    def __init__(self, context: FederatedContext, wanted: SecureSum) -> None:
        """Prepare the sum that is wanted in the run of `context`."""
        config = wanted.config
        cohort = wanted.cohort
        joining = (wanted.alone or wanted.first_request)(config.to_bytes())
        self._context = context
        self._first_request = wanted.first_request
        session: ServerSession | None = None
        if wanted.before is not None:
            following = wanted.before.config_after(config)
            if following is not None:
                config = following
                session = wanted.before._session.followed_by(config)
        self._is_set_up = session is not None
        self._before = wanted.before
        self._config = config
        self._session: ServerSession = session or ServerSession(
            config, context.directory, invited=cohort, group=wanted.group
        )
        self._receipts = ReceiptBook(sorted(cohort), "federated")
        self._encoded = config.to_bytes()
        """The configuration as devices get it: encoding it takes a while for each of many."""
        self._unmaskings = AttemptUnmaskings(context.unmaskings, config, joining)
        self._draw = StatedDraw(config.draw, context.link.enrolments)
        self._ranges = wanted.ranges
        self._exact = wanted.exact
        self._needed = len(cohort) if wanted.exact else config.clients_min
        self._trains = False
        """Whether devices train in the first step."""
        self._training_seconds = 0.0
        """Time for the first step, in which devices train."""
        self._trained: dict[str, float] = {}
        """Seconds of a round that the training of each device was just in time for."""
        self._limits: StepLimits
        """Known as soon as the roster is."""
        self._logs = LocalLogs(context.spool / "logs", self._receipts.names)
        self.has_sum = False
        """Whether the server has the sum, and devices had usable vectors."""
        self._places = UploadPlaces(context.link, least_rate=context.job.time.least_rate)
        self._adding = asyncio.Lock()
        form = link_pb2.MaskedSum(
            length=config.length,
            bits=config.bits,
            figures=0 if config.codec is None else config.figures.length,
        )
        opening = link_pb2.OpenSum(masked=form, about=wanted.about)
        self._parts = PartialSums(
            context.link,
            opening,
            config.payload_bytes,
            least_rate=context.job.time.least_rate,
        )

    @property
    def config(self) -> RoundConfig:
        """The configuration that the devices sign."""
        return self._config

    def config_after(self, config: RoundConfig) -> RoundConfig | None:
        """The configuration of a next sum with the set-up of this one; None if it needs its own."""
        following = dataclasses.replace(config, set_up=SetUpBefore(self._config.hash))
        return following if following.follows(self._config) else None

    async def run(
        self,
        deadline: float | None = None,
        *,
        before_unmasking: BeforeUnmasking | None = None,
    ) -> FederatedResult:
        """Run all steps; returns the mean of the survivors' vectors.

        `deadline` (loop time) is the end of the round, which limits the training; without one, a
        round's time from now. `StepLimits` has the limits of the steps after training.
        `before_unmasking` stores the entry for the log of unmaskings; None stores it at once.

        Raises:
            AttemptFailed: too few devices were left at some step, or had a usable vector.
        """
        summed: Collection[str] = ()
        start = asyncio.get_running_loop().time()
        work = self._first_request(self._encoded).WhichOneof("work")
        self._trains = work == "train_local"
        if deadline is None:
            seconds = self._context.round_times.seconds(self._receipts.names, self._needed)
            if not self._trains:  # nothing is known of how long that takes
                seconds = max(seconds, self._context.job.time.first_round_seconds)
            deadline = start + seconds
        self._training_seconds = TRAINING_SHARE * (deadline - start)
        trained_by = start + self._training_seconds
        try:
            total = await self._sum(trained_by, deadline, before_unmasking)
            summed = total.clients
            self.has_sum = True
            aggregate = decode(
                self._config,
                total.vector,
                total.ring.figures,
                clients=len(summed),
                ranges=self._ranges,
                awaits_noise=self._context.privacy is not None,
            )
        except AggregationAborted as error:
            # No device was lost: all of them said that they had nothing. This counts as an attempt.
            if error.code == "zero-total-weight":
                raise self._unusable(summed, "no device had a usable update") from None
            invited = len(self._receipts.names)
            excused = self._receipts.excused and self._draw.excuses(invited)
            causes = summarize_failures(self._receipts.recorded)
            causes = f" ({causes})" if causes else ""
            suspect = self._draw.suspicion(invited)
            raise AttemptFailed(
                f"{suspect}secure aggregation stopped: {error}{causes}",
                self._all_receipts(()),
                excused=excused,
            ) from error
        finally:
            self._parts.end()
            self._session.close()
            self._draw.leave_out_few(len(self._receipts.names))
        self._check_usable(aggregate, summed)
        for name in set(summed) & set(self._trained):
            self._context.round_times.used(name)
        return FederatedResult(
            pseudo_gradient=aggregate.vector,
            training={
                **aggregate.figures,
                "examples": float(aggregate.weight),
                **({} if aggregate.clipped is None else {"clipped": aggregate.clipped}),
            },
            receipts=self._all_receipts(summed),
            rounding=aggregate.rounding,
            noise=aggregate.noise,
        )

    async def _sum(
        self, trained_by: float, deadline: float, before_unmasking: BeforeUnmasking | None
    ) -> RingSum:
        """Run the protocol to the sum of the survivors' vectors; times are loop times.

        Raises:
            AggregationAborted: too few devices were left at some step.
        """
        session = self._session
        if not self._is_set_up:
            await self._set_up(trained_by)
        roster = session.roster
        self._limits = self._limits_for(roster)
        # Not the end of the round alone: the slower the training was, the less would be left for
        # what it was done for.
        sent_by = self._limits.upload_deadline(
            asyncio.get_running_loop().time(), round_end=deadline
        )
        await self._step("sending", session.missing, self._upload, sent_by)
        await self._take_parts()
        self._check_complete()
        survivors = session.finish_masked_input().to_bytes()
        names = session.missing  # all survivors: none has signed yet
        await self._short_step(
            "signing", link_pb2.SecureStep(survivors=survivors), self._take_signature
        )
        signatures = session.finish_consistency_check().to_bytes()
        set_up = b""
        if self._is_set_up and self._before is not None:
            set_up = self._before._encoded
        # A roster of a large cohort takes a while to encode and to write.
        await asyncio.to_thread(
            self._context.keep_signed, self._config, roster, survivors, signatures, set_up
        )
        # On disk before the first device is asked for its shares. After a crash the server has to
        # know who may have revealed them: these take part in another sum of the model only
        # together.
        await self._unmaskings.note_before(names, before_unmasking)
        quorum = session.quorum_signatures().to_bytes()
        await self._short_step(
            "unmasking",
            link_pb2.SecureStep(consistency_signatures=quorum),
            self._take_unmasking_shares,
        )
        # Masks are as long as the model, and the link has to go on answering.
        return await asyncio.to_thread(session.unmask)

    async def _set_up(self, trained_by: float) -> None:
        """Have devices compute their vectors, advertise their keys and share them.

        Raises:
            AggregationAborted: too few devices were left.
        """
        session = self._session
        await self._step(
            _TRAINING,
            self._receipts.names,
            self._train,
            trained_by,
            self._config.clients_max,
            until_masked=True,
        )
        self._check_complete()
        roster = session.finish_advertise_keys()
        self._limits = self._limits_for(roster)
        # A blob, which all devices are sent from the same memory: a large cohort has megabytes.
        blob = describe(roster.to_bytes())
        with offered(self._context.link, [(blob, roster.to_bytes())]):
            await self._short_step(
                "sharing keys",
                link_pb2.SecureStep(roster=blob),
                self._take_shares,
                until_masked=True,
            )
        self._check_complete()
        session.finish_share_keys()

    def _limits_for(self, roster: Roster) -> StepLimits:
        return StepLimits.of(self._context.job.time, self._config, clients=len(roster.entries))

    def _check_usable(self, aggregate: Aggregate, summed: Collection[str]) -> None:
        """Refuse a sum to which fewer devices than the quorum have contributed.

        Raises:
            AttemptFailed: with the number of unusable vectors, which is all that the server knows.
        """
        unusable = int(aggregate.figures.get(UNUSABLE.name, 0))  # with noise it is not known
        needed = self._config.clients_min
        if len(summed) - unusable < needed:
            raise self._unusable(
                summed,
                f"{unusable} of {len(summed)} devices had no usable update and the quorum is "
                f"{needed}",
            )

    def _unusable(self, summed: Collection[str], reason: str) -> AttemptFailed:
        # It may be another one when the task no longer fails. But one device of another machine can
        # say so of the others' vectors, and would say it again.
        self.has_sum = self._context.certified
        for name in summed:
            self._record_summed(name, "rejected", "too few of the summed updates were usable")
        receipts = self._receipts.complete(_ATTEMPT_OVER)
        failures = self._logs.task_failures()
        why = "; ".join(f"{names}: {how}" for names, how in group_reasons(failures))
        return AttemptFailed(
            f"{reason}; {why or _LOGS_SAY_WHY}",
            receipts,
            task_failures=[anonymous(how, name) for name, how in failures.items()],
        )

    def cancelled(self, reason: str) -> list[Receipt]:
        """Receipts of the whole cohort; devices without one were dropped for `reason`."""
        return self._receipts.complete(reason)

    # -- steps -------------------------------------------------------------------------------------

    async def _step(
        self,
        what: str,
        names: Collection[str],
        part: Callable[[str], Awaitable[None]],
        deadline: float,
        wanted: int | None = None,
        *,
        until_masked: bool = False,
    ) -> None:
        """Run a step on all devices; one that fails gets a receipt and leaves the protocol.

        Ends when all are done, when the messages of `wanted` devices have arrived, when the quorum
        cannot be reached any more, or at the deadline (loop time), to which the time of transfers
        is added. While nobody has accepted, those who have not answered get a moment to refuse as
        well. `until_masked`: a device that leaves the server after it has done this step cannot be
        in the sum.
        """

        async def guarded(name: str) -> None:
            try:
                await part(name)
            # The receipt is written. With such a refusal a device also says that it has unmasked a
            # sum of this model, of which this log may not know: that of another run, for example.
            except CallFailed as failed:
                if failed.code in PRIVACY_REFUSALS:
                    self._unmaskings.note_refusal(name, failed.code)
                elif failed.reason != ENOUGH:  # no round waits for more than it wants
                    self._note_failed(name)
                self._draw.note_failure(name, failed)

        # Sorted, so that two runs ask in the same order.
        names_by_task = {
            asyncio.create_task(guarded(name)): name
            for name in sorted(names)
            if name not in self._receipts
        }
        pending: set[asyncio.Task[None]] = set(names_by_task)
        context = self._context
        allowance = TransferAllowance(context.link, names, context.job.time.least_rate)
        own_deadline = deadline
        reason = f"it did not finish {what} in time"
        departures = Departures(self._context.link.listeners, names_by_task)
        gone: Collection[str] = ()
        try:
            while pending:
                left = deadline - asyncio.get_running_loop().time()
                pending = await departures.or_finished(pending, max(0.0, left))
                # Only in training. Later, a device that is left out has to be recovered by the
                # others, which costs more than to wait for it.
                if wanted is not None and self._received >= wanted:
                    reason = ENOUGH
                    break
                if until_masked and departures.names:
                    at_work = {names_by_task[task] for task in pending}
                    gone = departures.names & (self._participating - at_work)
                reachable = self._received - len(gone) + len(pending)
                if reachable < self._needed and reason != UNREACHABLE:
                    reason = UNREACHABLE
                    now = asyncio.get_running_loop().time()
                    deadline = min(deadline, now + ANSWER_SECONDS)
                    left = deadline - now
                if reason == UNREACHABLE and not (pending and left > 0 and self._is_refused):
                    break
                if left <= 0 and reason != UNREACHABLE:
                    at_work = {names_by_task[task] for task in pending}
                    if (later := allowance.end(own_deadline, at_work)) > deadline:
                        deadline = later
                        left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    for task in pending:
                        name = names_by_task[task]
                        if self._places.has_lacked(name):
                            self._receipts.record(name, "dropped", NO_PLACE, late=False)
                            continue
                        self._receipts.blame(name)
                        if what == _TRAINING and self._trains:
                            self._context.round_times.late(
                                name, self._training_seconds / TRAINING_SHARE
                            )
                        else:
                            self._note_failed(name)
                    break
            for task in pending:
                if (name := names_by_task[task]) not in self._receipts:
                    self._receipts.record(name, "dropped", reason)
            for name in gone:
                self._receipts.record(name, "dropped", f"lost: it left after {what}", late=False)
        finally:
            departures.end()
            # All have ended before the next step begins, which must not get a message of this one.
            for task in names_by_task:
                task.cancel()
            results = await asyncio.gather(*names_by_task, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result

    def _note_failed(self, name: str) -> None:
        """A device has failed by itself, for whose training the round has waited."""
        if name in self._trained:
            self._context.round_times.failed(name, self._trained[name])

    @property
    def _is_refused(self) -> bool:
        """Whether nobody is known to have accepted, so that the answers of all are worth a wait."""
        return self._received == 0 and self._receipts.is_refused

    @property
    def _received(self) -> int:
        """Messages of the running step that have arrived."""
        return self._session.received

    def _check_complete(self) -> None:
        """Abort an exact attempt that a device has left.

        Raises:
            AggregationAborted: the sum would not be that of the whole cohort.
        """
        if self._exact and self._received < self._needed:
            raise AggregationAborted(
                f"{self._received} of {self._needed} devices are left, and they may take "
                "part only together: they have unmasked a sum of the same model or round"
            )

    @property
    def _participating(self) -> set[str]:
        """Devices that are still in the protocol: those without a receipt."""
        return {name for name in self._receipts.names if name not in self._receipts}

    async def _short_step(
        self,
        what: str,
        message: link_pb2.SecureStep,
        take: Callable[[str, bytes], None],
        *,
        until_masked: bool = False,
    ) -> None:
        """A step without training or vectors, on all remaining devices."""

        async def part(name: str) -> None:
            async with self._call_step(name, message) as reply:
                take(name, reply.secure_stepped.message)

        deadline = asyncio.get_running_loop().time() + self._limits.step_seconds
        await self._step(what, self._session.missing, part, deadline, until_masked=until_masked)

    def _call_step(
        self, name: str, message: link_pb2.SecureStep
    ) -> contextlib.AbstractAsyncContextManager[link_pb2.Reply]:
        """Send the next protocol message to a device."""
        request = link_pb2.Request(secure_step=message)
        request.secure_step.run_id = self._config.run_id
        request.secure_step.round = self._config.round
        request.secure_step.attempt = self._config.attempt
        return call(self._context.link, name, request, "secure_stepped", self._receipts)

    async def _train(self, name: str) -> None:
        """The first step: a device computes its vector and advertises its keys."""
        request = self._first_request(self._encoded)
        self._context.sums.tell(name, request)
        if self._trains:
            request.train_local.seconds = self._training_seconds
        spent = TrainingTime(self._context.link, name, self._context.job.time.least_rate)
        try:
            async with call(self._context.link, name, request, "trained", self._receipts) as reply:
                # A device does not tell: its time depends on its data.
                seconds = spent.seconds
                if self._trains:
                    self._context.round_times.took(name, seconds / TRAINING_SHARE)
                keys = AdvertiseKeys.from_bytes(reply.trained.secure)
                _check_sender(name, keys.name)
                if self._session.received >= self._config.clients_max:
                    raise NotUsed(ENOUGH)
                self._draw.note_accepted(name)
                self._session.receive_keys(keys)
                self._receipts.remember(name, seconds=seconds)
        finally:
            if self._trains:
                self._trained[name] = spent.seconds / TRAINING_SHARE

    async def _upload(self, name: str) -> None:
        """The only step with a large reply: the masked vector, spooled, checked and added."""
        if self._is_set_up:
            request = self._first_request(self._encoded)
            spent = TrainingTime(self._context.link, name, self._context.job.time.least_rate)
            async with call(self._context.link, name, request, "trained", self._receipts) as reply:
                trained = reply.trained
                await self._take_masked(name, trained.secure, trained.result)
                self._draw.note_accepted(name)
                self._receipts.remember(name, seconds=spent.seconds)
            return
        inbox = self._session.inbox(name).to_bytes()
        async with self._call_step(name, link_pb2.SecureStep(inbox=inbox)) as reply:
            stepped = reply.secure_stepped
            await self._take_masked(name, stepped.message, stepped.masked)

    async def _take_masked(self, name: str, message: bytes, blob: link_pb2.Blob) -> None:
        """Fetch, check and add a masked vector."""
        masked = MASKED_INPUT[self._config.is_for_two].from_bytes(message)
        _check_sender(name, masked.name)
        if blob.size != self._config.payload_bytes:
            raise UpdateError(
                f"its masked vector has {blob.size} bytes where this configuration "
                f"takes {self._config.payload_bytes}"
            )
        if (place := self._parts.place(name)) is not None:
            await self._add_there(place, masked, blob)
            return
        # Each takes a file, and a cohort sends at once.
        async with self._places.place(name):
            with UpdateSpool(self._context.spool, expected_bytes=blob.size) as spool:
                await self._context.link.fetch(name, blob, spool.write)
                # One at a time, as all are added to one vector; and to the end, so that nothing is
                # added after the attempt has ended.
                async with self._adding:
                    with spool.view() as payload:
                        adding = asyncio.to_thread(
                            self._session.receive_masked_input, masked, payload
                        )
                        await to_the_end(adding)

    async def _add_there(self, place: Place, masked: MaskedInput, blob: link_pb2.Blob) -> None:
        """Have the aggregator of a device add its masked vector, which tells it nothing."""
        if blob.sha256 != masked.sha256:  # that it has signed, and the aggregator checks
            raise UpdateError("its masked vector is not the one that it has signed")
        added = await self._parts.add(place, blob, masked.name, 0, self._places)
        try:
            self._session.note_masked_input(masked)
        except PeerMisbehaved as error:
            self._parts.refuse(added, str(error))
            raise
        self._parts.keep(added)

    async def _take_parts(self) -> None:
        """Add the sums of aggregators; the devices of one that is lost have dropped out.

        Before anybody signs who is in the sum: nothing is unmasked that is not here.
        """
        async for part in self._parts.collected():
            if not part.lost:
                await to_the_end(
                    asyncio.to_thread(self._session.receive_masked_sum, part.devices, part.elements)
                )
                continue
            self._session.lose_masked_sum(part.devices)
            for name in part.devices:
                self._receipts.record(name, "dropped", part.lost, sent=True, late=False)

    def _take_shares(self, name: str, message: bytes) -> None:
        shares = SHARE_KEYS[self._config.is_for_two].from_bytes(message)
        _check_sender(name, shares.name)
        self._session.receive_shares(shares)

    def _take_signature(self, name: str, message: bytes) -> None:
        signature = ConsistencySignature.from_bytes(message)
        _check_sender(name, signature.name)
        self._session.receive_consistency_signature(signature)

    def _take_unmasking_shares(self, name: str, message: bytes) -> None:
        shares = UnmaskingShares.from_bytes(message)
        _check_sender(name, shares.name)
        self._session.receive_unmasking_shares(shares)

    # -- receipts ----------------------------------------------------------------------------------

    def _all_receipts(self, summed: Collection[str]) -> list[Receipt]:
        """Receipts of the whole cohort; devices in the sum are accepted even if they left later."""
        for name in summed:
            earlier = self._receipts.get(name)
            reason = f"its update is in; later: {earlier.reason}" if earlier else ""
            self._record_summed(name, "accepted", reason)
        self._draw.explain(self._receipts)
        return self._receipts.complete(_ATTEMPT_OVER)

    def _record_summed(self, name: str, status: Status, reason: str) -> None:
        self._receipts.record(
            name,
            status,
            reason,
            sent=True,
        )


def _check_sender(name: str, claimed: str) -> None:
    """Refuse a message in the name of another device than the one on whose stream it came."""
    if name != claimed:
        raise UpdateError(f"it sent a message of {claimed!r}")
