"""Compare variants of a job: policies, or other values of its keys, with the same devices."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.text import Text

from isthmus.errors import IsthmusError, JobError, TaskError, UserError
from isthmus.job import Job, with_changes
from isthmus.printable import in_a_line
from isthmus.task import load_task
from isthmus.task.measurements.bounded_means import evaluation_vector
from isthmus_server.budgets.populations import Populations
from isthmus_server.budgets.run_budgets import check_budgets
from isthmus_server.budgets.shared_budget import SharedBudget, SharedRun
from isthmus_server.read.pages.comparison_page import Curve, comparison_page
from isthmus_server.read.report.one_price import unequal_ends
from isthmus_server.read.report.report import format_metrics
from isthmus_server.rounds.measurements.followed_metrics import check_followed_metrics
from isthmus_server.runs.local.comparison_table import (
    OWN,
    comparison_table,
    metrics_of,
    statistics_of,
)
from isthmus_server.runs.local.variations import in_words
from isthmus_server.storage.records import FinalModel, RoundRecord
from isthmus_server.storage.run_description import FILE, RunDescription, is_simulated
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_server.strategy.loading import load_policy

log = logging.getLogger(__name__)

_LONGEST_NAME = 100
"""Bytes of the name of a variant's directory, without what makes it unique."""

Changes = Mapping[str, Any]
"""What a variant changes in the job, by key."""


class ComparedRuns(Protocol):
    """How the runs of a comparison are trained: with processes, or simulated."""

    simulated: bool
    """Whether they are simulated; the other kind of run in the directory is refused."""

    def needs(self, job: Job) -> str:
        """What the participants of a job depend on; jobs with the same can share them."""
        ...

    def devices(self, job: Job) -> int:
        """The number of devices of a job."""
        ...

    def participants(self, job: Job) -> AbstractAsyncContextManager[None]:
        """The participants of the following runs."""
        ...

    def create(self, directory: Path, job: Job, base: Path) -> Store:
        """A new run."""
        ...

    async def train(
        self, store: Store, populations: Populations | None
    ) -> tuple[RunState, FinalModel]:
        """Train a run to its end, and close it; `populations` is where all runs are charged."""
        ...

    def leave(self) -> None:
        """End `train` after the running round, or at once if there is none."""
        ...


class JobComparison:
    """Runs of variants of one job with several seeds, in a directory each.

    Every run is one that can be continued: the same comparison in the same directory skips runs
    that are finished, and continues the one that was interrupted. `comparison.html` in it has
    their curves.

    All runs have the same devices and datacenter, so they share one privacy budget.
    """

    def __init__(
        self,
        job: Job,
        base: Path,
        directory: Path,
        variants: Sequence[Changes],
        seeds: Sequence[int],
        runs: ComparedRuns,
        *,
        public_data: bool = False,
    ) -> None:
        """Prepare a comparison.

        Args:
            job: the job.
            base: where its relative paths start.
            directory: of the comparison.
            variants: what each changes in the job; all change the same keys.
            seeds: of the runs of each variant.
            runs: trains them.
            public_data: nobody's data are used, so each run has a privacy budget of its own.

        Raises:
            UserError: a variant is no valid job, or its policy cannot be used.
        """
        self.job = job
        self.base = base
        self.directory = directory
        self.variants = variants
        self.seeds = seeds
        self._jobs = [self._job_of(changes) for changes in variants]
        self._names = _directory_names(variants)
        self._runs = runs
        self._public_data = public_data
        self._ended_early: list[str] = []
        """Sentences about runs with a privacy budget that had fewer rounds than their job."""

    def _job_of(self, changes: Changes) -> Job:
        try:
            job = with_changes(self.job, dict(changes))
            check_budgets(job)
            self._check_policy(job)
        except JobError as error:
            raise JobError(f"with {in_words(changes)}: {error}") from None
        return job

    def _check_policy(self, job: Job) -> None:
        """Refuse a policy that cannot be used before another variant trains.

        A task that cannot be loaded is an error of the variant's runs, which leaves the others.

        Raises:
            JobError: it is unknown, has other settings, or follows a metric that no round has.
        """
        section = job.task
        vector = None
        try:
            task = load_task(
                section.source, section.settings, base=self.base, data=section.data_in(self.base)
            )
            if job.evaluation.devices:
                vector = evaluation_vector(job, task)
        except TaskError:
            if ":" not in job.strategy.policy:  # others may be in the folder of the task's file
                load_policy(job.strategy)
        else:
            check_followed_metrics(job, task, load_policy(job.strategy), vector)

    async def run(self, console: Console) -> dict[str, Any]:
        """Run the job in each variant and with each seed; print and return the results.

        Variants with the same participants use the same ones, one run after the other. A run that
        fails is among the results with the reason, and the others go on.

        Raises:
            UserError: the directory has other runs; or together they would exceed a privacy budget;
                or the first two runs failed in the same way, as all others would.
        """
        torch.set_num_threads(1)
        results: list[list[Mapping[str, Any]]] = [[] for _ in self.variants]
        groups = self._groups()
        for number, seed in itertools.product(range(len(self.variants)), self.seeds):
            self._check_existing(self._directory_of(number, seed), self._seeded(number, seed))
        budget = self._shared_budget(groups)
        populations = None if budget is None else budget.populations
        with contextlib.nullcontext() if budget is None else budget.held():
            for group in groups:
                async with self._runs.participants(self._jobs[group[0]]):
                    for seed in self.seeds:
                        for number in group:
                            results[number].append(await self._result(number, seed, populations))
                            told = self._progress(number, seed, results)
                            console.print(Text(told), soft_wrap=True)
                            self._check_first(results)
            spent = [] if budget is None else budget.spent()
        totals = [f"privacy: {each.sentence}" for each in spent]
        console.print(Text(self._title(), style="italic"), soft_wrap=True)
        console.print(comparison_table(self.variants, results), crop=False)
        for total in totals:  # not a caption of the table, which would be cut into its width
            console.print(Text(total), soft_wrap=True)
        for number, runs in enumerate(results):
            if short := self._what_ended_early(number, runs):
                console.print(Text(short), soft_wrap=True)
        if unequal := self._what_is_unequal(results):
            console.print(Text(unequal), soft_wrap=True)
        for sentence in self._ended_early:
            console.print(Text(sentence), soft_wrap=True)
        page = self.directory / "comparison.html"
        curves = list(self._curves(results))
        page.write_text(comparison_page(self.job.name, curves, totals), encoding="utf-8")
        console.print(Text(f"curves  {page}"), soft_wrap=True)
        return {
            "budget": self.job.budget,
            "seeds": len(self.seeds),
            "variants": [
                {"changes": dict(changes), "runs": runs, **statistics_of(runs)}
                for changes, runs in zip(self.variants, results, strict=True)
            ],
            "privacy": [each.to_json() for each in spent],
        }

    def _shared_budget(self, groups: Sequence[Sequence[int]]) -> SharedBudget | None:
        """The budget of all runs; None for data that are nobody's.

        Raises:
            UserError: together they would exceed it.
        """
        if self._public_data:
            return None
        order = (number for group in groups for _ in self.seeds for number in group)
        jobs = (self._jobs[number] for number in order)
        budget = SharedBudget(
            self.directory, [SharedRun(job, self._runs.devices(job)) for job in jobs]
        )
        budget.check()
        return budget

    def leave(self) -> None:
        """End `run` after the running round, or at once if there is none."""
        self._runs.leave()

    def _groups(self) -> list[list[int]]:
        """Numbers of the variants, by the participants that they need."""
        groups: dict[str, list[int]] = {}
        for number, job in enumerate(self._jobs):
            groups.setdefault(self._runs.needs(job), []).append(number)
        return list(groups.values())

    async def _result(
        self, number: int, seed: int, populations: Populations | None
    ) -> Mapping[str, Any]:
        """What a run ended with, or why it failed."""
        directory = self._directory_of(number, seed)
        job = self._seeded(number, seed)
        try:
            if (directory / FILE).exists():
                store = Store.open_to_continue(directory)
            else:
                store = self._runs.create(directory, job, self.base)
            state, final = await self._runs.train(store, populations)
        except Exception as error:  # a defect that one variant meets leaves the others' results
            log.debug("the run in %s failed", directory, exc_info=True)
            return {"seed": seed, "failed": _reason(error)}
        with contextlib.closing(Store.open(directory)) as store:
            stored = store.run_state()  # the one in memory has the time at which the run began
            _, reason, _ = store.status()
            private = store.is_private
        if private and not state.round:
            # Nothing was trained, as when other runs have spent the budget: its figures would be
            # those of the first model.
            return {"seed": seed, "failed": reason}
        if private and state.round < job.rounds:
            what = self._in_words(number, seed)
            self._ended_early.append(
                f"{what} ended after {state.round} of {job.rounds} rounds: {reason}"
            )
        return {
            "seed": seed,
            "rounds": state.round,
            "cost": state.spent,
            "seconds": stored.elapsed,
            "device_bytes": stored.device_bytes,
            **_named(final.metrics),
        }

    def _seeded(self, number: int, seed: int) -> Job:
        return with_changes(self._jobs[number], {"seed": seed})

    def _directory_of(self, number: int, seed: int) -> Path:
        return self.directory / f"{self._names[number]}-{seed}"

    def _check_existing(self, directory: Path, job: Job) -> None:
        """Refuse a directory whose run this comparison cannot continue.

        Raises:
            UserError: there is a run of another job, in another folder, or of the other kind.
        """
        if not (directory / FILE).exists():
            return
        found = RunDescription.read(directory)
        what = None
        if found.job.model_dump_json() != job.model_dump_json():
            what = "a run of another job"
        elif found.base != self.base:
            what = f"a run of a job in another folder, {found.base}"
        elif is_simulated(directory) != self._runs.simulated:
            what = "a run with real participants" if self._runs.simulated else "a simulated run"
        if what is not None:
            raise UserError(f"{directory} has {what}; give another directory with --run-dir")

    def _in_words(self, number: int, seed: int) -> str:
        return ", ".join(filter(None, (in_words(self.variants[number]), f"seed {seed}")))

    def _progress(
        self, number: int, seed: int, results: Sequence[Sequence[Mapping[str, Any]]]
    ) -> str:
        """A line about a finished run."""
        done = sum(map(len, results))
        result = results[number][-1]
        what = self._in_words(number, seed)
        if "failed" in result:
            end = f"{what} failed: {result['failed']}"
        else:
            end = f"{what}: {format_metrics(metrics_of(result))}"
        return in_a_line(f"run {done} of {len(self.variants) * len(self.seeds)}: {end}")

    def _check_first(self, results: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Refuse to go on when the first two runs failed in the same way.

        Raises:
            UserError: they did, as when the task has a mistake.
        """
        done = [run for runs in results for run in runs]
        planned = len(self.variants) * len(self.seeds)
        if len(done) != 2 or planned == 2 or not all("failed" in run for run in done):
            return
        first, second = (str(run["failed"]) for run in done)
        own = re.escape(str(self.directory.absolute())) + r"/[^/\s]+"  # of the run
        if re.sub(own, "", first) == re.sub(own, "", second):
            raise UserError(
                f"the first 2 of {planned} runs failed in the same way, so the others were not "
                f"tried: {first}"
            )

    def _what_ended_early(self, number: int, runs: Sequence[Mapping[str, Any]]) -> str:
        """A sentence if a policy's runs ended by `rounds` with budget for more; "" otherwise."""
        job = self._jobs[number]
        ended = [run for run in runs if "failed" not in run]
        if job.budget is None or not ended or "strategy.policy" not in self.variants[number]:
            return ""
        cost = statistics_of(ended)["means"]["cost"]
        affordable = job.budget >= cost * (1 + 1 / job.rounds)
        if not cost or not affordable or any(run["rounds"] < job.rounds for run in ended):
            return ""
        return (
            f"{in_words(self.variants[number])}: rounds={job.rounds} ended it at a cost of "
            f"{cost:.4g}; raise rounds to compare at the whole budget of {job.budget:g}"
        )

    def _what_is_unequal(self, results: Sequence[Sequence[Mapping[str, Any]]]) -> str:
        """What compares policies at one price that had no budget; "" if they ended at one."""
        budgets = [job.budget for job in self._jobs if job.budget is not None]
        if budgets or not any("strategy.policy" in changes for changes in self.variants):
            return ""
        means = [statistics_of(runs)["means"] for runs in results]
        ended = [each for each in means if each]
        return unequal_ends([each["cost"] for each in ended], [each["rounds"] for each in ended])

    def _curves(self, results: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[Curve]:
        """What was measured in each round of each run that has not failed."""
        for number, (changes, runs) in enumerate(zip(self.variants, results, strict=True)):
            name = in_words(changes) or self.job.name
            for result in runs:
                if "failed" in result:
                    continue
                directory = self._directory_of(number, result["seed"])
                with contextlib.closing(Store.open(directory)) as store:
                    rounds = {
                        record.round: dict(_named(record.metrics))
                        for record in store.attempts()
                        if isinstance(record, RoundRecord) and record.metrics
                    }
                yield Curve(number, name, result["seed"], changes, rounds, metrics_of(result))

    def _title(self) -> str:
        """What the figures are of: the models that the runs deliver, as `evaluation` says."""
        budget = None if "budget" in self.variants[0] else self.job.budget
        limit = f" for a budget of {budget:g}" if budget is not None else ""
        seeds = "one seed"
        if len(self.seeds) > 1:
            seeds = f"mean of {len(self.seeds)} seeds +- their standard deviation"
        return f"{self.job.name}: delivered models{limit}, {seeds}"


def _reason(error: Exception) -> str:
    """Why a run failed, in one sentence; the first error of several.

    >>> _reason(ExceptionGroup("unhandled errors in a TaskGroup", [KeyError("weight")]))
    "internal error: KeyError: 'weight'"
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, IsthmusError | OSError):
        return str(error)
    return f"internal error: {type(error).__name__}: {error}"


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """A task's metrics, renamed where the results have something else of that name.

    >>> _named({"accuracy": 0.5, "cost": 7.0})
    {'accuracy': 0.5, 'metric cost': 7.0}
    """
    return {f"metric {name}" if name in OWN else name: each for name, each in metrics.items()}


def _directory_names(variants: Sequence[Changes]) -> list[str]:
    """A name for each variant's directories: what it changes, as far as file names can say it.

    >>> _directory_names([{"x": "a b"}, {"x": "a?b"}, {"x": "c"}])
    ['x=a_b~1', 'x=a_b~2', 'x=c']
    """
    names = [re.sub(r"[^\w.,=+-]+", "_", in_words(changes)).strip("_") for changes in variants]
    folded = [name.casefold() for name in names]  # as some file systems take them
    unique = []
    for number, name in enumerate(names, 1):
        short = name.encode()[:_LONGEST_NAME].decode(errors="ignore")
        is_whole = short == name and folded.count(name.casefold()) == 1
        # No name of another variant has a tilde.
        unique.append(short or "job" if is_whole else f"{short}~{number}")
    return unique
