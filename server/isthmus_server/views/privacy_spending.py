"""What a run has spent of its privacy budget, from its verified ledger."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger, LedgerEntry, LedgerHead
from isthmus_server.storage.store import Store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spending:
    """The charges of a run."""

    path: Path
    lines_read: int
    epsilon: float
    """Of the device that was asked most."""
    budget: float
    delta: float
    entries: Sequence[LedgerEntry]
    most_asked: int
    """Sums that this device was asked for."""

    def to_json(self) -> dict[str, Any]:
        """Everything but the names of the devices, of which there may be many."""
        return {
            "ledger": str(self.path),
            "lines": self.lines_read,
            "epsilon": self.epsilon,
            "budget": self.budget,
            "delta": self.delta,
            "most_asked": self.most_asked,
            "charges": [
                {
                    "number": entry.number,
                    "population": entry.charge.population,
                    "unit": entry.charge.unit,
                    "adjacency": entry.charge.adjacency,
                    "mechanism": entry.charge.mechanism,
                    "what": entry.charge.what,
                    "round": entry.charge.round,
                    "attempt": entry.charge.attempt,
                    "devices": len(entry.charge.devices),
                    "outcome": entry.outcome,
                }
                for entry in self.entries
            ],
        }

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        lines = [f"{self.path}: {self.lines_read} lines, the chain is intact"]
        if self.entries:
            charge = self.entries[0].charge
            lines.append(
                f"population {charge.population}, unit {charge.unit} ({charge.adjacency}): epsilon "
                f"{self.epsilon:.4g} of {self.budget:g} at delta {self.delta:g}, of the "
                f"{charge.unit} that was asked most, {self.most_asked} times"
            )
        for entry in self.entries:
            charge = entry.charge
            outcome = entry.outcome or "not ended, or cut short by a crash"
            lines.append(
                f"{charge.what} {charge.round} attempt {charge.attempt}: {len(charge.devices)} "
                f"devices, {charge.mechanism} noise, {outcome}"
            )
        return lines


def read_spending(run_dir: Path) -> Spending:
    """Verify and read the ledger of a run.

    Raises:
        UserError: the run cannot be read, or has no differential privacy.
        LedgerDamaged: the ledger is not the one that was written.
    """
    with contextlib.closing(Store.open(run_dir)) as store:
        privacy, state = store.job.privacy, store.run_state()
    path = run_dir / LEDGER_FILE
    if privacy is None:
        raise UserError(f"{run_dir} is a run without differential privacy ([privacy])")
    if not path.exists():
        raise UserError(f"{run_dir} has no {LEDGER_FILE}: nobody was asked yet, or it was removed")
    ledger = Ledger.read(path, LedgerHead.of(state.ledger_head))
    entries = list(ledger.entries.values())
    asked = Counter(name for entry in entries for name in entry.charge.devices)
    return Spending(
        path=path,
        lines_read=ledger.head.number,
        epsilon=ledger.epsilon(privacy.population, privacy.delta),
        budget=privacy.epsilon,
        delta=privacy.delta,
        entries=entries,
        most_asked=max(asked.values(), default=0),
    )
