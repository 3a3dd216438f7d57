"""Compare variants of a job: policies, or other values of its keys, with the same devices."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from isthmus.errors import JobError, UserError
from isthmus.job import Job, with_changes
from isthmus_server.local.variations import in_words, value_text
from isthmus_server.privacy.run_budgets import check_budgets
from isthmus_server.storage.records import FinalModel, RoundRecord
from isthmus_server.storage.run_state import RunState
from isthmus_server.storage.store import Store
from isthmus_server.views.html_report.comparison_page import Curve, comparison_page
from isthmus_server.views.report import format_metrics

_UNLIMITED = 1_000_000
"""Maximum number of rounds of a run under another policy, which ends when its budget is used up."""

_LONGEST_NAME = 100
"""Characters of a variant's directory."""

_OWN = ("seed", "rounds", "cost")
"""Keys of a run's results that are not metrics of the task."""

Changes = Mapping[str, Any]
"""What a variant changes in the job, by key."""


class ComparedRuns(Protocol):
    """How the runs of a comparison are trained: with processes, or simulated."""

    def needs(self, job: Job) -> str:
        """What the participants of a job depend on; jobs with the same can share them."""
        ...

    def participants(self, job: Job) -> AbstractAsyncContextManager[None]:
        """The participants of the following runs."""
        ...

    def create(self, directory: Path, job: Job, base: Path) -> Store:
        """A new run."""
        ...

    async def train(self, store: Store) -> tuple[RunState, FinalModel]:
        """Train a run to its end, and close it."""
        ...

    def leave(self) -> None:
        """End `train` after the running round, or at once if there is none."""
        ...


class JobComparison:
    """Runs of variants of one job with several seeds, in a directory each.

    Every run is one that can be continued: the same comparison in the same directory skips runs
    that are finished, and continues the one that was interrupted. `comparison.html` in it has
    their curves.
    """

    def __init__(
        self,
        job: Job,
        base: Path,
        directory: Path,
        variants: Sequence[Changes],
        seeds: Sequence[int],
        runs: ComparedRuns,
    ) -> None:
        """Prepare a comparison.

        Args:
            job: the job.
            base: where its relative paths start.
            directory: of the comparison.
            variants: what each changes in the job; all change the same keys.
            seeds: of the runs of each variant.
            runs: trains them.

        Raises:
            UserError: a variant is no valid job, or there is no budget to compare policies at.
        """
        self.job = job
        self.base = base
        self.directory = directory
        self.variants = variants
        self.seeds = seeds
        self._jobs = [self._job_of(changes) for changes in variants]
        self._names = _directory_names(variants)
        self._runs = runs

    def _job_of(self, changes: Changes) -> Job:
        all_changes = dict(changes)
        policy = changes.get("strategy.policy", self.job.strategy.policy)
        if policy != self.job.strategy.policy:
            all_changes.setdefault("rounds", _UNLIMITED)
        try:
            job = with_changes(self.job, all_changes)
            check_budgets(job)
        except JobError as error:
            raise JobError(f"with {in_words(changes)}: {error}") from None
        if job.budget is None and "strategy.policy" in changes:
            raise UserError(
                "a comparison of policies needs a budget: set one in the job, or --set budget=..."
            )
        return job

    async def run(self, console: Console) -> dict[str, Any]:
        """Run the job in each variant and with each seed; print and return the results.

        Variants with the same participants use the same ones, one run after the other.

        Raises:
            UserError: the directory has runs of another job.
        """
        torch.set_num_threads(1)
        results: list[list[Mapping[str, Any]]] = [[] for _ in self.variants]
        for group in self._groups():
            async with self._runs.participants(self._jobs[group[0]]):
                for seed in self.seeds:
                    for number in group:
                        result = await self._run_one(number, seed)
                        results[number].append(result)
                        console.print(self._progress(number, seed, results), soft_wrap=True)
        console.print(self._table(results), soft_wrap=False)
        page = self.directory / "comparison.html"
        page.write_text(comparison_page(self.job.name, list(self._curves())), encoding="utf-8")
        console.print(f"curves  {page}", soft_wrap=True)
        return {
            "budget": self.job.budget,
            "seeds": len(self.seeds),
            "variants": [
                {"changes": dict(changes), "runs": runs}
                for changes, runs in zip(self.variants, results, strict=True)
            ],
        }

    def leave(self) -> None:
        """End `run` after the running round, or at once if there is none."""
        self._runs.leave()

    def _groups(self) -> list[list[int]]:
        """Numbers of the variants, by the participants that they need."""
        groups: dict[str, list[int]] = {}
        for number, job in enumerate(self._jobs):
            groups.setdefault(self._runs.needs(job), []).append(number)
        return list(groups.values())

    async def _run_one(self, number: int, seed: int) -> Mapping[str, Any]:
        job = with_changes(self._jobs[number], {"seed": seed})
        state, final = await self._runs.train(self._open(self._directory_of(number, seed), job))
        return {"seed": seed, "rounds": state.round, "cost": state.spent, **_named(final.metrics)}

    def _directory_of(self, number: int, seed: int) -> Path:
        return self.directory / f"{self._names[number]}-{seed}"

    def _open(self, directory: Path, job: Job) -> Store:
        if not (directory / "job.json").exists():
            return self._runs.create(directory, job, self.base)
        store = Store.open_to_continue(directory)
        if store.job != job:
            store.close()
            raise UserError(
                f"{directory} has a run of another job; give another directory with --run-dir"
            )
        return store

    def _progress(
        self, number: int, seed: int, results: Sequence[Sequence[Mapping[str, Any]]]
    ) -> str:
        """A line about a finished run."""
        done, result = sum(map(len, results)), results[number][-1]
        metrics = {key: value for key, value in result.items() if key not in _OWN}
        what = ", ".join(filter(None, (in_words(self.variants[number]), f"seed {seed}")))
        runs = len(self.variants) * len(self.seeds)
        return f"run {done} of {runs}: {what}: {format_metrics(metrics)}"

    def _curves(self) -> Iterator[Curve]:
        """What was measured in each round of each run."""
        for number, changes in enumerate(self.variants):
            for seed in self.seeds:
                with contextlib.closing(Store.open(self._directory_of(number, seed))) as store:
                    rounds = {
                        record.round: dict(record.metrics)
                        for record in store.attempts()
                        if isinstance(record, RoundRecord) and record.metrics
                    }
                yield Curve(in_words(changes) or self.job.name, seed, changes, rounds)

    def _table(self, results: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
        """A row for each variant: its changes, and the means of its runs."""
        job = self.job
        limit = f" for a budget of {job.budget:g}" if job.budget is not None else ""
        table = Table(
            title=f"{job.name}: results{limit}, "
            + (f"mean of {len(self.seeds)} seeds" if len(self.seeds) > 1 else "one seed"),
            title_justify="left",
        )
        keys = list(self.variants[0])
        metrics = dict.fromkeys(name for runs in results for row in runs for name in row)
        names = [name for name in metrics if name not in _OWN]
        for key in keys:
            table.add_column("policy" if key == "strategy.policy" else key, overflow="fold")
        for column in ("rounds", "cost", *names):
            table.add_column(column, justify="right")
        for changes, runs in zip(self.variants, results, strict=True):
            cells = [
                f"{statistics.mean(row[name] for row in runs):.4g}"
                if all(name in row for row in runs)
                else "-"
                for name in names
            ]
            table.add_row(
                *(value_text(changes[key]) for key in keys),
                f"{statistics.mean(row['rounds'] for row in runs):.1f}",
                f"{statistics.mean(row['cost'] for row in runs):.1f}",
                *cells,
            )
        return table


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """A task's metrics, renamed where the results have something else of that name.

    >>> _named({"accuracy": 0.5, "cost": 7.0})
    {'accuracy': 0.5, 'metric cost': 7.0}
    """
    return {f"metric {name}" if name in _OWN else name: each for name, each in metrics.items()}


def _directory_names(variants: Sequence[Changes]) -> list[str]:
    """A name for each variant's directories: what it changes, as far as file names can say it."""
    names = [re.sub(r"[^\w.,=+-]+", "_", in_words(changes)) or "job" for changes in variants]
    return [
        name
        if names.count(name) == 1 and len(name) <= _LONGEST_NAME
        else f"{name[:_LONGEST_NAME]}_{number}"
        for number, name in enumerate(names, 1)
    ]
