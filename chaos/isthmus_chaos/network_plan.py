"""The faults of what a fleet past one process has, and jobs with a round of each kind.

Nothing here imports what the processes of a deployment are made of.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.schema import with_changes
from isthmus_chaos.plan import CUT, HALF_OPEN, KILL, MIRROR, SERVER, STOP, aggregator_names

AGGREGATORS = 2
"""How many the deployment has."""
BUFFERED = "buffered"
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"federated.secure_aggregation": False},
    "secure": {"federated.secure_aggregation": True},
    "encoded": {"federated.secure_aggregation": False, "federated.codec": "rounded"},
    "compressed": {"federated.secure_aggregation": True, "federated.compression": {"bits": 4}},
    BUFFERED: {"federated.secure_aggregation": False, "federated.mode": "buffered"},
}
"""What makes a job one of each kind of round."""
REPEATABLE = frozenset({"plain", "secure", "encoded"})
"""Kinds whose model has the SHA-256 of a run without faults, as long as the same devices are in
each round: not buffered ones, and not those in which devices keep what they have not sent."""
AGGREGATOR = "aggregator"
FAULTS = (
    (AGGREGATOR, KILL),
    (AGGREGATOR, CUT),
    (AGGREGATOR, HALF_OPEN),
    (SERVER, KILL),
    (SERVER, STOP),
    (MIRROR, CUT),
    (MIRROR, HALF_OPEN),
)
"""What happens to what: an aggregator is killed, or its way to the server is cut or carries
nothing; the server that serves is killed, or stopped until its standby has taken over; the ways of
all devices to the mirror are cut or carry nothing."""


def rounds_with_aggregators(job: Job) -> Job:
    """The job with federated rounds of all its devices, which fail without one of them.

    Raises:
        UserError: it has fewer devices than aggregators need.
        JobError: some of its keys exclude a kind of round.
    """
    devices = job.federated.clients
    if devices < 2 * AGGREGATORS:
        raise UserError(
            f"--network has {AGGREGATORS} aggregators with two devices or more each; give "
            f"--clients {2 * AGGREGATORS}"
        )
    changes: dict[str, Any] = {
        "strategy.policy": "federated",
        "strategy.schedule": [],
        "datacenter.ranks": 0,
        "federated.cohort": devices,
        "federated.quorum": devices,
    }
    if job.budget is not None:  # failed attempts spend it, and would cost a job some rounds
        changes["budget"] = 1e9
    changed = with_changes(job, changes)
    for kind in KINDS:
        of_kind(changed, kind)
    return changed


def of_kind(job: Job, kind: str) -> Job:
    """A job of `rounds_with_aggregators` with rounds of one kind."""
    changes = dict(KINDS[kind])
    if kind == BUFFERED:
        changes["federated.cohort"] = job.federated.cohort // 2
        changes["federated.quorum"] = None
        changes["federated.buffer"] = {"concurrency": job.federated.cohort}
    return with_changes(job, changes)


@dataclasses.dataclass(frozen=True)
class NetworkFault:
    """A fault in a round of a kind."""

    kind: str
    """Key of `KINDS`: what kind of round it is in."""
    what: str
    """The second part of one of `FAULTS`."""
    target: str
    """`server` is the one that serves then, perhaps the standby."""

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.what:<9} {self.target}"


def faults_of(seed: int, sample: int | None) -> list[NetworkFault]:
    """Each fault in each kind of round, or `sample` of them.

    >>> len(faults_of(1, None)), faults_of(1, 2) == faults_of(1, 2)
    (35, True)
    """
    draw = random.Random(f"isthmus/network/{seed}")  # noqa: S311 - repeatable, not secret
    names = aggregator_names(AGGREGATORS)
    every = [
        NetworkFault(kind, what, draw.choice(names) if part == AGGREGATOR else part)
        for kind in KINDS
        for part, what in FAULTS
    ]
    if sample is None or sample >= len(every):
        return every
    drawn = set(draw.sample(range(len(every)), sample))
    return [fault for number, fault in enumerate(every) if number in drawn]
