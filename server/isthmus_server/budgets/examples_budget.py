"""The privacy budget of a datacenter's examples: steps are charged before a datacenter is asked.

The charges are in the run's ledger, as those of devices, and in that of a population of their own.
Nothing is added up between devices and examples: their units differ.
"""

from __future__ import annotations

import contextlib

from isthmus.errors import RoundFailed
from isthmus_privacy.dp.calibration import SampledNoisePlan
from isthmus_privacy.dp.ledger import Charge
from isthmus_server.budgets.run_ledgers import RunLedgers
from isthmus_server.strategy.round_spec import RoundSpec

EXAMPLE = "example"
ADD_OR_REMOVE = "add-or-remove"


class ExamplesBudget:
    """What a run with `[datacenter.privacy]` may still train.

    Guarantees:
      * no datacenter is asked for steps with which epsilon would exceed the budget;
      * a crash at any instant leaves every charge of steps that were asked for; what no datacenter
        can have accepted is given back.
    """

    def __init__(self, plan: SampledNoisePlan, ledgers: RunLedgers) -> None:
        """`plan` is the noise; the ledgers are open."""
        self.plan = plan
        self._ledgers = ledgers

    def refusal(self, steps: int) -> str:
        """Why so many steps may not be asked for; empty if they may."""
        privacy = self.plan.privacy
        spent = self._ledgers.epsilon(privacy.delta)
        after = self._ledgers.epsilon(privacy.delta, self._charge_of(0, 0, steps))
        if after <= privacy.epsilon:
            return ""
        return (
            f"the privacy budget of the datacenter's examples is used up: epsilon "
            f"{spent:.4g} of {privacy.epsilon:g} at delta {privacy.delta:g} is spent, "
            f"and {steps} more steps would make it {after:.4g} (datacenter.privacy)"
        )

    def charged(self, spec: RoundSpec) -> contextlib.AbstractContextManager[None]:
        """Charge a round's steps before the block, and note how the block ended.

        Raises:
            OSError: the charge cannot be stored.
            RoundFailed: it would exceed the budget.
        """
        steps = spec.steps * len(spec.datacenters)
        if refusal := self.refusal(steps):
            raise RoundFailed(refusal)
        charge = self._charge_of(spec.round, spec.attempt, steps)
        return self._ledgers.charged(charge, spec.datacenters)

    def _charge_of(self, round_: int, attempt: int, steps: int) -> Charge:
        return Charge(
            population=self.plan.privacy.population,
            unit=EXAMPLE,
            adjacency=ADD_OR_REMOVE,
            mechanism="dp-sgd",
            event=self.plan.event(steps),
            run=self._ledgers.run_id,
            round=round_,
            attempt=attempt,
            what="training",
        )
