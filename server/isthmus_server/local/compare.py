"""Compare policies: run the same job under each, at the same budget and with the same devices."""

from __future__ import annotations

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
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

_UNLIMITED = 1_000_000
"""Maximum number of rounds of a compared run, which ends when its budget is used up."""


async def compare_policies(
    job: Job,
    base: Path,
    directory: Path,
    policies: Sequence[str],
    seeds: int,
    console: Console,
    fork_server: ParticipantForkServer,
) -> dict[str, Any]:
    """Run the job under each policy and seed; print and return the results.

    All runs use the same processes, one run after the other.

    Raises:
        UserError: the job has no budget to compare at.
    """
    if job.budget is None:
        raise UserError("a comparison needs a budget: set one in the job, or --set budget=...")
    torch.set_num_threads(1)
    link = Link(job.time.lease_seconds)
    results: dict[str, list[Mapping[str, Any]]] = {policy: [] for policy in policies}
    current = _CurrentRoster()
    async with running_participants(job, link, None, directory, fork_server, current.decline):
        for seed in range(1, seeds + 1):
            for policy in policies:
                changes: dict[str, Any] = {"strategy.policy": policy, "seed": seed}
                if policy != job.strategy.policy:
                    changes["rounds"] = _UNLIMITED
                variant = with_changes(job, changes)
                store = Store.create(directory / f"{policy}-{seed}", variant, base)
                try:
                    coordinator = Coordinator(store, link)
                    current.roster = coordinator.roster
                    final = await coordinator.run()
                    spent, rounds = coordinator.state.spent, coordinator.state.round
                finally:
                    store.close()
                results[policy].append({"rounds": rounds, "cost": spent, **final.metrics})
    console.print(_table(job, results), soft_wrap=False)
    return {"budget": job.budget, "seeds": seeds, "policies": results}


class _CurrentRoster:
    """Reports failed processes to the roster of the run in progress; processes outlive runs."""

    def __init__(self) -> None:
        self.roster: ParticipantRoster | None = None

    def decline(self, name: str, role: link_pb2.Role, reason: str) -> None:
        if self.roster is not None:
            self.roster.decline(name, role, reason)


def _table(job: Job, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    seeds = len(next(iter(results.values())))
    table = Table(
        title=f"{job.name}: results for a budget of {job.budget:g}, mean of {seeds} seeds",
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
