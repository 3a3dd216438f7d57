"""The privacy budgets of a run: of its devices, and of a datacenter's examples."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus_privacy.dp.calibration import NoisePlan, SampledNoisePlan
from isthmus_privacy.dp.ledger import (
    HEAD_FILE,
    LEDGER_FILE,
    Ledger,
    LedgerDamaged,
    last_known,
)
from isthmus_privacy.dp_sgd.device_examples import check_device_examples
from isthmus_server.budgets.budget import ROUND, UNIT, PrivacyBudget
from isthmus_server.budgets.examples_budget import EXAMPLE, ExamplesBudget
from isthmus_server.budgets.populations import (
    Populations,
    note_shared,
    shared_by,
    shared_with,
)
from isthmus_server.budgets.run_ledgers import RunLedgers
from isthmus_server.storage.records import CommittedState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.round_spec import RoundSpec


def check_budgets(job: Job) -> None:
    """Refuse a job whose privacy budgets no noise meets, or not its own.

    Finding the noise of a datacenter's examples takes seconds the first time.

    Raises:
        JobError: with what to change.
    """
    if job.privacy is not None:
        NoisePlan.of_job(job)
    SampledNoisePlan.of(job)
    check_device_examples(job)


@dataclasses.dataclass(frozen=True)
class RunBudgets:
    """What a run may still ask for; one without privacy may ask for everything."""

    devices: PrivacyBudget | None
    examples: ExamplesBudget | None
    ledger: Ledger | None
    """Ledger of the run; None without privacy."""
    _opened: contextlib.ExitStack

    @classmethod
    def open(cls, store: Store, state: CommittedState, populations: Populations | None) -> Self:
        """Open the ledgers.

        Args:
            store: the run.
            state: of the run, which knows a line of its ledger.
            populations: of the server or comparison; None looks for those that it was begun by.

        Raises:
            UserError: no noise meets a budget, a ledger is damaged or in use, or the key of the
                noise is lost.
        """
        steps = SampledNoisePlan.of(store.job)
        privacy = store.job.privacy
        if steps is None and privacy is None:
            return cls(None, None, None, contextlib.ExitStack())
        with contextlib.ExitStack() as opened:
            known = last_known(store.directory, state.ledger_head)
            guard = None if store.fence is None else store.fence.held
            own = Ledger.open(store.directory / LEDGER_FILE, known, guard)
            opened.callback(own.close)
            own.keep_head_in(store.directory / HEAD_FILE)
            _check_logged(store, own)

            def ledgers(population: str, unit: str) -> RunLedgers:
                # A run of a comparison or a server is charged there, by every command.
                found = populations or shared_with(store.directory, population)
                if found is None:
                    _check_alone(store.directory, population)
                    return RunLedgers(store.run_id, population, own)
                note_shared(store.directory, population)
                shared = opened.enter_context(found.ledger(population))
                _check_unit(shared, population, unit)
                both = RunLedgers(store.run_id, population, own, shared)
                both.check()
                return both

            devices = examples = None
            if privacy is not None:
                devices = PrivacyBudget(
                    store.job,
                    privacy,
                    ledgers(privacy.population, UNIT),
                    store.directory,
                    state.clip,
                )
            if steps is not None:
                examples = ExamplesBudget(steps, ledgers(steps.privacy.population, EXAMPLE))
            return cls(devices, examples, own, opened.pop_all())

    def close(self) -> None:
        """Let other processes use the ledgers."""
        self._opened.close()

    @property
    def devices_spent(self) -> float:
        """Epsilon of the device that was asked most."""
        return 0.0 if self.devices is None else self.devices.spent

    @contextlib.contextmanager
    def charged(self, spec: RoundSpec) -> Iterator[None]:
        """Charge a round before the block, which asks its participants; note how the block ended.

        Raises:
            OSError: a charge cannot be stored.
            JobError: delta is too large for so many devices.
            RoundFailed: a budget is used up.
        """
        with contextlib.ExitStack() as charges:
            if self.devices is not None and spec.cohort:
                charges.enter_context(self.devices.charged(spec))
            if self.examples is not None and spec.datacenters and spec.steps:
                charges.enter_context(self.examples.charged(spec))
            yield

    def saved(self) -> Mapping[str, Any]:
        """Fields of the run's state: the end of its ledger, and the next clipping bound."""
        if self.ledger is None:
            return {}
        clip = 0.0 if self.devices is None else self.devices.saved_clip
        return {"ledger_head": str(self.ledger.head), "clip": clip}


def _check_alone(run: Path, population: str) -> None:
    """Refuse a run that has shared a budget, where the ledger of that is not found.

    Raises:
        LedgerDamaged: it is one.
    """
    if population in shared_by(run):
        raise LedgerDamaged(
            f"the run in {run} shares the budget of {population!r} with other runs, and their "
            "ledger is not where they are: it was removed, or this run was moved or copied, so "
            "what was spent is not known and nobody is asked; restore the ledger with its head, "
            "continue the run where it was, or make a branch of it there"
        )


def _check_unit(ledger: Ledger, population: str, unit: str) -> None:
    """Refuse a population whose ledger is about another unit: their epsilons do not add up.

    Raises:
        UserError: it is.
    """
    for entry in ledger.entries.values():
        charge = entry.charge
        if charge.population == population and charge.unit != unit:
            raise UserError(
                f"other runs protect each {charge.unit} of the population {population!r}, and "
                f"this job each {unit}, whose epsilons do not add up; choose another population"
            )


def _check_logged(store: Store, own: Ledger) -> None:
    """Refuse a ledger without the charge of an attempt that the run's log has.

    The state knows the ledger's end at the last commit; this finds what was cut after it.

    Raises:
        LedgerDamaged: a charge is missing.
    """
    charged: dict[tuple[int, int], set[str]] = {}
    trained: set[tuple[int, int]] = set()
    for entry in own.entries.values():  # also those of the run that this one was branched from
        about = (entry.charge.round, entry.charge.attempt)
        if entry.charge.unit == EXAMPLE:
            trained.add(about)
        elif entry.charge.what == ROUND:
            charged.setdefault(about, set()).update(entry.charge.devices)
    of_devices = store.job.privacy is not None
    of_examples = store.job.datacenter.privacy is not None
    for logged in store.logged_attempts():
        planned = logged.planned
        who = ""
        about = (planned.round, planned.attempt)
        if of_devices and set(planned.invited) - charged.get(about, set()):
            who = "devices were asked"
        elif of_examples and planned.datacenters and about not in trained:
            who = "datacenter was asked"
        if who:
            raise LedgerDamaged(
                f"the privacy ledger {own.path} has no charge for round {planned.round} attempt "
                f"{planned.attempt}, whose {who}: it was cut, or is older than the run; restore "
                "the file from a backup"
            )
