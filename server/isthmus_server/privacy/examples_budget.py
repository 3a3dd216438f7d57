"""The privacy budget of a datacenter's examples: steps are charged before a datacenter is asked.

The charges are in the same two ledgers as those of devices: that of the run, and on a server that
of the population. Nothing is added up between devices and examples: their units differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from isthmus.errors import RoundFailed
from isthmus_privacy.dp.calibration import SampledNoisePlan
from isthmus_privacy.dp.ledger import LEDGER_FILE, Charge, Ledger, LedgerHead
from isthmus_server.privacy.budget import PrivacyBudget
from isthmus_server.privacy.populations import open_population
from isthmus_server.storage.records import CommittedState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.round_spec import RoundSpec

EXAMPLE, ADD_OR_REMOVE = "example", "add-or-remove"


class ExamplesBudget:
    """What a run with `[datacenter.privacy]` may still train.

    Guarantees:
      * no datacenter is asked for steps with which epsilon would exceed the budget;
      * a crash at any instant leaves every charge of steps that were asked for.
    """

    def __init__(
        self, store: Store, plan: SampledNoisePlan, own: Ledger, populations: Path | None
    ) -> None:
        """Open the ledger of the population.

        Args:
            store: the run.
            plan: the noise.
            own: the ledger of the run.
            populations: directory of the ledgers of populations; None for a run by itself.

        Raises:
            UserError: a ledger is damaged or in use.
        """
        self.plan = plan
        self._run_id = store.run_id
        self._ledgers = [own]
        if populations is not None:
            self._ledgers.append(open_population(populations, plan.privacy.population))

    @classmethod
    def of(
        cls,
        store: Store,
        state: CommittedState,
        populations: Path | None,
        devices: PrivacyBudget | None,
    ) -> Self | None:
        """The budget of a run, which has the ledger of `devices` if there is one."""
        plan = SampledNoisePlan.of(store.job)
        if plan is None:
            return None
        if devices is not None:
            own = devices.ledger
        else:
            own = Ledger.open(store.directory / LEDGER_FILE, LedgerHead.of(state.ledger_head))
        try:
            return cls(store, plan, own, populations)
        except BaseException:
            own.close()
            close(devices)
            raise

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run."""
        return self._ledgers[0]

    def close(self) -> None:
        """Let other processes use the ledgers."""
        for ledger in self._ledgers:
            ledger.close()

    def refusal(self, steps: int) -> str:
        """Why so many steps may not be asked for; empty if they may."""
        privacy = self.plan.privacy
        after = self._epsilon(self._charge(0, 0, steps))
        if after <= privacy.epsilon:
            return ""
        return (
            f"the privacy budget of the datacenter's examples is used up: epsilon "
            f"{self._epsilon():.4g} of {privacy.epsilon:g} at delta {privacy.delta:g} is spent, "
            f"and {steps} more steps would make it {after:.4g} (datacenter.privacy)"
        )

    @contextlib.contextmanager
    def charged(self, spec: RoundSpec) -> Iterator[None]:
        """Charge a round's steps before the block, and note how the block ended.

        Raises:
            OSError: the charge cannot be stored.
            RoundFailed: it would exceed the budget.
        """
        steps = spec.steps * len(spec.datacenters)
        if not steps:
            yield
            return
        if refusal := self.refusal(steps):
            raise RoundFailed(refusal)
        charge = self._charge(spec.round, spec.attempt, steps)
        charged = [(ledger, ledger.reserve(charge)) for ledger in self._ledgers]
        outcome: Any = "failed"
        try:
            yield
            outcome = "committed"
        finally:
            for ledger, number in charged:
                with contextlib.suppress(OSError):  # it is spent, whatever is noted
                    ledger.settle(number, outcome)

    def _epsilon(self, plus: Charge | None = None) -> float:
        population, delta = self.plan.privacy.population, self.plan.privacy.delta
        return max(ledger.epsilon(population, delta, plus) for ledger in self._ledgers)

    def _charge(self, round_: int, attempt: int, steps: int) -> Charge:
        return Charge(
            population=self.plan.privacy.population,
            unit=EXAMPLE,
            adjacency=ADD_OR_REMOVE,
            mechanism="dp-sgd",
            event=self.plan.event(steps),
            run=self._run_id,
            round=round_,
            attempt=attempt,
            what="training",
        )


def charged_steps(
    budget: ExamplesBudget | None, spec: RoundSpec
) -> contextlib.AbstractContextManager[None]:
    """Charge a round with a datacenter for the block."""
    return contextlib.nullcontext() if budget is None else budget.charged(spec)


def close(*budgets: PrivacyBudget | ExamplesBudget | None) -> None:
    """Let other processes use the ledgers of a run's budgets, as far as it has them."""
    for budget in budgets:
        if budget is not None:
            budget.close()


def saved(*budgets: PrivacyBudget | ExamplesBudget | None) -> dict[str, Any]:
    """The fields of the run's state by which it is noticed that their ledger was cut."""
    ledgers = [budget.ledger for budget in budgets if budget is not None]
    return {"ledger_head": str(ledgers[0].head)} if ledgers else {}
