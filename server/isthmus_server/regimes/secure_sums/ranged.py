"""An attempt whose encoding follows from the ranges of the updates, which are summed before.

    TrainLocal or Agree -> the sum of ranges | Agree -> the sum of the updates

The first is set up for two, so that devices advertise keys and share secrets once.

A device trains once, and keeps its update between the two. A sum of ranges that is lost, or that
one device has made meaningless, is not repeated with other devices: the updates are then summed in
an encoding that is wide enough for most. The updates themselves are in one sum:
ranges that were too narrow could only be mended by a second one of the same updates, and the
difference of the two would be what was clipped, perhaps on one device.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.config import RoundConfig, SetUpForTwo
from isthmus_privacy.secagg.graph import corrupt_clients
from isthmus_privacy.secagg.ranges import USUAL_CLIP, Encoding, Ranges, lost_in_rounding
from isthmus_server.regimes.base import AttemptFailed, FederatedResult
from isthmus_server.regimes.call import ReceiptBook
from isthmus_server.regimes.committed_sums import LARGEST_WEIGHT
from isthmus_server.regimes.secure_sums.attempt import (
    FirstRequest,
    SecureAggregationAttempt,
    SecureSum,
)
from isthmus_server.regimes.secure_sums.round_configs import BeforeUnmasking
from isthmus_server.regimes.secure_sums.step_limits import StepLimits
from isthmus_server.regimes.secure_sums.unmasked import secure_attempt
from isthmus_server.storage.range_log import SummedRanges
from isthmus_server.storage.records import Receipt
from isthmus_server.storage.unmasking_log import Unmasking

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext

log = logging.getLogger(__name__)

RANGE = "range"
"""The figure of a round's training that says which range its ranges have given."""

_UNKNOWN_ROUNDING = 1e-3
"""Largest part of a mean that is rounding where the ranges are lost with a device, which should not
end a run. The mean of the error is zero."""

_FLOAT_ROUNDING = 1e-4
"""Part by which a mean may be beyond its range in float32."""

MakeConfig = Callable[[Ranges, bool], RoundConfig]
"""Makes the configuration of the sum of updates from ranges, which are perhaps those of others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RangedSum:
    """What the two sums of an attempt are made of."""

    name: bytes
    """Name of the model that devices start from, or of what takes its place."""
    cohort: Collection[str]
    exact: bool
    """See `SecureAggregationAttempt`."""
    group: str
    """The group that is summed; empty for any devices."""
    drawn: RandomGroup | None = None
    """Group of the lottery, if one has drawn it."""
    compared: bool = False
    """Whether a robust rule compares the sum with others, and can leave it out."""
    ranges: RoundConfig
    """Configuration of the sum of ranges."""
    find: FirstRequest
    """Makes the request in which a device joins the sum of ranges."""
    send: FirstRequest
    """Makes the one in which it then joins the sum of updates."""
    at_once: FirstRequest
    """Makes the one in which it joins the sum of updates if the ranges are known."""
    config: MakeConfig


class RangedAttempt:
    """One attempt: a sum of ranges, and one of the updates of the same devices.

    Guarantees:
      * the ranges of updates to a model are summed once, and are stored before anything follows
        from them. A repeated attempt uses them, with more room if it has other devices;
      * devices that may have unmasked a sum of updates are asked for the same encoding again;
      * what one device says of itself does not make the range more than 16 times that of the
        others, and what it adds to the sum moves no element of the mean beyond the range.
    """

    def __init__(self, context: FederatedContext, sums: RangedSum) -> None:
        """Prepare; nothing is asked yet."""
        self._context = context
        self._sums = sums
        self._current: SecureAggregationAttempt | None = None
        """The sum that is running."""
        self._sends = False
        """Whether it is that of the updates."""
        self._earlier: Sequence[Receipt] = ()
        """Receipts of the sum of ranges."""

    @property
    def has_sum(self) -> bool:
        """See `SecureAggregationAttempt.has_sum`: of the updates, not of their ranges."""
        return self._sends and self._current is not None and self._current.has_sum

    async def run(
        self,
        deadline: float | None = None,
        *,
        before_unmasking: BeforeUnmasking | None = None,
    ) -> FederatedResult:
        """Run both sums; see `SecureAggregationAttempt.run`.

        Raises:
            AttemptFailed: too few devices were left at some step, or had a usable vector.
        """
        sums = self._sums
        config = sums.ranges
        name = sums.name
        if deadline is None:
            seconds = self._context.round_times.seconds(sums.cohort, config.clients_min)
            deadline = asyncio.get_running_loop().time() + seconds
        known = self._context.ranges.of(config.round, name, sums.group)
        if known is None and any(entry.group != sums.group for entry in self._earlier_sums()):
            known = self._context.ranges.of_other_groups(config.round, name, sums.group)
        cohort = sums.cohort
        request = sums.at_once
        before: SecureAggregationAttempt | None = None
        if known is None and any(entry.devices != set(cohort) for entry in self._earlier_sums()):
            # With others, and a crash has lost their sum.
            known = await self._store(Ranges.unknown(), ())
        if known is None:
            known = await self._find(deadline)
            cohort = known.devices
            request = sums.send
            before = self._current
        # Devices that have unmasked a sum of updates to this model are in this one only if it is
        # that one again, which has the encoding of before. All others may have another one.
        wider = known.round != config.round or not known.devices.issuperset(cohort)
        # A repeated sum is that of before, perhaps with other numbers of examples than now.
        comparable = known.ranges.is_known and not (wider or sums.exact)
        try:
            config = sums.config(known.ranges, wider)
            wanted = SecureSum(
                config=config,
                cohort=cohort,
                first_request=request,
                exact=sums.exact,
                alone=sums.at_once,
                ranges=known.ranges if comparable else None,
                group=sums.drawn,
                before=before,
            )
            self._current = secure_attempt(self._context, wanted)
            config = self._current.config
            self._check_differences(known.ranges, config)
            self._sends = True
            # The training may have taken all of the round's time.
            limits = StepLimits.of(self._context.job.time, config, clients=len(cohort))
            least = asyncio.get_running_loop().time() + 2 * limits.step_seconds
            result = await self._current.run(
                max(deadline, least), before_unmasking=before_unmasking
            )
            result = self._checked(known.ranges, config, result, wider=wider)
            await self._note_false(known.ranges, result)
        except AttemptFailed as failed:
            # One device can have moved the counts of the others, and the same devices are not asked
            # for them again.
            if getattr(failed.__cause__, "code", "") == "weight-not-of-ranges":
                await self._store(Ranges.unknown(), ())
            raise AttemptFailed(
                str(failed),
                self._with_earlier(failed.receipts),
                excused=failed.excused,
                task_failures=failed.task_failures,
            ) from failed
        figures = {RANGE: config.clip, LARGEST_WEIGHT: float(config.weight_max)}
        return dataclasses.replace(
            result,
            training={**result.training, **figures},
            receipts=self._with_earlier(result.receipts),
        )

    def _checked(
        self, ranges: Ranges, config: RoundConfig, result: FederatedResult, *, wider: bool
    ) -> FederatedResult:
        """The result, with the doubt about it if a robust rule can leave it out.

        One device can bring such a doubt about. If that failed the sum, as it does where there is
        one sum of all devices, liars would stop rounds that go on without their groups.

        Raises:
            AttemptFailed: see the checks; never if the sum is compared with others.
        """
        try:
            self._check_unknown(ranges, config, result)
            self._check_limited(ranges, config, result)
            self._check_rounding(ranges, config, result)
            if not wider:
                self._check_first(ranges, config, result)
        except AttemptFailed as failed:
            if not self._sums.compared:
                raise
            return dataclasses.replace(result, doubt=str(failed))
        return result

    def _check_differences(self, ranges: Ranges, config: RoundConfig) -> None:
        """Refuse a sum in which rounding to one device's range, or the job's, loses the updates.

        Raises:
            AttemptFailed: so it is.
        """
        if config.codec is not None:
            return
        encoding = Encoding(config.clip, config.weight_max, config.bits)
        by_job = self._context.job.federated.clip is not None
        if why := ranges.refusal(encoding, config.levels, by_job=by_job):
            raise AttemptFailed(why, [])

    def _check_limited(self, ranges: Ranges, config: RoundConfig, result: FederatedResult) -> None:
        """Refuse a sum in which a device was clipped whose update is out of all proportion.

        It may be right, and it may lie: one that lies only about its range is in the sum with what
        it has sent.

        Raises:
            AttemptFailed: so it is.
        """
        if self._context.job.federated.clip is not None or not result.training.get("clipped"):
            return
        if ranges.is_limited(_liars(config)):
            raise AttemptFailed(_out_of_proportion(config), result.receipts)

    def _check_rounding(self, ranges: Ranges, config: RoundConfig, result: FederatedResult) -> None:
        """Refuse a sum without the largest updates, or weights, if rounding changes the others.

        Raises:
            AttemptFailed: so it is.
        """
        update = self._context.layout.parameters_of_update(result.pseudo_gradient)
        if config.codec is not None or not ranges.are_lost(
            update,
            result.rounding,
            devices=sum(receipt.status == "accepted" for receipt in result.receipts),
            weight=int(result.training["examples"]),
            weight_max=config.weight_max,
        ):
            return
        advice = (
            "devices with far larger updates or more examples were lost; leave out those with so "
            'many more than the others, or set federated.weights = "equal"'
        )
        settings = self._context.job.federated
        given = [
            f"federated.{name}"
            for name in ("clip", "max_examples")
            if getattr(settings, name) is not None
        ]
        if given:
            advice = f"remove {' and '.join(given)}, and what fits is found; or {advice}"
        raise AttemptFailed(
            f"the updates are lost in the rounding for elements up to {config.clip:g} and a "
            f"largest weight of {config.weight_max} examples: {advice}",
            result.receipts,
        )

    def _check_first(self, ranges: Ranges, config: RoundConfig, result: FederatedResult) -> None:
        """Refuse a mean of compressed updates beyond their range, while nothing is left unsent.

        Of compressed updates the product with the weight is clipped, which for a device with few
        examples is far beyond its range.

        Raises:
            AttemptFailed: so it is.
        """
        sums = self._context.sums
        if config.codec is None or sums.magnitude is not None or not ranges.is_known:
            return
        if self._context.job.federated.clip is not None or not len(result.pseudo_gradient):
            return
        # Rounding to the nearest level is off by half a step, and `rounding` is its deviation.
        rounding = result.rounding * math.sqrt(3 * config.clients_max)
        largest = max(abs(float(end)) for end in result.pseudo_gradient.aminmax())
        if largest <= config.clip * (1 + _FLOAT_ROUNDING) + rounding:
            return
        if ranges.is_limited(_liars(config)):
            raise AttemptFailed(_out_of_proportion(config), result.receipts)
        raise AttemptFailed(
            f"the mean of the updates has elements of up to {largest:.3g}, and by what the devices "
            f"have said before, each update has elements of up to {config.clip:g}: one sent a "
            "vector that does not have the agreed form",
            result.receipts,
        )

    def _check_unknown(self, ranges: Ranges, config: RoundConfig, result: FederatedResult) -> None:
        """Refuse a sum for which there are no ranges, and that others than honest devices can have.

        Raises:
            AttemptFailed: the updates were lost in the rounding of the encoding without ranges, or
                their mean is out of proportion to the rounds before.
        """
        if ranges.is_known:
            return
        why = (
            "the ranges of the updates to this model are not known, as a device was lost or sent "
            "no ranges while they were summed"
        )
        advice = "set federated.clip and federated.max_examples, with which none are needed"
        # With a codec, later rounds follow the magnitude of the ones before, in the job's bits, and
        # what is rounded away is sent later.
        follows = config.codec is not None and self._context.sums.magnitude is not None
        # A gradient and running statistics may be far larger, and whole where these are lost.
        parameters = self._context.layout.parameters_of_update(result.pseudo_gradient)
        if not follows and lost_in_rounding(parameters, result.rounding, _UNKNOWN_ROUNDING):
            raise AttemptFailed(
                f"{why}, and in the encoding without them the updates are lost in rounding: "
                f"{advice}",
                result.receipts,
            )
        if self._context.job.federated.clip is not None or not _liars(config):
            return
        known = self._context.ranges.last_known(before=config.round)
        bound = USUAL_CLIP
        if known is not None:
            usual = known.encoding(clients=config.clients_max, wider=True, liars=_liars(config))
            bound = max(bound, usual.clip)
        # After the gradient, if there is one.
        update = result.pseudo_gradient[-self._context.layout.size :]
        largest = max(abs(float(end)) for end in update.aminmax()) if len(update) else 0.0
        if largest > bound:
            raise AttemptFailed(
                f"{why}, and the mean of the updates has elements of up to {largest:.3g}, where "
                f"the rounds before allow {bound:g}: {advice}",
                result.receipts,
            )

    async def _find(self, deadline: float) -> SummedRanges:
        """Sum the ranges, and store them, or that they are unknown.

        Raises:
            AttemptFailed: too few devices.
            OSError, sqlite3.Error: they cannot be stored.
        """
        sums = self._sums
        wanted = SecureSum(
            config=dataclasses.replace(sums.ranges, set_up=SetUpForTwo()),
            cohort=sums.cohort,
            first_request=sums.find,
            exact=sums.exact,
            group=sums.drawn,
        )
        self._current = secure_attempt(self._context, wanted)

        async def note(entry: Unmasking) -> None:
            entry = dataclasses.replace(entry, group=sums.group)
            await self._context.unmaskings.together.add(entry)

        try:
            result = await self._current.run(deadline, before_unmasking=note)
        except AttemptFailed:
            # Also if the same devices could give the sum again: one that does not come back, or
            # that lies, would have them asked for ever.
            if self._unmasked():
                await self._store(Ranges.unknown(), ())
            raise
        self._earlier = result.receipts
        summed = {each.participant for each in result.receipts if each.status == "accepted"}
        try:
            ranges = Ranges.of(result.pseudo_gradient, int(result.training["examples"]))
        except ValueError as error:
            log.warning("round %d: %s; the range is not found", sums.ranges.round, error)
            ranges = Ranges.unknown()
        return await self._store(ranges, summed)

    async def _note_false(self, ranges: Ranges, result: FederatedResult) -> None:
        """Store that ranges are unknown that were not those of the updates, which were clipped.

        One device can add counts that leave one for each, and move those of the others. The next
        attempt, which other devices have to make, would be clipped as much.
        """
        job = self._context.job
        # A gradient is clipped too, and the next one is scaled down for it.
        has_gradient = len(result.pseudo_gradient) != self._context.layout.size
        if job.federated.clip is not None or has_gradient or not ranges.is_known:
            return
        if result.training.get("clipped", 0.0) > job.federated.max_clipped:
            await self._store(Ranges.unknown(), ())

    def _unmasked(self) -> list[Unmasking]:
        """Sums of ranges of updates to this model that devices of the cohort may have unmasked."""
        config = self._sums.ranges
        cohort = set(self._sums.cohort)
        about = self._context.unmaskings.about(config.run_id, config.round, config.model_hash)
        return [
            entry
            for entry in about
            if entry.model_hash == config.model_hash
            and not entry.refused
            and entry.devices & cohort
        ]

    def _earlier_sums(self) -> list[Unmasking]:
        """The sums of `_unmasked` that earlier attempts have opened."""
        config = self._sums.ranges
        this = (config.round, config.attempt)
        return [entry for entry in self._unmasked() if (entry.round, entry.attempt) != this]

    async def _store(self, ranges: Ranges, devices: Collection[str]) -> SummedRanges:
        sums = self._sums
        found = SummedRanges(
            round=sums.ranges.round,
            model_hash=sums.name,
            group=sums.group,
            devices=frozenset(devices),
            ranges=ranges,
        )
        # Before the first device is asked for its update: after a crash the server could not ask
        # for the ranges of other devices, and has to choose the same encoding.
        await self._context.ranges.together.add(found)
        return found

    def cancelled(self, reason: str) -> list[Receipt]:
        """Receipts of the whole cohort; devices without one were dropped for `reason`."""
        if self._current is None:
            return ReceiptBook(sorted(self._sums.cohort), "federated").complete(reason)
        receipts = self._current.cancelled(reason)
        return self._with_earlier(receipts if self._sends else _not_summed(receipts, reason))

    def _with_earlier(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Receipts of the second sum, with the time of the training; of the others, the first's.

        Each has the bytes of both. A device that was in the first sum has accepted the attempt,
        whatever it answers in the second one.
        """
        merged = {each.participant: each for each in receipts}
        for first in _not_summed(self._earlier, "the attempt ended before its update was in"):
            receipt = merged.get(first.participant)
            if receipt is not None:
                first = dataclasses.replace(
                    receipt,
                    seconds=first.seconds,
                    started=first.started,
                ).with_moved(first.moved + receipt.moved)
            merged[first.participant] = first
        return [merged[name] for name in sorted(merged)]


def _liars(config: RoundConfig) -> int:
    """Devices of a cohort that may say anything of themselves; none on the server's machine."""
    return corrupt_clients(config.clients_max, config.corrupt_permille)


def _out_of_proportion(config: RoundConfig) -> str:
    return (
        f"a device has elements beyond {config.clip:g}, which is 16 times those of the others or "
        "the usual range: it may have diverged, or lie; set federated.clip to more than the "
        "largest element if it is right, or to less, which bounds it"
    )


def _not_summed(receipts: Sequence[Receipt], reason: str) -> list[Receipt]:
    """Receipts of a sum of ranges: a device that is in it has no part in the model by that."""
    return [
        dataclasses.replace(each, status="rejected", reason=reason)
        if each.status == "accepted"
        else each
        for each in receipts
    ]
