"""Compare policies: run the same job under each, at the same budget and with the same devices."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from isthmus.errors import UserError
from isthmus.job import Job, with_changes
from isthmus.wire import link_pb2
from isthmus_server.local.fork_server import ParticipantForkServer
from isthmus_server.local.session import running_participants
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.store import Store
from isthmus_server.strategy.loading import check_participants, load_policy
from isthmus_server.transport.link import Link

_UNLIMITED = 1_000_000
"""Maximum number of rounds of a compared run, which ends when its budget is used up."""


class PolicyComparison:
    """Runs of one job under several policies and seeds, in a directory each.

    Every run is one that can be continued: the same comparison in the same directory skips runs
    that are finished, and continues the one that was interrupted.
    """

    def __init__(
        self, job: Job, base: Path, directory: Path, policies: Sequence[str], seeds: int
    ) -> None:
        """Prepare a comparison.

        Raises:
            UserError: the job has no budget to compare at.
        """
        if job.budget is None:
            raise UserError("a comparison needs a budget: set one in the job, or --set budget=...")
        self.job = job
        self.base = base
        self.directory = directory
        self.policies = policies
        self.seeds = seeds
        self._coordinator: Coordinator | None = None
        self._leaving = False

    async def run(self, console: Console, fork_server: ParticipantForkServer) -> dict[str, Any]:
        """Run the job under each policy and seed; print and return the results.

        All runs use the same processes, one run after the other.

        Raises:
            UserError: the directory has runs of another job.
        """
        torch.set_num_threads(1)
        job, link = self.job, Link(self.job.time.lease_seconds)
        results: dict[str, list[Mapping[str, Any]]] = {policy: [] for policy in self.policies}
        async with running_participants(
            job, link, None, self.directory, fork_server, self._decline
        ):
            for seed in range(1, self.seeds + 1):
                for policy in self.policies:
                    results[policy].append(await self._run_one(policy, seed, link))
        console.print(_table(job, results), soft_wrap=False)
        return {"budget": job.budget, "seeds": self.seeds, "policies": results}

    def leave(self) -> None:
        """End `run` after the running round, or at once if there is none."""
        self._leaving = True
        if self._coordinator is not None:
            self._coordinator.drain.request()

    async def _run_one(self, policy: str, seed: int, link: Link) -> Mapping[str, Any]:
        changes: dict[str, Any] = {"strategy.policy": policy, "seed": seed}
        if policy != self.job.strategy.policy:
            changes["rounds"] = _UNLIMITED
        with contextlib.closing(self._open(f"{policy}-{seed}", changes)) as store, store.locked():
            coordinator = self._coordinator = Coordinator(store, link)
            check_participants(store.job, load_policy(store.job.strategy))
            if self._leaving:
                coordinator.drain.request()
            final = await coordinator.run()
            state = coordinator.state
            return {"rounds": state.round, "cost": state.spent, **final.metrics}

    def _open(self, name: str, changes: Mapping[str, Any]) -> Store:
        directory, variant = self.directory / name, with_changes(self.job, changes)
        if not (directory / "job.json").exists():
            return Store.create(directory, variant, self.base)
        store = Store.open_to_continue(directory)
        if store.job != variant:
            store.close()
            raise UserError(
                f"{directory} has a run of another job; give another directory with --run-dir"
            )
        return store

    def _decline(self, name: str, role: link_pb2.Role, reason: str) -> None:
        """Report a failed process to the run in progress; processes outlive runs."""
        if self._coordinator is not None:
            self._coordinator.roster.decline(name, role, reason)


def _table(job: Job, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    seeds = len(next(iter(results.values())))
    table = Table(
        title=f"{job.name}: results for a budget of {job.budget:g}, "
        + (f"mean of {seeds} seeds" if seeds > 1 else "one seed"),
        title_justify="left",
    )
    names = [name for name in next(iter(results.values()))[0] if name not in ("rounds", "cost")]
    for column in ("policy", "rounds", "cost", *names):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy, rows in results.items():
        cells = [f"{statistics.mean(row[name] for row in rows):.4g}" for name in names]
        table.add_row(
            policy,
            f"{statistics.mean(row['rounds'] for row in rows):.1f}",
            f"{statistics.mean(row['cost'] for row in rows):.1f}",
            *cells,
        )
    return table
