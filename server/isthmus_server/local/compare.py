"""Compare variants of a job: policies, or other values of its keys, with the same devices."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from isthmus.errors import JobError, UserError
from isthmus.job import Job, with_changes
from isthmus.wire import link_pb2
from isthmus_server.local.fork_server import ParticipantForkServer
from isthmus_server.local.processes import participant_commands
from isthmus_server.local.session import running_participants
from isthmus_server.local.variations import in_words, value_text
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.store import Store
from isthmus_server.strategy.loading import check_participants, load_policy
from isthmus_server.transport.link import Link

_UNLIMITED = 1_000_000
"""Maximum number of rounds of a run under another policy, which ends when its budget is used up."""

_LONGEST_NAME = 100
"""Characters of a variant's directory."""

Changes = Mapping[str, Any]
"""What a variant changes in the job, by key."""


class JobComparison:
    """Runs of variants of one job with several seeds, in a directory each.

    Every run is one that can be continued: the same comparison in the same directory skips runs
    that are finished, and continues the one that was interrupted.
    """

    def __init__(
        self, job: Job, base: Path, directory: Path, variants: Sequence[Changes], seeds: int
    ) -> None:
        """Prepare a comparison.

        Args:
            job: the job.
            base: where its relative paths start.
            directory: of the comparison.
            variants: what each changes in the job; all change the same keys.
            seeds: runs of each variant.

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
        self._coordinator: Coordinator | None = None
        self._leaving = False

    def _job_of(self, changes: Changes) -> Job:
        all_changes = dict(changes)
        policy = changes.get("strategy.policy", self.job.strategy.policy)
        if policy != self.job.strategy.policy:
            all_changes.setdefault("rounds", _UNLIMITED)
        try:
            job = with_changes(self.job, all_changes)
        except JobError as error:
            raise JobError(f"with {in_words(changes)}: {error}") from None
        if job.budget is None and "strategy.policy" in changes:
            raise UserError(
                "a comparison of policies needs a budget: set one in the job, or --set budget=..."
            )
        return job

    async def run(self, console: Console, fork_server: ParticipantForkServer) -> dict[str, Any]:
        """Run the job in each variant and with each seed; print and return the results.

        Variants with the same participants use the same processes, one run after the other.

        Raises:
            UserError: the directory has runs of another job.
        """
        torch.set_num_threads(1)
        results: list[list[Mapping[str, Any]]] = [[] for _ in self.variants]
        for group in self._by_processes():
            job = self._jobs[group[0]]
            link = Link(job.time.lease_seconds)
            async with running_participants(
                job, link, None, self.directory, fork_server, self._decline
            ):
                for seed in range(1, self.seeds + 1):
                    for number in group:
                        results[number].append(await self._run_one(number, seed, link))
        console.print(self._table(results), soft_wrap=False)
        return {
            "budget": self.job.budget,
            "seeds": self.seeds,
            "variants": [
                {"changes": dict(changes), "runs": runs}
                for changes, runs in zip(self.variants, results, strict=True)
            ],
        }

    def leave(self) -> None:
        """End `run` after the running round, or at once if there is none."""
        self._leaving = True
        if self._coordinator is not None:
            self._coordinator.drain.request()

    def _by_processes(self) -> list[list[int]]:
        """Numbers of the variants, by the processes that their participants need."""
        groups: dict[str, list[int]] = {}
        for number, job in enumerate(self._jobs):
            needed = (participant_commands(job, "", self.directory), job.time.lease_seconds)
            groups.setdefault(repr(needed), []).append(number)
        return list(groups.values())

    async def _run_one(self, number: int, seed: int, link: Link) -> Mapping[str, Any]:
        job = with_changes(self._jobs[number], {"seed": seed})
        with contextlib.closing(self._open(f"{self._names[number]}-{seed}", job)) as store:
            with store.locked():
                coordinator = self._coordinator = Coordinator(store, link)
                check_participants(store.job, load_policy(store.job.strategy))
                if self._leaving:
                    coordinator.drain.request()
                final = await coordinator.run()
            state = coordinator.state
            return {"rounds": state.round, "cost": state.spent, **final.metrics}

    def _open(self, name: str, job: Job) -> Store:
        directory = self.directory / name
        if not (directory / "job.json").exists():
            return Store.create(directory, job, self.base)
        store = Store.open_to_continue(directory)
        if store.job != job:
            store.close()
            raise UserError(
                f"{directory} has a run of another job; give another directory with --run-dir"
            )
        return store

    def _decline(self, name: str, role: link_pb2.Role, reason: str) -> None:
        """Report a failed process to the run in progress; processes outlive runs."""
        if self._coordinator is not None:
            self._coordinator.roster.decline(name, role, reason)

    def _table(self, results: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
        """A row for each variant: its changes, and the means of its runs."""
        job = self.job
        limit = f" for a budget of {job.budget:g}" if job.budget is not None else ""
        table = Table(
            title=f"{job.name}: results{limit}, "
            + (f"mean of {self.seeds} seeds" if self.seeds > 1 else "one seed"),
            title_justify="left",
        )
        keys = list(self.variants[0])
        metrics = dict.fromkeys(name for runs in results for row in runs for name in row)
        names = [name for name in metrics if name not in ("rounds", "cost")]
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


def _directory_names(variants: Sequence[Changes]) -> list[str]:
    """A name for each variant's directories: what it changes, as far as file names can say it."""
    names = [re.sub(r"[^\w.,=+-]+", "_", in_words(changes)) or "job" for changes in variants]
    return [
        name
        if names.count(name) == 1 and len(name) <= _LONGEST_NAME
        else f"{name[:_LONGEST_NAME]}_{number}"
        for number, name in enumerate(names, 1)
    ]
