"""What a run has spent of its privacy budget, from its verified ledger."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.job.privacy import PrivacySection
from isthmus.printable import in_a_line
from isthmus_privacy.dp.accounting import SampledGaussian
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger, LedgerEntry, last_known
from isthmus_server.budgets.budget import UNIT
from isthmus_server.budgets.populations import shared_with
from isthmus_server.model.summed_evaluation import attempt_in_words
from isthmus_server.read.report.privacy.device_examples import PromisedToExamples
from isthmus_server.read.report.privacy.examples_spending import SpentOnExamples
from isthmus_server.storage.store import Store


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpentByDevice:
    """What a run, and all that share its population, have spent of one device."""

    device: str
    asked: int
    """Sums of the run that it was asked for."""
    epsilon: float
    shared: float | None = None
    """Epsilon of the device by all runs that share the ledger of the population; None for a run by
    itself."""

    @property
    def line(self) -> str:
        """Line for a terminal."""
        together = "" if self.shared is None else f", {self.shared:.4g} by all runs together"
        times = "once" if self.asked == 1 else f"{self.asked} times"
        return f"{in_a_line(self.device)}: epsilon {self.epsilon:.4g}, asked {times}{together}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spending:
    """The charges of a run."""

    path: Path | None
    """None if only devices have accounts, with `[federated.privacy]` alone."""
    lines_read: int
    epsilon: float
    """Epsilon of the device that was asked most; 0 if only examples are protected."""
    budget: float | None
    delta: float | None
    entries: Sequence[LedgerEntry]
    most_asked: int
    """Sums that this device was asked for."""
    shared: float | None = None
    """Epsilon of the population's device that was asked most, by all runs that share its ledger;
    None for a run by itself."""
    examples: SpentOnExamples | None = None
    """What was spent of the datacenter's examples, apart; None without `[datacenter.privacy]`."""
    promised: PromisedToExamples | None = None
    """To the examples of devices; None without `[federated.privacy]`."""
    by_device: Sequence[SpentByDevice] | None = None
    """Epsilon of each device that the run has asked; None unless it is wanted, as there may be
    many."""

    def to_json(self) -> dict[str, Any]:
        """Everything; the names of devices only with `by_device`."""
        by_device = self.by_device
        named = {} if by_device is None else {"by_device": list(map(dataclasses.asdict, by_device))}
        return {
            **named,
            "ledger": None if self.path is None else str(self.path),
            "lines": self.lines_read,
            "epsilon": self.epsilon,
            "budget": self.budget,
            "delta": self.delta,
            "most_asked": self.most_asked,
            "shared_epsilon": self.shared,
            "examples": None if self.examples is None else dataclasses.asdict(self.examples),
            "device_examples": None if self.promised is None else dataclasses.asdict(self.promised),
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
        lines = []
        if self.path is not None:
            lines.append(f"{self.path}: {self.lines_read} lines, the chain is intact")
        if self.promised is not None:
            lines.append(self.promised.sentence)
        if self.examples is not None:
            lines.append(self.examples.sentence)
        by_devices = [entry.charge for entry in self.entries if entry.charge.unit == UNIT]
        if by_devices:
            charge = by_devices[0]
            lines.append(
                f"population {charge.population}, unit {charge.unit} ({charge.adjacency}): epsilon "
                f"{self.epsilon:.4g} of {self.budget:g} at delta {self.delta:g}, of the "
                f"{charge.unit} that was asked most, {self.most_asked} times"
            )
            if self.shared is not None:
                lines.append(
                    f"all runs of the population together: epsilon {self.shared:.4g} of "
                    f"{self.budget:g}"
                )
        for entry in self.entries:
            charge = entry.charge
            outcome: str = entry.outcome or "not ended, or cut short by a crash"
            if not entry.is_spent:
                outcome = "released, as nobody can have accepted"
            who = f"{len(charge.devices)} devices, {charge.mechanism} noise"
            if isinstance(charge.event, SampledGaussian):
                who = f"{charge.event.steps} steps of a datacenter, {charge.mechanism}"
            attempt = attempt_in_words(charge.attempt)
            lines.append(f"{charge.what} {charge.round} {attempt}: {who}, {outcome}")
        return [*lines, *(each.line for each in self.by_device or ())]


def read_spending(run_dir: Path, *, of_each: bool = False) -> Spending:
    """Verify and read the ledger of a run.

    Args:
        run_dir: of the run.
        of_each: find the epsilon of each device, too.

    Raises:
        UserError: the run cannot be read, or has no differential privacy.
        LedgerDamaged: the ledger is not the one that was written.
    """
    path = run_dir / LEDGER_FILE
    with contextlib.closing(Store.open(run_dir)) as store:
        privacy = store.job.privacy
        state = store.run_state()
        promised = PromisedToExamples.of(store.job)
        has_others = promised is not None or store.job.datacenter.privacy is not None
        if of_each and privacy is None and has_others:
            raise UserError(
                f"{run_dir} is a run without [privacy], which protects each device as a whole: "
                "only examples have a budget, and no device is charged; leave out --devices"
            )
        if privacy is None and store.job.datacenter.privacy is None and promised is not None:
            return _of_devices_alone(promised)
        if privacy is None and store.job.datacenter.privacy is None:
            raise UserError(f"{run_dir} is a run without differential privacy ([privacy])")
        if not path.exists():
            raise UserError(
                f"{run_dir} has no {LEDGER_FILE}: nobody was asked yet, or it was removed"
            )
        ledger = Ledger.read(path, last_known(run_dir, state.ledger_head))
        examples = SpentOnExamples.of(store, ledger)
    entries = list(ledger.entries.values())
    spent = [entry.charge for entry in entries if entry.is_spent]
    asked = Counter(name for charge in spent for name in charge.devices)
    shared = None if privacy is None else _shared(run_dir, privacy)
    return Spending(
        path=path,
        lines_read=ledger.head.number,
        epsilon=0.0 if privacy is None else ledger.epsilon(privacy.population, privacy.delta),
        budget=None if privacy is None else privacy.epsilon,
        delta=None if privacy is None else privacy.delta,
        entries=entries,
        most_asked=max(asked.values(), default=0),
        shared=None
        if privacy is None or shared is None
        else shared.epsilon(privacy.population, privacy.delta),
        examples=examples,
        promised=promised,
        by_device=_by_device(privacy, asked, ledger, shared) if of_each and privacy else None,
    )


def _by_device(
    privacy: PrivacySection, asked: Counter[str], ledger: Ledger, shared: Ledger | None
) -> list[SpentByDevice]:
    def epsilon(of: Ledger, device: str) -> float:
        return of.spent_by(privacy.population, device).epsilon(privacy.delta)

    return [
        SpentByDevice(
            device=name,
            asked=asked[name],
            epsilon=epsilon(ledger, name),
            shared=None if shared is None else epsilon(shared, name),
        )
        for name in sorted(asked)
    ]


def _shared(run_dir: Path, privacy: PrivacySection) -> Ledger | None:
    """The ledger of all runs that share a population with a run; None for a run by itself.

    Raises:
        LedgerDamaged: the ledger of the population is not the one that was written.
    """
    populations = shared_with(run_dir, privacy.population)
    return None if populations is None else populations.read(privacy.population)


def _of_devices_alone(promised: PromisedToExamples) -> Spending:
    """Nothing is charged on the server."""
    return Spending(
        path=None,
        lines_read=0,
        epsilon=0.0,
        budget=None,
        delta=None,
        entries=(),
        most_asked=0,
        promised=promised,
    )
