"""The same job under several policies, at the same cost, on the same devices and ranks."""

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
from isthmus_server.local.fork_server import ParticipantForkServer
from isthmus_server.local.session import participants
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

_UNLIMITED = 1_000_000
"""Rounds; what ends a run that is compared is its budget."""


async def compare_policies(
    job: Job,
    base: Path,
    directory: Path,
    policies: Sequence[str],
    seeds: int,
    console: Console,
    template: ParticipantForkServer,
) -> dict[str, Any]:
    """Run the job under each policy and seed; print and return what they reach.

    All runs share one set of processes, which open one run after the other.

    Raises:
        UserError: the job has no budget to compare at.
    """
    if job.budget is None:
        raise UserError("a comparison needs a budget: set one in the job, or --set budget=...")
    torch.set_num_threads(1)
    link = Link(job.time.lease_seconds)
    found: dict[str, list[Mapping[str, Any]]] = {policy: [] for policy in policies}
    async with participants(job, link, None, directory, template) as embedded:
        for seed in range(1, seeds + 1):
            for policy in policies:
                changes: dict[str, Any] = {"strategy.policy": policy, "seed": seed}
                if policy != job.strategy.policy:
                    changes["rounds"] = _UNLIMITED
                variant = with_changes(job, changes)
                store = Store.create(directory / f"{policy}-{seed}", variant, base)
                try:
                    coordinator = Coordinator(store, link)
                    embedded.on_gone = coordinator.roster.decline
                    final = await coordinator.run()
                    spent, rounds = coordinator.at.spent, coordinator.at.round
                finally:
                    store.close()
                found[policy].append({"rounds": rounds, "cost": spent, **final.metrics})
    console.print(_table(job, found), soft_wrap=False)
    return {"budget": job.budget, "seeds": seeds, "policies": found}


def _table(job: Job, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    seeds = len(next(iter(found.values())))
    table = Table(
        title=f"{job.name}: what a budget of {job.budget:g} buys, mean of {seeds} seeds",
        title_justify="left",
    )
    names = [name for name in next(iter(found.values()))[0] if name not in ("rounds", "cost")]
    for column in ("policy", "rounds", "cost", *names):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy, rows in found.items():
        cells = [f"{statistics.mean(row[name] for row in rows):.4g}" for name in names]
        table.add_row(
            policy,
            f"{statistics.mean(row['rounds'] for row in rows):.1f}",
            f"{statistics.mean(row['cost'] for row in rows):.1f}",
            *cells,
        )
    return table
