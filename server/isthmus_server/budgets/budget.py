"""The privacy budget of a run: whom it may still ask, and the charges for what it asks.

A charge is in the ledgers before any device is asked, those of attempts that fail included. It is
given back if it is certain that no device has accepted what it was asked for; see `run_ledgers`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from isthmus.errors import JobError, RoundFailed
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.ledger import Charge
from isthmus_privacy.slots import WITHIN_CLIP
from isthmus_server.budgets.run_ledgers import RunLedgers
from isthmus_server.budgets.server_noise import ServerNoise, fresh_noise
from isthmus_server.strategy.round_spec import evaluations_after

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from isthmus.job import Job
    from isthmus.job.privacy import PrivacySection
    from isthmus_privacy.dp.accounting import Composition, Event
    from isthmus_server.strategy.round_spec import RoundSpec

UNIT = "device"
ADJACENCY = "zero-out"
ROUND = "round"
"""What the charge of an attempt at a round says it is for."""

Measurement = Literal["evaluation", "comparison"]


class PrivacyBudget:
    """What a run with `[privacy]` may still ask of each device.

    Guarantees:
      * no device is asked for a round with which its epsilon would exceed the budget, the part of
        later measurements included, for more rounds than the noise was made for, or before the
        separation is over;
      * a crash at any instant leaves every charge of a round that devices may have been asked for.
    """

    def __init__(
        self,
        job: Job,
        privacy: PrivacySection,
        ledgers: RunLedgers,
        directory: Path,
        clip: float = 0.0,
    ) -> None:
        """Find the noise, and what was charged before.

        Args:
            job: of the run.
            privacy: the job's table.
            ledgers: of the run, open.
            directory: of the run, which has the key of the server's noise.
            clip: the bound that the last committed round has moved to; 0 for the job's.

        Raises:
            UserError: no noise meets the budget, or the key of the noise is lost.
        """
        self.privacy = privacy
        self.plan = NoisePlan.of_job(job)
        self._job = job
        self._ledgers = ledgers
        self._rounds = job.rounds
        self._event = self.plan.event(ledgers.run_id)
        self._charged = 0
        """Attempts of this run with devices."""
        self._last: dict[str, list[int]] = {}
        """The attempts that each device was asked for, counted from 0."""
        self._measured = collections.Counter[str]()
        """Evaluations and comparisons that each device was asked for."""
        self._measured_before = collections.Counter[str]()
        """Measurements that each device was asked for by other runs until now, with the same noise:
        it is made for all of them, so that no budget is kept for what they have measured."""
        if self.plan.measurements:
            self._measured_before = ledgers.charged_by_others(self.plan.measuring_event, UNIT)
        bound = self.plan.first_bound
        if bound is not None and clip:
            bound = dataclasses.replace(bound, bound=clip)
        self._finding = asyncio.Lock()
        """Is held while epsilons are found in a thread."""
        self._bound = self._moved = bound
        """The clipping bound of the next round, and that after the running one."""
        self._recount()
        self._noise = None
        if privacy.mechanism != "distributed":
            self._noise = ServerNoise(self.plan, directory, used=self._charged > 0)

    # -- what may be asked -------------------------------------------------------------------------

    async def account(self, devices: Iterable[str]) -> None:
        """Find what will be asked of the epsilon of these devices until the next attempt has ended.

        In a thread, as it takes seconds, in which the event loop would answer nobody. What was
        found is kept, so that all other methods have it at once.
        """
        await self._find(self._ledgers.largest() | self._to_be_asked_of(devices))

    async def account_for(self, device: str) -> None:
        """Find this for one device, before it can be chosen."""
        await self._find(self._to_be_asked_of([device]))

    async def _find(self, wanted: set[Composition]) -> None:
        ended = threading.Event()

        def find() -> None:
            for each in wanted:
                if ended.is_set():  # a server that ends waits for its threads
                    return
                each.epsilon(self.privacy.delta)

        # One after the other: thousands of devices join together, and have spent the same.
        async with self._finding:
            try:
                await asyncio.to_thread(find)
            finally:
                ended.set()

    def _to_be_asked_of(self, devices: Iterable[str]) -> set[Composition]:
        # Thousands of devices have spent the same.
        stands = {
            (spent, self._measurements_left(device))
            for device in devices
            for spent in self._ledgers.spent_by(device)
        }
        return {each for spent, left in stands for each in self._to_come(spent, left)}

    def _to_come(self, spent: Composition, measurements: int) -> Iterator[Composition]:
        """What a device that has spent this may have spent after the next attempt.

        `measurements` are still to come.
        """
        trained = spent.plus(self._event)
        yield trained
        yield self._with(trained, measurements)
        if self.plan.measurements:
            yield self._with(spent, 1)
            yield self._with(trained, 1)

    def _measurements_left(self, device: str) -> int:
        measured = self._measured[device] + self._measured_before[device]
        return max(0, self.plan.measurements - measured)

    def allows(self, device: str) -> bool:
        """Whether a device may be asked for one more round."""
        rows = self._last.get(device, [])
        capped = self.privacy.participations is not None or self.plan.correlated is not None
        if capped and len(rows) >= self.plan.participations:
            return False
        if self.plan.correlated is not None:
            if self._charged >= self._rounds:
                return False
            if rows and self._charged - rows[-1] < self.privacy.separation:
                return False
        return self._affords(device, self._event, self._measurements_left(device))

    def allows_measurement(self, device: str) -> bool:
        """Whether a device may be asked for one more evaluation or comparison."""
        if self._measured[device] >= self.plan.measurements:
            return False
        return self._affords(device, self.plan.measuring_event)

    @property
    def measured(self) -> int:
        """Measurements of all devices that they may have accepted, one for each device."""
        return self._measured.total()

    def may_repeat_measurement(self, round_: int, before: int) -> bool:
        """Whether a measurement that has failed may be repeated.

        An attempt that devices may have accepted has taken one of their measurements, and those of
        the evaluations to come are not for repetitions.

        Args:
            round_: it was of the model after this round.
            before: `measured` before it.
        """
        left = self.plan.measurements - max(self._measured.values(), default=0)
        return self.measured == before or left > evaluations_after(self._job, round_)

    def _affords(self, device: str, event: Event, measurements: int = 0) -> bool:
        """Whether the budget of a device allows an event and, later, so many measurements."""
        return all(
            self._with(spent.plus(event), measurements).epsilon(self.privacy.delta)
            <= self.privacy.epsilon
            for spent in self._ledgers.spent_by(device)
        )

    def _with(self, spent: Composition, measurements: int) -> Composition:
        return spent.plus(self.plan.measuring_event, measurements) if measurements else spent

    @property
    def spent(self) -> float:
        """Epsilon of the device that was asked most, of all charges."""
        return self._ledgers.epsilon(self.privacy.delta)

    def spent_by(self, device: str) -> float:
        """Epsilon of all charges of one device."""
        delta = self.privacy.delta
        return max(spent.epsilon(delta) for spent in self._ledgers.spent_by(device))

    # -- charges -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def charged(self, spec: RoundSpec) -> Iterator[None]:
        """Charge a round before the block, which asks its devices; note how the block ended.

        Raises:
            OSError: the charge cannot be stored.
            JobError: delta is too large for so many devices.
            RoundFailed: another job has used up the budget of a device since it was chosen.
        """
        devices = tuple(sorted(spec.cohort))
        self._check_delta(len(devices))
        if used_up := [name for name in devices if not self.allows(name)]:
            raise RoundFailed(
                f"{len(used_up)} devices of the round have no privacy budget left since another "
                f"job of the population {self.privacy.population!r} was charged"
            )
        charge = self._charge_of(ROUND, self._event, spec.round, spec.attempt, devices)
        with self._given_back(), self._ledgers.charged(charge, devices):
            self._count(devices)
            self._moved = self._bound
            yield
            self._bound = self._moved

    @contextlib.contextmanager
    def charged_measurement(
        self, what: Measurement, number: int, attempt: int, devices: Collection[str]
    ) -> Iterator[None]:
        """Charge a measurement before the block, which asks its devices.

        Args:
            what: it is.
            number: of the round that is evaluated, or of the comparison.
            attempt: at it.
            devices: who are asked.

        Raises:
            OSError: the charge cannot be stored.
            JobError: delta is too large for so many devices.
            RoundFailed: another job has used up the budget of a device since it was chosen.
        """
        names = tuple(sorted(devices))
        self._check_delta(len(names))
        if used_up := [name for name in names if not self.allows_measurement(name)]:
            raise RoundFailed(
                f"{len(used_up)} devices have no privacy budget left for a measurement since "
                f"another job of the population {self.privacy.population!r} was charged"
            )
        charge = self._charge_of(what, self.plan.measuring_event, number, attempt, names)
        with self._given_back(), self._ledgers.charged(charge, names):
            self._measured.update(names)
            yield

    def _check_delta(self, devices: int) -> None:
        if self.privacy.delta * devices >= 1:
            raise JobError(
                f"privacy.delta={self.privacy.delta:g} is not below 1 / {devices} devices: it "
                "would allow to publish one of them; use 1e-5 or less"
            )

    def _charge_of(
        self, what: str, event: Event, number: int, attempt: int, devices: tuple[str, ...]
    ) -> Charge:
        return Charge(
            population=self.privacy.population,
            unit=UNIT,
            adjacency=ADJACENCY,
            mechanism=self.privacy.mechanism,
            event=event,
            run=self._ledgers.run_id,
            round=number,
            attempt=attempt,
            what=what,
            devices=devices,
        )

    @contextlib.contextmanager
    def _given_back(self) -> Iterator[None]:
        """Count anew after a charge that may have been released, as after a restart."""
        try:
            yield
        except RoundFailed:
            self._recount()
            raise

    def _recount(self) -> None:
        """Count what the ledger says that devices of this run may have accepted."""
        self._charged = 0
        self._last.clear()
        self._measured.clear()
        for entry in self._ledgers.of_run():
            if not entry.is_spent or entry.charge.unit != UNIT:
                continue
            if entry.charge.what == ROUND:
                self._count(entry.charge.devices)
            else:
                self._measured.update(entry.charge.devices)

    def _count(self, devices: Collection[str]) -> None:
        for name in devices:
            self._last.setdefault(name, []).append(self._charged)
        self._charged += 1

    # -- noise -------------------------------------------------------------------------------------

    @property
    def clip(self) -> float:
        """Bound on the 2-norm of a device's update in the next attempt."""
        return self.privacy.clip if self._bound is None else self._bound.bound

    @property
    def row(self) -> int:
        """Number of the attempt that was charged last, from 0: the row of correlated noise."""
        return self._charged - 1

    @property
    def saved_clip(self) -> float:
        """The bound after the round that is about to be committed; 0 if it does not move."""
        return 0.0 if self._moved is None else self._moved.bound

    def release(
        self,
        mean: torch.Tensor,
        devices: int,
        figures: Mapping[str, float],
        rounding: float = 0.0,
    ) -> tuple[dict[str, float], float]:
        """Add the server's noise to what the devices of the round that was charged last have sent.

        Args:
            mean: (N) float32, the mean of the devices' updates; changed in place.
            devices: in the mean.
            figures: of the devices.
            rounding: bound on the 2-norm by which each of their updates was rounded.

        Returns:
            The figures without those that have no noise; the bound is in place of how many updates
            were within it. And the standard deviation of the noise that was added to an element, 0
            for none.
        """
        figures = dict(figures)
        deviation = 0.0
        figures.pop("clipped", None)  # the share of elements that the clip has cut is exact
        if self._noise is not None:
            # Rounding makes a vector longer. It is random, but local devices draw it from the seed
            # of the job, which is no secret.
            norm = self.clip + rounding
            deviation = self._noise.add(mean, norm, row=self.row, devices=devices)
        if self._bound is not None:
            noise = float(fresh_noise(1)) * self._bound.count_deviation
            share = (figures.pop(WITHIN_CLIP.name) + noise) / devices
            figures["clip"] = self._bound.bound
            self._moved = self._bound.moved(share)
        return figures, deviation

    def release_measurement(self, mean: torch.Tensor, norm: float, devices: int) -> float:
        """Add the server's noise to the mean of what devices measured, unless devices have.

        Args:
            mean: (N) float32; changed in place.
            norm: bound on the 2-norm of what one device sends.
            devices: in the mean.

        Returns:
            The standard deviation of the noise that was added to an element; 0 for none.
        """
        if self.privacy.mechanism == "distributed":
            return 0.0
        deviation = self.plan.measuring_multiplier * norm / devices
        mean.add_(fresh_noise(len(mean)).mul_(deviation).to(mean.dtype))
        return deviation
