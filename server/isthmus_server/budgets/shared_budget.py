"""The privacy budget of runs that have the same devices and datacenter, as those of a comparison.

What several runs reveal composes: a device that is in nine of them has spent what all nine were
charged for. So they share one population, whose ledger is next to theirs.

{directory}/privacy/{population}.ledger    see `isthmus_server.budgets.populations`
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.privacy import DatacenterPrivacy, PrivacySection
from isthmus_privacy.dp.accounting import Composition
from isthmus_privacy.dp.calibration import NoisePlan, SampledNoisePlan
from isthmus_privacy.dp_sgd.device_examples import EXAMPLE as DEVICE_EXAMPLE
from isthmus_privacy.dp_sgd.device_examples import ZERO_OUT
from isthmus_server.budgets.budget import ADJACENCY, UNIT
from isthmus_server.budgets.examples_budget import ADD_OR_REMOVE, EXAMPLE
from isthmus_server.budgets.populations import DIRECTORY, Populations
from isthmus_server.storage.records import Record

_SIDES = {
    "federated": (1.0, 0.0),
    "datacenter": (0.0, 1.0),
    "hybrid": (1.0, 1.0),
    "alternate": (0.5, 0.5),
}
"""Parts of the rounds with devices and with the datacenter, of policies of which these are known
before; the first of two kinds in turn is that of the datacenter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpentTogether(Record):
    """What the runs have spent of one population."""

    unit: str
    """What is protected."""
    adjacency: str
    """How neighbouring data sets differ."""
    epsilon: float
    """Epsilon of the member that was asked most, by all runs, failed attempts included."""
    budget: float | None
    """Epsilon that the jobs allow; None if they differ, or if it is one of each run alone."""
    delta: float
    """The smallest delta of the jobs; of the examples of devices, the sum."""
    runs: int
    """Number of runs that may have been charged."""
    counted: bool
    """Whether epsilon was counted here. False: a bound on what the devices have counted, who keep
    the account themselves."""

    @property
    def sentence(self) -> str:
        """The total in words."""
        of = "" if self.budget is None else f" of {self.budget:g}"
        most = "" if self.counted else "at most "
        return (
            f"epsilon {most}{self.epsilon:.4g}{of} at delta {self.delta:g} for one {self.unit} "
            f"({self.adjacency}), spent by all {self.runs} runs together"
        )


@dataclasses.dataclass(frozen=True)
class SharedRun:
    """One of the runs, before it begins."""

    job: Job
    devices: int
    """In the run; they have the same names in all of them."""


class SharedBudget:
    """One budget for runs that follow each other.

    Guarantees:
      * no device is asked for a round with which all runs together would exceed the budget of the
        job that asks it; the same is true of a datacenter's examples;
      * runs that would exceed it for certain are refused before the first of them.
    """

    def __init__(self, directory: Path, runs: Sequence[SharedRun]) -> None:
        """Prepare.

        Args:
            directory: has the directories of the runs, and gets that of the ledgers.
            runs: in the order in which they are trained.

        Raises:
            UserError: the runs name several populations.
        """
        self._runs = runs
        self.populations = Populations(directory / DIRECTORY, (directory,))
        """Where the runs are charged."""
        self._sections: dict[str, Sequence[PrivacySection | DatacenterPrivacy]] = {
            UNIT: [run.job.privacy for run in runs if run.job.privacy is not None],
            EXAMPLE: [
                run.job.datacenter.privacy for run in runs if run.job.datacenter.privacy is not None
            ],
        }
        for unit, sections in self._sections.items():
            key = "privacy" if unit == UNIT else "datacenter.privacy"
            if len(names := sorted({section.population for section in sections})) > 1:
                raise UserError(
                    f"{key}.population is {' and '.join(map(repr, names))}, and all runs have the "
                    "same data: what they spend adds up, so give them one"
                )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the ledgers open during the block, so that nothing else charges them.

        Raises:
            LedgerDamaged: one of them is older than what the runs have charged.
            UserError: another process has one open.
        """
        with contextlib.ExitStack() as opened:
            for section in self._first_sections:
                opened.enter_context(self.populations.ledger(section.population))
            yield

    @property
    def _first_sections(self) -> list[PrivacySection | DatacenterPrivacy]:
        return [sections[0] for sections in self._sections.values() if sections]

    # -- before the first run ----------------------------------------------------------------------

    def check(self) -> None:
        """Refuse runs that would exceed the budget for certain.

        What is certain is a lower bound: with a policy that decides, or a limit that may end a run
        early, nothing is, and runs end when the budget is spent.

        Raises:
            UserError: with the number of runs that fit.
        """
        if len(self._runs) < 2:
            return
        self._check("privacy", [_of_devices(run, n) for n, run in enumerate(self._runs)])
        self._check("datacenter.privacy", [_of_examples(run) for run in self._runs])

    def _check(self, key: str, planned: Sequence[Composition]) -> None:
        totals = []
        total = Composition()
        for each in planned:
            total = total.together_with(each)
            totals.append(total)
        # Runs with the same budget: what they have spent only grows, so few are computed.
        budgets: dict[tuple[float, float], list[int]] = {}
        for number, run in enumerate(self._runs):
            privacy = run.job.privacy if key == "privacy" else run.job.datacenter.privacy
            if privacy is not None:
                budgets.setdefault((privacy.epsilon, privacy.delta), []).append(number)
        exceeding: list[tuple[int, float, float]] = []
        for (epsilon, delta), numbers in budgets.items():

            def exceeds(number: int, epsilon: float = epsilon, delta: float = delta) -> bool:
                return totals[number].epsilon(delta) > epsilon

            first = bisect.bisect_left(numbers, True, key=exceeds)
            if first < len(numbers):
                exceeding.append((numbers[first], epsilon, delta))
        if not exceeding:
            return
        fits, epsilon, delta = min(exceeding)
        many = "none fits" if not fits else f"only the first {fits} fit" + "s" * (fits == 1)
        raise UserError(
            f"these {len(self._runs)} runs have the same data, and would spend epsilon "
            f"{totals[-1].epsilon(delta):.4g} of it together, at delta {delta:g}; the budget "
            f"({key}.epsilon) is {epsilon:g}, so {many}: train fewer runs, {self._advice(key)}; "
            f"or say --public-data, if the data are nobody's"
        )

    def _advice(self, key: str) -> str:
        """How the noise is made for all runs."""
        jobs = [run.job for run in self._runs]
        if key == "datacenter.privacy":
            found = [job.datacenter.privacy for job in jobs if job.datacenter.privacy is not None]
            if any(privacy.noise is not None for privacy in found):
                return "or raise datacenter.privacy.noise"
            steps = sum(
                privacy.steps or job.rounds * job.datacenter.steps
                for job, privacy in zip(jobs, found, strict=False)
            )
            return f"or have the noise made for all of them with datacenter.privacy.steps={steps}"
        plans = [NoisePlan.of_job(job) for job in jobs if job.privacy is not None]
        given = any(plan.privacy.noise is not None for plan in plans)
        if given or any(plan.correlated is not None for plan in plans):
            noise = max(plan.multiplier for plan in plans)
            return f"or raise privacy.noise, which is {noise:.4g} now"
        wanted = [f"privacy.participations={sum(plan.participations for plan in plans)}"]
        if measurements := sum(plan.measurements for plan in plans):
            wanted.append(f"privacy.measurements={measurements}")
        return f"or have the noise made for all of them with {' and '.join(wanted)}"

    # -- afterwards --------------------------------------------------------------------------------

    def spent(self) -> list[SpentTogether]:
        """What all runs have spent, by unit; `held` keeps the ledgers open meanwhile."""
        return [*self._spent(UNIT, ADJACENCY), *self._spent(EXAMPLE, ADD_OR_REMOVE), *self._bound()]

    def _spent(self, unit: str, adjacency: str) -> Iterator[SpentTogether]:
        sections = self._sections[unit]
        if not sections:
            return
        delta = min(section.delta for section in sections)
        budgets = {section.epsilon for section in sections}
        with self.populations.ledger(sections[0].population) as ledger:
            yield SpentTogether(
                unit=unit,
                adjacency=adjacency,
                epsilon=ledger.epsilon(sections[0].population, delta),
                budget=budgets.pop() if len(budgets) == 1 else None,
                delta=delta,
                runs=len(sections),
                counted=True,
            )

    def _bound(self) -> Iterator[SpentTogether]:
        """The bound on examples of devices: each run has a budget, and budgets add up."""
        found = [run.job.federated.privacy for run in self._runs]
        sections = [privacy for privacy in found if privacy is not None]
        if sections:
            yield SpentTogether(
                unit=f"{DEVICE_EXAMPLE} of a device",
                adjacency=ZERO_OUT,
                epsilon=sum(section.epsilon for section in sections),
                budget=None,
                delta=sum(section.delta for section in sections),
                runs=len(sections),
                counted=False,
            )


def _known_rounds(job: Job) -> tuple[int, int]:
    """Rounds with devices, and with the datacenter, that a run has for certain.

    Failed attempts take from the budget of a run, too, and are charged like rounds.
    """
    ends = (
        job.seconds,
        job.device_bytes,
        job.strategy.target_metric,
        job.evaluation.patience,
    )
    sides = _SIDES.get(job.strategy.policy)
    if sides is None or any(limit is not None for limit in ends):
        return 0, 0
    rounds = job.rounds
    if job.budget is not None:
        if all(sides):  # what both cost together depends on what is measured
            return 0, 0
        price = _most_of_a_round(job)
        rounds = min(rounds, math.floor(job.budget / price)) if price else rounds
    devices, datacenter = sides
    return math.floor(devices * rounds), math.ceil(datacenter * rounds)


def _most_of_a_round(job: Job) -> float:
    """The price of a round of devices alone, or of the datacenter alone."""
    prices = job.prices
    evaluation = job.evaluation.devices * prices.client_evaluation
    if job.strategy.policy == "federated":
        return job.federated.invited * prices.client_update + evaluation
    return job.datacenter.steps * prices.datacenter_step + evaluation


def _of_devices(run: SharedRun, number: int) -> Composition:
    """The least that a run charges the device that it asks most; `number` is that of the run."""
    job = run.job
    privacy = job.privacy
    rounds, _ = _known_rounds(job)
    spent = Composition()
    if privacy is None or not rounds or not run.devices:
        return spent
    plan = NoisePlan.of_job(job)
    # The mean over devices: the device that is asked most is asked as often or more.
    asked = rounds * min(job.federated.invited, run.devices) // run.devices
    if plan.correlated is not None:  # once for all rounds
        apart = min(privacy.separation, rounds) * min(job.federated.cohort, run.devices)
        if apart >= run.devices:
            spent = spent.plus(plan.event(str(number)))
    elif times := min(asked, plan.participations):
        spent = spent.plus(plan.event(str(number)), times)
    if job.evaluation.devices and plan.measurements:
        evaluated = -(-rounds // job.evaluation.every)
        each = evaluated * min(job.evaluation.devices, run.devices) // run.devices
        if times := min(each, plan.measurements):
            spent = spent.plus(plan.measuring_event, times)
    return spent


def _of_examples(run: SharedRun) -> Composition:
    """The least that a run charges the datacenter's examples."""
    plan = SampledNoisePlan.of(run.job)
    _, rounds = _known_rounds(run.job)
    if plan is None or not rounds:
        return Composition()
    return Composition().plus(plan.event(rounds * run.job.datacenter.steps))
