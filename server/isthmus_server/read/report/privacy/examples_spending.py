"""What a run has spent of the privacy budget of the datacenter's examples, from its ledger."""

from __future__ import annotations

import dataclasses
from typing import Self

from isthmus_privacy.dp.accounting import SampledGaussian
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger, last_known
from isthmus_server.budgets.examples_budget import ADD_OR_REMOVE, EXAMPLE
from isthmus_server.storage.records import Record
from isthmus_server.storage.store import Store


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpentOnExamples(Record):
    """The guarantee of a run with `[datacenter.privacy]` so far."""

    epsilon: float
    """Epsilon of one example, failed attempts included."""
    budget: float
    delta: float
    steps: int
    """Steps that were charged."""
    together: float | None = None
    """Epsilon of a device and one example of the same person, at the smaller delta; None
    unless `datacenter.privacy.overlap`."""
    together_delta: float | None = None
    unit: str = EXAMPLE
    """What is protected."""
    adjacency: str = ADD_OR_REMOVE
    """How neighbouring data sets differ."""

    @classmethod
    def of(cls, store: Store, ledger: Ledger | None = None) -> Self | None:
        """Compute it; None for a job without `[datacenter.privacy]`.

        Raises:
            LedgerDamaged: the ledger was edited.
        """
        privacy = store.job.datacenter.privacy
        if privacy is None:
            return None
        path = store.directory / LEDGER_FILE
        if ledger is None and path.exists():
            known = last_known(store.directory, store.run_state().ledger_head)
            ledger = Ledger.read(path, known)
        entries = [] if ledger is None else ledger.entries.values()
        charges = [each.charge for each in entries if each.is_spent]
        events = [each.event for each in charges if each.unit == EXAMPLE]
        spent = 0.0 if ledger is None else ledger.epsilon(privacy.population, privacy.delta)
        devices = store.job.privacy
        together = None
        delta = None
        if privacy.overlap and devices is not None:
            both = (devices.population, privacy.population)
            delta = min(devices.delta, privacy.delta)
            together = 0.0 if ledger is None else ledger.epsilon_together(both, delta)
        return cls(
            epsilon=spent,
            budget=privacy.epsilon,
            delta=privacy.delta,
            steps=sum(each.steps for each in events if isinstance(each, SampledGaussian)),
            together=together,
            together_delta=delta,
        )

    @property
    def sentence(self) -> str:
        """The guarantee in words."""
        both = ""
        if self.together is not None:
            both = (
                f"; epsilon {self.together:.4g} at delta {self.together_delta:g} for somebody with "
                f"a device and one {self.unit}"
            )
        return (
            f"epsilon {self.epsilon:.4g} of {self.budget:g} at delta {self.delta:g} for one "
            f"{self.unit} of the datacenter ({self.adjacency}), spent in {self.steps} steps{both}"
        )
