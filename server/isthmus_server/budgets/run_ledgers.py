"""Where the charges of a run go: its own ledger, and on a server that of the population.

A budget is about the larger of the two: all jobs of a server with the same population share one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from isthmus.errors import RoundFailed
from isthmus_privacy.dp.accounting import Composition, Event
from isthmus_privacy.dp.ledger import Charge, Ledger, LedgerDamaged, LedgerEntry, Outcome
from isthmus_server.budgets.charged_runs import absent_from


class RunLedgers:
    """The ledgers of one unit of a run, its devices or its examples."""

    def __init__(self, run_id: str, population: str, own: Ledger, *shared: Ledger) -> None:
        """Use open ledgers.

        Args:
            run_id: of the run.
            population: whose data.
            own: ledger of the run.
            shared: ledger of the population; none for a run by itself.
        """
        self.run_id = run_id
        self.population = population
        self._own = own
        self._all = [own, *shared]

    def check(self) -> None:
        """Refuse the older one of the run's directory and the ledger of its population.

        An older directory may be a copy: noise of the same key would be in two sums, and charged
        once. With an older ledger of the population nobody knows what its other runs have spent. A
        charge that a crash kept from the population's ledger is added to it.

        Raises:
            LedgerDamaged: one of them was charged for rounds that the other does not know.
            OSError: a charge cannot be stored.
        """
        own = [entry for entry in self.of_run() if entry.charge.population == self.population]
        known = Counter(entry.charge for entry in self.of_run())
        for ledger in self._all[1:]:
            absent = absent_from(ledger, own)
            if absent.lost:
                first = absent.lost[0]
                raise LedgerDamaged(
                    f"{ledger.path} has no charge for round {first.round} attempt {first.attempt} "
                    f"of a run, which {self._own.path} has: it is an older copy, so what was spent "
                    "is not known and nobody is asked; restore the newer one"
                )
            for charge in absent.unasked:
                ledger.reserve(charge)
            charged = Counter(entry.charge for entry in ledger.of_run(self.run_id))
            missing = [each for each in charged - known if each.population == self.population]
            if missing:
                raise LedgerDamaged(
                    f"{self._own.path} has no charge for round {missing[0].round} attempt "
                    f"{missing[0].attempt} of this run, which {ledger.path} has: the run's "
                    "directory is an older copy; continue the newer one, or begin a new run"
                )

    def of_run(self) -> list[LedgerEntry]:
        """The charges of the run, in order."""
        return self._own.of_run(self.run_id)

    def epsilon(self, delta: float, plus: Charge | None = None) -> float:
        """What was spent, see `Ledger.epsilon`."""
        return max(ledger.epsilon(self.population, delta, plus) for ledger in self._all)

    def largest(self) -> set[Composition]:
        """What `epsilon` is of, in all ledgers."""
        return {each for ledger in self._all for each in ledger.largest(self.population)}

    def spent_by(self, device: str) -> Sequence[Composition]:
        """What one device was asked for, by ledger."""
        return [ledger.spent_by(self.population, device) for ledger in self._all]

    def charged_by_others(self, event: Event, unit: str) -> Counter[str]:
        """How often other runs have charged each device with an event, but not for a round."""
        times = Counter[str]()
        for ledger in self._all[1:]:
            for entry in ledger.entries.values():
                charge = entry.charge
                about = (charge.population, charge.unit, charge.event)
                if (
                    about == (self.population, unit, event)
                    and entry.is_spent
                    and charge.run != self.run_id
                    and charge.what != "round"
                ):
                    times.update(charge.devices)
        return times

    @contextlib.contextmanager
    def charged(self, charge: Charge, asked: Collection[str]) -> Iterator[None]:
        """Write a charge before the block, and note how the block ended.

        It is released if the block raises a `RoundFailed` by which all of the participants that are
        `asked` have refused.

        Raises:
            OSError: the charge cannot be stored.
        """
        charged = [(ledger, ledger.reserve(charge)) for ledger in self._all]
        outcome: Outcome = "failed"
        try:
            yield
            outcome = "committed"
        except RoundFailed as failure:
            if failure.all_refused(asked):
                outcome = "released"
            raise
        finally:
            for ledger, number in charged:
                with contextlib.suppress(OSError):  # unless this is noted, it is spent
                    ledger.settle(number, outcome)
