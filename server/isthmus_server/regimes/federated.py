"""The federated regime: one attempt per round, chosen by the job's settings."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from isthmus.errors import JobError
from isthmus.job.federated import MIN_ROBUST_GROUPS
from isthmus.transport.requests import gradient_name, position_message, position_of
from isthmus.wire import link_pb2
from isthmus_privacy.purpose import TrainingPurpose, ranged_model
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.ranges import lost_in_rounding
from isthmus_server.budgets.server_noise import is_too_long
from isthmus_server.regimes.base import (
    AttemptFailed,
    AttemptSpec,
    FederatedAttempt,
    FederatedResult,
    check_devices,
)
from isthmus_server.regimes.buffered import BufferedDevices
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.plaintext import PlaintextAttempt, WeightedMeanAggregator
from isthmus_server.regimes.run_aggregation import aggregation_of
from isthmus_server.regimes.secure_sums.attempt import SecureAggregationAttempt, SecureSum
from isthmus_server.regimes.secure_sums.groups import GroupedAttempt, UnmaskingGate
from isthmus_server.regimes.secure_sums.ranged import RangedAttempt, RangedSum
from isthmus_server.regimes.secure_sums.robust_rule import RobustRule
from isthmus_server.regimes.secure_sums.round_configs import range_config, training_config
from isthmus_server.regimes.secure_sums.unmasked import secure_attempt
from isthmus_server.storage.records import Receipt
from isthmus_server.strategy.gradients import REST
from isthmus_server.strategy.round_spec import RoundSpec

_NOTICEABLE = 1e-10
"""Rounding below this is not looked at: the rate of a schedule's last steps may be next to zero. Of
an update of 1e-6 it is a ten-thousandth."""

_SECURE = SecureAggregationAttempt | RangedAttempt | GroupedAttempt
"""Attempts whose devices take part for this model again only together."""


class FederatedRegime:
    """Trains rounds on the devices of one run."""

    def __init__(self, context: FederatedContext) -> None:
        """Load the aggregation that the job names, if any besides the mean.

        Raises:
            UserError: the extension cannot be used.
        """
        self.context = context
        settings = context.job.federated
        self.extension = aggregation_of(settings, context.layout)
        self._robust: RobustRule | None = None
        if settings.robust is not None:
            self._robust = RobustRule(settings, context.layout.trained_size)
        self.buffered = BufferedDevices(context) if settings.mode == "buffered" else None
        """Devices that train across rounds; only in buffered mode."""
        self.watch: Callable[[AttemptSpec, FederatedResult], None] | None = None
        """Told of each result with its noise, before it is merged: an audit of privacy has it."""
        self._attempt: FederatedAttempt | None = None

    def check(self, spec: AttemptSpec) -> None:
        """Refuse an attempt that `train` would refuse before it asks a device.

        Raises:
            RoundFailed: too few devices, or a cohort that the job's aggregation cannot use.
        """
        if self.buffered is not None:
            return  # devices that are already training count towards the quorum
        spec.check_devices()
        if self.extension is not None:
            self.extension.attempt(self.context, spec)

    def check_devices(self, spec: RoundSpec) -> None:
        """Refuse a round that has too few devices, before anybody is asked and it is charged.

        Raises:
            AttemptFailed: see `base.check_devices`.
        """
        if self.buffered is None:
            check_devices(len(spec.cohort), len(spec.groups), spec.federated, spec.shortage)

    async def train(self, spec: AttemptSpec) -> FederatedResult:
        """Run one attempt.

        Raises:
            AttemptFailed: fewer updates than the quorum.
        """
        if spec.exact and not self.context.link.enrolments.simulated:
            spec = self._as_before(spec)
        # Kept for `cancelled`: only the attempt knows how far its devices got.
        self._attempt = self._attempt_for(spec)
        try:
            result = await self._attempt.run()
            _check_clipped(result, spec, certified=self.context.certified)
            self._check_rounding(result, spec)
            result = await self._with_noise(result)
            if self.watch is not None:
                self.watch(spec, result)
        except AttemptFailed:
            if isinstance(self._attempt, _SECURE) and self._attempt.has_sum:
                log = self.context.unmaskings
                log.note_refused_sum(self.context.run_id, spec.round, spec.attempt)
            raise
        if not spec.gradient_scale:
            return result
        groups = {name: self._split(one, spec) for name, one in result.groups.items()}
        return dataclasses.replace(self._split(result, spec), groups=groups)

    def _check_rounding(self, result: FederatedResult, spec: AttemptSpec) -> None:
        """Refuse a sum whose range and largest weight are the job's, if they lose the updates.

        Where they are found, `RangedAttempt` looks at it.

        Raises:
            AttemptFailed: rounding is a large part of the mean.
        """
        job = self.context.job
        settings = spec.settings
        if job.finds_ranges or job.privacy is not None or settings.compression is not None:
            return
        layout = self.context.layout
        # A liar's group may be anything; the rule has compared it with the others.
        groups = result.groups.values() if settings.robust is None else ()
        for one in (result, *groups):
            update = layout.parameters_of_update(one.pseudo_gradient)
            if one.rounding > _NOTICEABLE and lost_in_rounding(update, one.rounding):
                raise AttemptFailed(
                    f"the updates are lost in rounding with federated.clip={settings.clip:g} and a "
                    f"largest weight of {settings.largest_weight}: remove federated.clip or "
                    "federated.max_examples, and they are found from the updates",
                    result.receipts,
                )

    async def _with_noise(self, result: FederatedResult) -> FederatedResult:
        """The result whose mean has the server's noise, if the job trusts it to add some.

        All that is derived from the mean is derived from the one with noise: also whether it is
        longer than each of the updates may be. A device that knows its own long vector would learn
        from the exact length what the others have sent, and from a refusal alone a part of it.

        Raises:
            AttemptFailed: one device has not clipped its update.
        """
        budget = self.context.privacy
        if budget is None:
            return result
        mean = result.pseudo_gradient
        devices = updates_in(result)
        rounding = _rounding_of_one(result)
        clip = budget.clip + rounding
        figures, noise = await asyncio.to_thread(
            budget.release, mean, devices, result.training, rounding
        )
        if not noise:  # devices have added theirs, and the sum was compared when it was decoded
            return dataclasses.replace(result, training=figures)
        if is_too_long(mean, clip, noise):
            raise AttemptFailed(
                f"the mean of {devices} updates is longer than their noise and updates of at most "
                f"{budget.clip:g} ([privacy] clip): a device sent one that is not clipped",
                result.receipts,
            )
        return dataclasses.replace(result, training=figures, noise=noise)

    def _as_before(self, spec: AttemptSpec) -> AttemptSpec:
        """The attempt with the training of the sum that it repeats exactly.

        Its devices give no other vector for this model. The position in the schedules moves on
        between rounds, and the factor of gradients follows the last ones. If the plan wants another
        kind of vector, devices refuse it, and others are asked.
        """
        name = spec.name
        cohorts = spec.groups.values() or (spec.cohort,)
        for model in (name, ranged_model(name)):
            for devices in cohorts:
                request = self.context.unmaskings.request_of(model, devices)
                if request is None:
                    continue
                work = request.train_local
                same = bool(work.gradient_scale) == bool(spec.gradient_scale)
                if same and work.with_gradient == spec.with_gradient:
                    return dataclasses.replace(
                        spec,
                        position=position_of(work.position),
                        gradient_scale=work.gradient_scale,
                    )
        return spec

    def _split(self, result: FederatedResult, spec: AttemptSpec) -> FederatedResult:
        """The result with the gradient apart from the update."""
        both = result.pseudo_gradient
        size = self.context.layout.size
        gradient = both[:size]
        update = both[size:]
        return dataclasses.replace(
            result, pseudo_gradient=update, gradient=gradient, gradient_scale=spec.gradient_scale
        )

    def _attempt_for(self, spec: AttemptSpec) -> FederatedAttempt:
        if self.buffered is not None:
            return self.buffered.attempt(spec)
        spec.check_devices()
        if spec.settings.secure_aggregation:
            return self._grouped_attempt(spec) if spec.groups else self._secure_attempt(spec)
        if self.extension is not None:
            return self.extension.attempt(self.context, spec)
        return PlaintextAttempt(self.context, spec, WeightedMeanAggregator(self.context, spec))

    def _grouped_attempt(self, spec: AttemptSpec) -> GroupedAttempt:
        needed = spec.settings.needed
        sums = {}
        for name, devices in spec.groups.items():
            settings = spec.settings.for_group(len(devices), exact=spec.exact)
            assert settings is not None  # others are not summed by themselves
            cohort = {device: spec.cohort[device] for device in devices}
            part = dataclasses.replace(spec, cohort=cohort, settings=settings, groups={})
            sums[name] = self._secure_attempt(part, "" if name == REST else name)
        robust = self._robust
        if robust is None:
            gate = UnmaskingGate(self.context.unmaskings, len(sums), needed)
            return GroupedAttempt(sums, spec.group_weights, gate, needed)
        gate = UnmaskingGate(self.context.unmaskings, len(sums), needed, MIN_ROBUST_GROUPS)
        return GroupedAttempt(
            sums, {}, gate, needed, robust=robust, devices=spec.groups, round_=spec.round
        )

    def _secure_attempt(
        self, spec: AttemptSpec, group: str = ""
    ) -> SecureAggregationAttempt | RangedAttempt:
        context = self.context
        # Without a lottery the server divides the devices, by the seed of the job.
        drawn = RandomGroup.parse(group) if self._robust is not None and spec.draw else None

        def training(secure: bytes = b"", ranges: bytes = b"") -> link_pb2.Request:
            work = link_pb2.TrainLocal(
                run_id=context.run_id,
                round=spec.round,
                attempt=spec.attempt,
                model=spec.model,
                secure=secure,
                with_gradient=spec.with_gradient,
                gradient_scale=spec.gradient_scale,
                group=group,
                position=position_message(spec.position),
                changes=spec.changes,
                first_model=spec.first_model,
                ranges=ranges,
            )
            return link_pb2.Request(train_local=work)

        def sending(config: bytes) -> link_pb2.Request:
            work = link_pb2.Agree(
                run_id=context.run_id, round=spec.round, attempt=spec.attempt, secure=config
            )
            return link_pb2.Request(agree=work)

        gradient = gradient_name(training().train_local)
        purpose = context.signed_sums.named(
            TrainingPurpose(context.purpose, gradient, spec.gradient_scale, group, spec.position)
        )
        if not context.job.finds_ranges:
            wanted = SecureSum(
                config=training_config(context, spec, spec.name, purpose),
                cohort=spec.cohort,
                first_request=lambda config: training(secure=config),
                exact=spec.exact,
                group=drawn,
            )
            return secure_attempt(context, wanted)
        sums = RangedSum(
            name=spec.name,
            cohort=spec.cohort,
            exact=spec.exact,
            group=group,
            drawn=drawn,
            compared=self._robust is not None,
            ranges=range_config(context, spec, spec.name, purpose),
            find=lambda config: training(ranges=config),
            send=sending,
            at_once=lambda config: training(secure=config),
            config=lambda ranges, wider: training_config(
                context, spec, spec.name, purpose, ranges, wider=wider
            ),
        )
        return RangedAttempt(context, sums)

    @property
    def busy(self) -> list[str]:
        """Devices that are training across the end of a round; only in buffered mode."""
        return [] if self.buffered is None else self.buffered.busy

    async def stop(self) -> None:
        """End the run: notify devices that still train that their updates are not needed."""
        if self.buffered is not None:
            await self.buffered.stop()

    def cancelled(self, reason: str) -> list[Receipt]:
        """Receipts of an attempt whose `train` was cancelled for `reason`."""
        receipts: Sequence[Receipt] = ()
        if self._attempt is not None:
            receipts = self._attempt.cancelled(reason)
        return list(receipts)


def _check_clipped(result: FederatedResult, spec: AttemptSpec, *, certified: bool) -> None:
    """End a run whose model would not be that of the updates.

    Args:
        result: of the attempt.
        spec: of the attempt.
        certified: whether devices may be on other machines, and some of them lie.

    Raises:
        JobError: more of the updates' elements were clipped at the job's bound than it allows.
        AttemptFailed: at a range that was found for other devices, or is not known; or one device
            can have said so of its update, and others may have another sum.
    """
    settings = spec.settings
    # A gradient that does not fit is clipped too, and the next one is scaled down for it.
    if spec.gradient_scale or settings.max_clipped == 1:
        return
    shares = {"": result.training.get("clipped", 0.0)}
    groups = {name: one.training.get("clipped", 0.0) for name, one in result.groups.items()}
    if settings.robust is None:
        shares |= groups
    else:
        # A liar decides what its group says of itself: that of the group in the middle counts.
        used = [share for name, share in groups.items() if name not in result.left_out]
        shares[""] = statistics.median(used)
    of_group, share = max(shares.items(), key=lambda each: each[1])
    if share <= settings.max_clipped:
        return
    whose = f"of the group {of_group!r}" if of_group else "of the devices' updates"
    if settings.clip is None:
        # No error of the job's: one device can bring it about.
        raise AttemptFailed(
            f"{share:.2%} of the elements {whose} were outside of the range, which was found in an "
            "earlier attempt with other devices or is not known, and were clipped; set "
            "federated.clip to more than the largest element",
            result.receipts,
        )
    why = (
        f"{share:.2%} of the elements {whose} were outside of federated.clip={settings.clip:g} and "
        f"were clipped, and federated.max_clipped={settings.max_clipped:g}; remove federated.clip, "
        "so that the range is found from the updates, or raise one of them"
    )
    if certified:
        raise AttemptFailed(why, result.receipts)
    raise JobError(f"round {spec.round}: {why}")


def _rounding_of_one(result: FederatedResult) -> float:
    """Bound on the 2-norm by which a secure sum rounds one update, to which all count the same.

    Each element is rounded by less than a step, of which `rounding` has a deviation of half.
    """
    size = len(result.pseudo_gradient)
    return 2 * result.rounding * math.sqrt(updates_in(result) * size)


def updates_in(result: FederatedResult) -> int:
    """Updates in a mean to which each device contributes the same."""
    weight = result.training.get("examples")  # of a secure sum: 1 for each usable update
    if weight is not None:
        return int(weight)
    return sum(receipt.status == "accepted" for receipt in result.receipts)
