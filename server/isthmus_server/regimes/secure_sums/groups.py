"""A federated attempt that sums the updates of each group of devices by itself.

Each group is a secure sum of its own: its masks, its survivors, its quorum. All groups have the
same attempt number, and a device is in one of them, so the rule of one survivor set for each model
holds for every device as it does for a single sum.

No group is unmasked before all have signed their survivors or have failed, and enough devices are
left for the round. An attempt that fails earlier has revealed no sum, and every device may take
part in the next one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from isthmus.errors import AggregationAborted, RoundFailed
from isthmus.job.federated import MIN_ROBUST_GROUPS
from isthmus_privacy.slots import OTHER_WEIGHT, OVER_RANGE, OVER_WEIGHT, UNUSABLE
from isthmus_server.model import merge
from isthmus_server.regimes.base import AttemptFailed, FederatedResult
from isthmus_server.regimes.committed_sums import LARGEST_WEIGHT
from isthmus_server.regimes.secure_sums.attempt import SecureAggregationAttempt
from isthmus_server.regimes.secure_sums.ranged import RANGE, RangedAttempt
from isthmus_server.regimes.secure_sums.robust_rule import RobustRule
from isthmus_server.storage.records import Receipt
from isthmus_server.storage.unmasking_log import Unmasking, UnmaskingLog

_SUMMED = ("examples", OTHER_WEIGHT.name, OVER_RANGE.name, OVER_WEIGHT.name, UNUSABLE.name)
"""Figures of a sum that are totals."""
_LARGEST = (RANGE, LARGEST_WEIGHT)
"""Figures of which all groups together have the largest; all others are means over examples."""


class UnmaskingGate:
    """Lets the sums of several groups be unmasked together, or none of them."""

    def __init__(self, log: UnmaskingLog, groups: int, needed: int, least: int = 1) -> None:
        """Wait for that many groups.

        Fewer than `needed` devices in all of them are too few, and fewer groups than `least` too.
        """
        self._log = log
        self._undecided = groups
        self._needed = needed
        self._least = least
        self._entries: list[Unmasking] = []
        self._decided = asyncio.Event()

    async def agree(self, entry: Unmasking) -> None:
        """Wait until the sum of a group may be unmasked; it is in the log then.

        Raises:
            AggregationAborted: the groups that are left have too few devices.
            OSError, sqlite3.Error: it cannot be noted in the log.
        """
        self._entries.append(entry)
        self.decide()
        await self._decided.wait()
        if self._devices >= self._needed and not self._is_open:
            raise AggregationAborted(
                f"{len(self._entries)} groups are left and a robust rule needs {self._least}; "
                "nothing was unmasked"
            )
        if not self._is_open:
            raise AggregationAborted(
                f"the groups that are left have {self._devices} devices and the quorum of the "
                f"round is {self._needed}; nothing was unmasked"
            )

    def decide(self) -> None:
        """Note that one more group has signed its survivors, or has failed."""
        self._undecided -= 1
        if self._undecided:
            return
        # In one transaction: after a crash all groups may have been unmasked, or none.
        if self._is_open:
            self._log.add(*self._entries)
        self._decided.set()

    @property
    def _is_open(self) -> bool:
        return self._devices >= self._needed and len(self._entries) >= self._least

    @property
    def _devices(self) -> int:
        return sum(len(entry.devices) for entry in self._entries)


class GroupedAttempt:
    """One attempt with a secure sum for each group.

    Guarantees:
      * the result is the mean of the groups' sums by examples times weight: with equal weights, the
        mean over the devices of all groups;
      * it needs the quorum of the round in all groups together, and of each group in its own sum.

    With a robust rule, the result is that of the rule over the groups' means, and so are figures
    that are means, such as the loss: those of the group in the middle. Its receipts name the group
    of each device whose sum was left out.
    """

    def __init__(
        self,
        sums: Mapping[str, SecureAggregationAttempt | RangedAttempt],
        weights: Mapping[str, float],
        gate: UnmaskingGate,
        needed: int,
        robust: RobustRule | None = None,
        devices: Mapping[str, Collection[str]] | None = None,
        round_: int = 0,
    ) -> None:
        """Prepare.

        Args:
            sums: the attempt of each group, with `gate` before it is unmasked.
            weights: factor of each group's examples in the mean; 1 where there is none.
            gate: of all groups.
            needed: quorum of the round.
            robust: combines the groups' means; None for their mean.
            devices: invited in each group, and
            round_: the number of the round, for a robust rule.
        """
        self._sums = sums
        self._weights = weights
        self._gate = gate
        self._needed = needed
        self._robust = robust
        self._devices = {name: frozenset(each) for name, each in (devices or {}).items()}
        self._round = round_
        self._signed: set[str] = set()
        """Groups whose survivors have signed."""
        self._unmasked: set[str] = set()
        """Signed groups that were then let through."""

    @property
    def has_sum(self) -> bool:
        """See `SecureAggregationAttempt.has_sum`, of all groups."""
        return all(one.has_sum for one in self._sums.values())

    async def run(self) -> FederatedResult:
        """Run the sums of all groups, and return their mean.

        Raises:
            AttemptFailed: the groups that were summed have too few devices, or no weight, or a
                robust rule cannot combine them.
        """
        results, receipts = await self.results()
        if self._robust is None:
            return self._combined(results, receipts)
        try:
            return await asyncio.to_thread(self._robustly, self._robust, results, receipts)
        except RoundFailed as error:
            raise AttemptFailed(str(error), receipts) from error

    async def results(self) -> tuple[dict[str, FederatedResult], list[Receipt]]:
        """Run the sums of all groups at the same time; returns each, and all receipts.

        Raises:
            AttemptFailed: the groups that were summed have too few devices, or no weight.
        """
        # All at once, as each waits at the gate for the others.
        running = {name: asyncio.create_task(self._run(name)) for name in self._sums}
        try:
            await asyncio.gather(*running.values())
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
        results: dict[str, FederatedResult] = {}
        failures: dict[str, AttemptFailed] = {}
        for name, task in running.items():
            outcome = task.result()
            if isinstance(outcome, AttemptFailed):
                failures[name] = outcome
            else:
                results[name] = outcome
        self._check_quorum(results, failures)
        return results, self._all_receipts(results, failures)

    async def _run(self, name: str) -> FederatedResult | AttemptFailed:
        async def before_unmasking(entry: Unmasking) -> None:
            # From here on the gate has the group's entry: if it fails now, it must not be counted
            # again.
            self._signed.add(name)
            await self._gate.agree(dataclasses.replace(entry, group=name))
            self._unmasked.add(name)

        try:
            return await self._sums[name].run(before_unmasking=before_unmasking)
        except AttemptFailed as failed:
            # The others would wait at the gate for ever.
            if name not in self._signed:
                self._gate.decide()
            return failed

    def cancelled(self, reason: str) -> list[Receipt]:
        """Receipts of all invited devices after `run` was cancelled for `reason`."""
        receipts = [r for attempt in self._sums.values() for r in attempt.cancelled(reason)]
        return self._with_groups(receipts)

    def _check_quorum(
        self, results: Mapping[str, FederatedResult], failures: Mapping[str, AttemptFailed]
    ) -> None:
        summed = [r for one in results.values() for r in one.receipts if r.status == "accepted"]
        weight = sum(self._weights.get(name, 1.0) for name in results)
        least = 1 if self._robust is None else MIN_ROBUST_GROUPS
        if len(summed) >= self._needed and weight > 0 and len(results) >= least:
            return
        # A group that signed and was not let through has failed because of the others only.
        causes = [name for name in failures if name not in self._signed - self._unmasked]
        reasons = [f"group {name}: {failure}" for name, failure in failures.items()]
        few = (
            f"{len(summed)} devices are in the sums of {len(results)} groups and the quorum is "
            f"{self._needed}"
        )
        unused = "the groups that were summed have the weight 0"
        if weight > 0 and len(results) < least:
            unused = f"{len(results)} groups could be summed and a robust rule needs {least}"
        reason = "too few groups could be summed"
        receipts = [
            dataclasses.replace(receipt, status="rejected", reason=reason)
            if receipt.status == "accepted"
            else receipt
            for receipt in self._all_receipts(results, failures)
        ]
        raise AttemptFailed(
            "; ".join([unused if len(summed) >= self._needed else few, *reasons]),
            receipts,
            excused=bool(causes) and all(failures[name].excused for name in causes),
        )

    def _all_receipts(
        self, results: Mapping[str, FederatedResult], failures: Mapping[str, AttemptFailed]
    ) -> list[Receipt]:
        receipts = [receipt for result in results.values() for receipt in result.receipts]
        for name, failure in failures.items():
            # It is not in the model, although its device has done all that it was asked for.
            refused = f"the sum of its group {name} was refused"
            receipts += [
                dataclasses.replace(receipt, status="rejected", reason=refused)
                if receipt.status == "accepted"
                else receipt
                for receipt in failure.receipts
            ]
        return self._with_groups(receipts)

    def _with_groups(self, receipts: Iterable[Receipt]) -> list[Receipt]:
        """In order; each names the random group of its device, if there are such groups."""
        group_of = {device: name for name, each in self._devices.items() for device in each}
        named = [dataclasses.replace(r, group=group_of.get(r.participant, "")) for r in receipts]
        return sorted(named, key=lambda receipt: receipt.participant)

    def _robustly(
        self,
        rule: RobustRule,
        results: Mapping[str, FederatedResult],
        receipts: Sequence[Receipt],
    ) -> FederatedResult:
        doubts = {
            name: f"the sum of its group {name} was left out: {result.doubt}"
            for name, result in results.items()
            if result.doubt
        }
        means = {
            name: (
                result.pseudo_gradient,
                sum(receipt.status == "accepted" for receipt in result.receipts),
            )
            for name, result in results.items()
            if name not in doubts
        }
        if len(means) < MIN_ROBUST_GROUPS:
            raise RoundFailed(
                f"{len(means)} groups are left and a robust rule needs {MIN_ROBUST_GROUPS}; "
                f"{next(iter(doubts.values()))}"
            )
        combined = rule.combine(self._round, means, doubted=len(doubts))
        left_out = doubts | dict(combined.left_out)
        used = {name: result for name, result in results.items() if name not in left_out}
        # What all groups have together says how many devices took part. Of losses and other means
        # that of the group in the middle counts, and of the error of the encoding, too: one device
        # that lies decides what its group says of itself, with a weight of its choice.
        whole = self._combined(results, receipts)
        return dataclasses.replace(
            whole,
            pseudo_gradient=combined.vector,
            training={**whole.training, **_middles(used.values())},
            rounding=statistics.median(result.rounding for result in used.values()),
            receipts=[
                dataclasses.replace(receipt, reason=left_out[receipt.group])
                if receipt.status == "accepted" and receipt.group in left_out
                else receipt
                for receipt in receipts
            ],
            left_out=frozenset(left_out),
        )

    def _combined(
        self, results: Mapping[str, FederatedResult], receipts: Sequence[Receipt]
    ) -> FederatedResult:
        examples = {name: int(result.training["examples"]) for name, result in results.items()}
        parts = {name: (result.pseudo_gradient, examples[name]) for name, result in results.items()}
        first = next(iter(parts))  # the mean is computed in the memory of the first
        parts[first] = parts[first][0].clone(), examples[first]
        weights = {name: self._weights.get(name, 1.0) for name in results}
        mean, _ = merge.weighted_mean(parts, weights)
        mass = {name: weights[name] * count for name, count in examples.items()}
        total = math.fsum(mass.values())
        return FederatedResult(
            pseudo_gradient=mean,
            training=_figures(results, examples),
            receipts=receipts,
            rounding=math.hypot(
                *(result.rounding * mass[name] / total for name, result in results.items())
            ),
            groups=dict(results),
        )


def _middles(results: Collection[FederatedResult]) -> dict[str, float]:
    """The median over groups of each figure that is a mean, but for what was clipped in any."""
    names = next(iter(results)).training
    return {
        name: statistics.median(result.training[name] for result in results)
        for name in names
        if name not in (*_SUMMED, *_LARGEST, "clipped")
    }


def _figures(
    results: Mapping[str, FederatedResult], examples: Mapping[str, int]
) -> dict[str, float]:
    """The figures of all groups together, as those of one sum of all devices would be."""
    names = next(iter(results.values())).training
    total = sum(examples.values())
    largest = {
        name: max(result.training[name] for result in results.values())
        for name in names
        if name in _LARGEST
    }
    means = {
        name: math.fsum(
            result.training[name] * (1 if name in _SUMMED else examples[group] / total)
            for group, result in results.items()
        )
        for name in names
        if name not in largest
    }
    return means | largest
