"""What attempts that fail add to the price of a round of devices, on average."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

from isthmus.job import Job
from isthmus_server.plan.seconds_of_rounds import NORMAL_NINETY

MOST_FAILING = 0.5
"""Share of attempts that fail from which on a run may well end by it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailedAttempts:
    """Attempts at rounds of devices that too few devices answered."""

    price: float
    """What they add to the price of a committed round, on average."""
    off: float
    """Standard deviation of that mean, by how many attempts are known; 0 if it is computed."""
    how: str
    """How it was obtained, a clause."""

    @classmethod
    def of_timed(cls, prices: Sequence[float], rounds: int) -> Self:
        """The mean of timed rounds.

        Args:
            prices: of the attempts that failed.
            rounds: that were committed.
        """
        attempts = rounds + len(prices)
        count = len(prices) or "none"
        each = sum(prices) / len(prices) if prices else 0.0
        return cls(
            price=sum(prices) / rounds,
            off=each * math.sqrt(len(prices)) / rounds,
            how=f"{count} of {attempts} timed attempts failed",
        )

    def off_from(self, other: FailedAttempts) -> float:
        """By how much two such means may differ by chance, in nine of ten cases."""
        return NORMAL_NINETY * math.hypot(self.off, other.off)

    @classmethod
    def by_dropout(cls, job: Job) -> Self | None:
        """What follows from the share of requests during which a device is lost.

        None if the job has no such share, or it alone does not say how rounds end: most attempts
        fail, so that a run may end by it, a buffer waits for other devices, groups of devices have
        quorums of their own, or those that were lost may be missing in later rounds.
        """
        lost = job.simulation.dropout
        federated = job.federated
        has_groups = federated.robust is not None or federated.groups is not None
        if not lost or federated.mode != "rounds" or has_groups:
            return None
        invited = federated.invited
        population = job.simulation.clients or federated.clients
        # How long a device is away is known, and not how long rounds are: perhaps for all of them.
        if 0 < population < invited * (1 + lost * job.rounds):
            return None
        failing = sum(
            math.comb(invited, count) * (1 - lost) ** count * lost ** (invited - count)
            for count in range(federated.needed)
        )
        if failing >= MOST_FAILING:
            return None
        return cls(
            price=failing / (1 - failing) * invited * job.prices.client_update,
            off=0.0,
            how=f"by simulation.dropout={lost:g}, {failing:.2g} of attempts fail",
        )
