"""The privacy budget of a run: whom it may still ask, and the charges for what it asks.

A charge is in the ledgers before any device is asked, those of attempts that fail included. There
are two: that of the run, in its directory, and on a server that of the population, which all jobs
with this `privacy.population` share. The budget is about the larger of the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from isthmus.errors import JobError
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.ledger import LEDGER_FILE, Charge, Ledger, LedgerHead, Outcome
from isthmus_server.privacy.populations import open_population
from isthmus_server.privacy.server_noise import ServerNoise

if TYPE_CHECKING:
    import torch

    from isthmus.job.privacy import PrivacySection
    from isthmus_server.storage.records import CommittedState
    from isthmus_server.storage.store import Store
    from isthmus_server.strategy.round_spec import RoundSpec

UNIT, ADJACENCY = "device", "zero-out"


class PrivacyBudget:
    """What a run with `[privacy]` may still ask of each device.

    Guarantees:
      * no device is asked for a round with which its epsilon would exceed the budget, for more
        rounds than the noise was made for, or before the separation is over;
      * a crash at any instant leaves every charge of a round that devices may have been asked for.
    """

    def __init__(
        self,
        store: Store,
        privacy: PrivacySection,
        state: CommittedState,
        populations: Path | None = None,
    ) -> None:
        """Open the ledgers.

        Args:
            store: the run.
            privacy: the job's table.
            state: of the run, which knows a line of its ledger.
            populations: directory of the ledgers of populations; None for a run by itself.

        Raises:
            UserError: no noise meets the budget, a ledger is damaged or in use, or the key of the
                noise is lost.
        """
        self.privacy = privacy
        self.plan = NoisePlan.of(privacy, store.job.rounds)
        self._run_id = store.run_id
        self._rounds = store.job.rounds
        self._event = self.plan.event(store.run_id)
        self._own = Ledger.open(store.directory / LEDGER_FILE, LedgerHead.of(state.ledger_head))
        self._ledgers = [self._own]
        self._open: list[int] = []
        """Numbers of the charge that is not settled, one for each ledger."""
        self._charged = 0
        """Attempts of this run with devices."""
        self._last: dict[str, list[int]] = {}
        """The attempts that each device was asked for, counted from 0."""
        earlier = [each.charge for each in self._own.of_run(self._run_id)]
        for charge in earlier:
            if charge.unit == UNIT:
                self._count(charge.devices)
        try:
            if populations is not None:
                self._ledgers.append(open_population(populations, privacy.population))
            used = self._charged > 0
            self._noise = None
            if privacy.mechanism != "distributed":
                self._noise = ServerNoise(self.plan, store.directory, used=used)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes use the ledgers."""
        for ledger in self._ledgers:
            ledger.close()

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run."""
        return self._own

    # -- what may be asked -------------------------------------------------------------------------

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
        return all(
            ledger.spent_by(self.privacy.population, device)
            .plus(self._event)
            .epsilon(self.privacy.delta)
            <= self.privacy.epsilon
            for ledger in self._ledgers
        )

    @classmethod
    def of(cls, store: Store, state: CommittedState, populations: Path | None) -> Self | None:
        """The budget of a run; None for a job without `[privacy]`."""
        privacy = store.job.privacy
        return None if privacy is None else cls(store, privacy, state, populations)

    @property
    def spent(self) -> float:
        """Epsilon of the device that was asked most, of all charges."""
        population, delta = self.privacy.population, self.privacy.delta
        return max(ledger.epsilon(population, delta) for ledger in self._ledgers)

    # -- charges -----------------------------------------------------------------------------------

    def reserve(self, spec: RoundSpec) -> None:
        """Charge a round before its devices are asked.

        Raises:
            OSError: the charge cannot be stored.
            JobError: delta is too large for so many devices.
        """
        devices = tuple(sorted(spec.cohort))
        if self.privacy.delta * len(devices) >= 1:
            raise JobError(
                f"privacy.delta={self.privacy.delta:g} is not below 1 / {len(devices)} devices: it "
                "would allow to publish one of them; use 1e-5 or less"
            )
        assert all(map(self.allows, devices))
        charge = Charge(
            population=self.privacy.population,
            unit=UNIT,
            adjacency=ADJACENCY,
            mechanism=self.privacy.mechanism,
            event=self._event,
            run=self._run_id,
            round=spec.round,
            attempt=spec.attempt,
            what="round",
            devices=devices,
        )
        self._open = []
        for ledger in self._ledgers:
            self._open.append(ledger.reserve(charge))
        self._count(devices)

    def _count(self, devices: Collection[str]) -> None:
        for name in devices:
            self._last.setdefault(name, []).append(self._charged)
        self._charged += 1

    def settle(self, outcome: Outcome) -> None:
        """Note how the round that was charged last has ended."""
        charged, self._open = self._open, []
        for ledger, number in zip(self._ledgers, charged, strict=False):
            with contextlib.suppress(OSError):  # it is spent, whatever is noted
                ledger.settle(number, outcome)

    # -- noise -------------------------------------------------------------------------------------

    def add_noise(self, mean: torch.Tensor, devices: int) -> None:
        """Add the server's noise to the mean of the round that was charged last, in place.

        Args:
            mean: (N) float32, the mean of the devices' updates.
            devices: in the mean.
        """
        if self._noise is not None:
            self._noise.add(mean, row=self._charged - 1, devices=devices)


@contextlib.contextmanager
def charged(budget: PrivacyBudget | None, spec: RoundSpec) -> Iterator[None]:
    """Charge a round with devices before the block, and note how the block ended."""
    if budget is None or not spec.cohort:
        yield
        return
    budget.reserve(spec)
    try:
        yield
    except BaseException:
        budget.settle("failed")
        raise
    budget.settle("committed")
