"""Canary devices in a simulated run, for a job that protects devices.

A canary is asked like any other device. Its task returns an update that is longer than the clipping
bound, in a direction of its own, or zeros, by the toss of a coin. With noise that is independent in
each round, its sign changes from one time to the next: noise that repeats itself is subtracted.
Everything else is the product's: selection, charges, clipping, encoding, noise and the sum. The
auditor sees what is released, the mean of each round with its noise, knows who was asked and what
all other devices contributed, and guesses each coin.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isthmus.errors import JobError, UserError
from isthmus.job import Job, with_changes
from isthmus.job.federated import MAX_SECURE_COHORT
from isthmus.task import Participant
from isthmus.transport.blobs import Buffer
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.task_host import TrainingResult
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.clipping import norm_of
from isthmus_server.regimes.base import AttemptSpec, FederatedResult
from isthmus_server.regimes.federated import updates_in
from isthmus_simulation.audit.directions import SpreadDirections
from isthmus_simulation.devices.device import MadeUpHost, VirtualHost
from isthmus_simulation.devices.fleet import VirtualFleet
from isthmus_simulation.run import Simulation

if TYPE_CHECKING:
    from isthmus_server.rounds.run_parts import RunParts

OVER = 4.0
"""How many times longer than the clipping bound a canary is before it is clipped."""
_LARGEST_ELEMENT = 0.9
"""Largest element of an update before it is clipped, over the bound: an update with a larger one
may be refused with the sum."""
_LEAST_NOISE = 1 / 16
"""Least noise of a round, as a part of that of the round with most: less is not told apart."""
_LESS_NOISE = 0.5
"""Noise of a round, as a part of the same, from which on it is not weighted by its noise."""
MEMORY = 2 << 30
"""Bytes of the updates of a run's canaries."""
_ROUNDED = 1.001
"""Factor by which an epsilon may be above the one that it is compared with, for rounding."""


def exceeds(epsilon: float, allowed: float) -> bool:
    """Whether an epsilon is above another one by more than rounding.

    >>> exceeds(8.1, 8.0), exceeds(8.000001, 8.0)
    (True, False)
    """
    return epsilon > allowed * _ROUNDED


@dataclasses.dataclass(frozen=True)
class Undercharge:
    """A charge that is too small."""

    charged: float
    """The epsilon that a ledger or an account has."""
    due: float
    """The epsilon of what it was charged for."""

    @classmethod
    def of(cls, charged: float, due: float) -> Undercharge | None:
        """The charge, if it is too small."""
        return cls(charged, due) if exceeds(due, charged) else None

    @classmethod
    def worst(cls, found: Iterable[Undercharge | None]) -> Undercharge | None:
        """The one with which most is missing; None if there is none."""
        too_small = [each for each in found if each is not None]
        return max(too_small, key=lambda each: each.due - each.charged, default=None)


@dataclasses.dataclass(frozen=True)
class Guesses:
    """The guesses of one run or several."""

    right: int
    """Guesses that were right."""
    made: int
    """All guesses."""
    shares: Mapping[float, int]
    """Number of guesses by the share of the claimed participations that the canary had, see
    `auditing.Shares`."""

    def plus(self, other: Guesses) -> Guesses:
        """The guesses of both."""
        shares = Counter(self.shares)
        shares.update(other.shares)
        return Guesses(self.right + other.right, self.made + other.made, shares)


class DeviceCanaries:
    """The canaries of one run, and what is seen of them.

    Shape legend: M = canaries, T = rounds whose mean was released.
    """

    def __init__(
        self, own: int, directions: SpreadDirections, present: torch.Tensor, *, alternate: bool
    ) -> None:
        """Set up.

        Args:
            own: number of the other devices, before which canaries are not numbered.
            directions: M of them.
            present: whether each canary contributes its update, bool (M).
            alternate: whether its sign changes from one time to the next.
        """
        self.own = own
        self.directions = directions
        self.present = present
        self.over = max(1.0, min(OVER, _LARGEST_ELEMENT / directions.largest))
        """How many times longer than the bound an update is."""
        self._alternate = alternate
        self._attempts: dict[int, tuple[int, int]] = {}
        """The round and the attempt at it for which each canary was asked last."""
        self._signs = torch.full((directions.count,), -1.0 if alternate else 1.0)
        """Sign of the update that each canary sent last, (M)."""
        self.clip: Callable[[], float]
        """Bound on the norm of an update in the running round; set by `DeviceAudit._watch`, which
        has the budget of the run."""
        self.row: Callable[[], int]
        """Row of the running round's noise; set by `DeviceAudit._watch`, too."""
        self._others: dict[tuple[int, int], dict[str, tuple[float, torch.Tensor]]] = {}
        """By round and attempt: the norm of each other device's update and its parts (M)."""
        self._rows: list[int] = []
        self._seen: list[torch.Tensor] = []
        """The part of each released sum in each direction, over the bound, float64 (M)."""
        self._asked: list[torch.Tensor] = []
        """The sign with which each canary was in it, 0 if it was not, float64 (M)."""

    def update(self, index: int, work: link_pb2.TrainLocal) -> torch.Tensor:
        """What the device with a number sends, before it is clipped; float32 (N)."""
        number = index - self.own
        attempt = work.round, work.attempt
        if self._alternate and self._attempts.get(number) != attempt:
            self._attempts[number] = attempt
            self._signs[number] *= -1
        length = self.over * self.clip() if self.present[number] else 0.0
        return self.directions.vector(number).mul_(length * float(self._signs[number]))

    def note_other(self, work: link_pb2.TrainLocal, name: str, update: torch.Tensor) -> None:
        """Remember what another device sends, which is known to the worst adversary."""
        parts = self.directions.of_all(update)
        of_attempt = self._others.setdefault((work.round, work.attempt), {})
        of_attempt[name] = (norm_of(update), parts)

    def watch(self, spec: AttemptSpec, result: FederatedResult) -> None:
        """See the mean of a round with its noise."""
        names = {each.participant for each in result.receipts if each.status == "accepted"}
        seen = updates_in(result) * self.directions.of_all(result.pseudo_gradient)
        clip = self.clip()
        for name, (norm, parts) in self._others.pop((spec.round, spec.attempt), {}).items():
            if name in names:
                seen -= parts * min(1.0, clip / norm if norm else 1.0)
        asked = [f"client-{self.own + number}" in names for number in range(self.directions.count)]
        self._rows.append(self.row())
        self._seen.append(seen / clip)
        self._asked.append(self._signs.double() * torch.tensor(asked, dtype=torch.float64))

    @property
    def rounds_of_each(self) -> dict[str, int]:
        """Released rounds of each canary, by its name."""
        if not self._asked:
            return {}
        rounds = torch.stack(self._asked).abs().sum(0).tolist()
        return {f"client-{self.own + number}": int(each) for number, each in enumerate(rounds)}

    def guesses(self, plan: NoisePlan, times: int) -> Guesses:
        """Guess the coin of each canary that was asked.

        Args:
            plan: the noise that is promised.
            times: participations that are claimed.

        Raises:
            UserError: no round was released; or, with correlated noise, an attempt failed.
        """
        if not self._rows:
            raise UserError(
                "no round of the simulated run was released, so nothing can be guessed; see what "
                "`isthmus simulate` says of the job"
            )
        seen = torch.stack(self._seen)
        asked = torch.stack(self._asked)
        if plan.correlated is not None:
            # What the mechanism makes of the rounds, with independent noise in each.
            if self._rows != list(range(len(self._rows))):
                raise UserError(
                    "an attempt of the simulated run has failed, and an audit of correlated noise "
                    "needs all of its rows; set simulation.dropout to 0"
                )
            mixing = _mixing(plan.correlated.coefficients, len(self._rows))
            seen = torch.linalg.solve_triangular(mixing, seen, upper=False)
            asked = torch.linalg.solve_triangular(mixing, asked, upper=False)
        weight = asked.square().sum(0)
        were_asked = weight > 0
        # Rounds whose noise seems to be less count for more: one without any shows all coins.
        exact = asked / _deviations(seen, asked)[:, None] ** 2
        score = (exact * seen).sum(0)[were_asked] / (exact * asked).sum(0)[were_asked]
        right = int(((score > 0.5) == self.present[were_asked]).sum())
        claimed = times if plan.correlated is None else plan.correlated.sensitivity**2
        shares = Counter(
            min(1.0, math.ceil(_SHARES * each / claimed) / _SHARES)
            for each in weight[were_asked].tolist()
        )
        return Guesses(right, int(were_asked.sum()), shares)


_SHARES = 1000
"""Shares of the claimed participations that are told apart, rounded up."""


def _deviations(seen: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """The noise that each round seems to have, up to a factor, float64 (T).

    By the median distance of what is seen of a canary from what it is with or without its update;
    one that was not asked says nothing.

    Args:
        seen: (T, M), and
        asked: with what sign, 0 for a canary that was not, (T, M).
    """
    distances = torch.minimum(seen.abs(), (seen - asked).abs())
    medians = torch.where(asked != 0, distances, math.nan).nanmedian(1).values
    largest = float(medians.nan_to_num().max())
    if not largest:
        return torch.ones_like(medians)
    # Rounds that are nearly alike count the same: noise that repeats itself cancels only then.
    less = medians.nan_to_num(largest).clamp(min=_LEAST_NOISE * largest)
    return torch.where(less < _LESS_NOISE * largest, less, largest)


def _mixing(coefficients: object, rows: int) -> torch.Tensor:
    """The matrix (T, T) that correlated noise makes of independent draws."""
    column = torch.zeros(rows, dtype=torch.float64)
    known = torch.tensor(coefficients, dtype=torch.float64)[:rows]
    column[: len(known)] = known
    mixing = torch.zeros(rows, rows, dtype=torch.float64)
    for row in range(rows):
        mixing[row:, row] = column[: rows - row]
    return mixing


class CanaryHost(MadeUpHost):
    """The task of a canary device, which gives an update of the auditor's choice."""

    def open(self, work: link_pb2.OpenRun) -> int:
        """See `TaskHost.open`; no data are loaded."""
        with self._fleet.lock:
            self.close()
            self._run_id = work.run_id
            self.run = self._fleet.open(work, self._participant).shared
            return self.run.examples


class OtherHost(VirtualHost):
    """The task of another device, whose update the auditor knows."""

    def __init__(
        self, fleet: VirtualFleet, participant: Participant, canaries: DeviceCanaries
    ) -> None:
        """`canaries` are told of its updates."""
        super().__init__(fleet, participant)
        self._canaries = canaries

    def train(
        self, request_id: str, work: link_pb2.TrainLocal, payload: Buffer, progress: ReportProgress
    ) -> TrainingResult:
        """See `TaskHost.train`."""
        trained, update = super().train(request_id, work, payload, progress)
        assert self.run is not None
        vector = self.run.layout.decode(update)
        self._canaries.note_other(work, self._participant.name, vector)
        return trained, update


class DeviceAudit(Simulation):
    """A simulated run with canary devices, which have the numbers after all others."""

    canaries: DeviceCanaries
    spent_by: Callable[[str], float]
    """Epsilon of a device by its name, by the ledger of the run, once it has begun."""

    def undercharged(self, plan: NoisePlan) -> Undercharge | None:
        """The canary of which the ledger has least of what its rounds cost, if one has too little.

        Args:
            plan: the noise that is promised.
        """
        rounds = self.canaries.rounds_of_each
        return Undercharge.worst(
            Undercharge.of(self.spent_by(name), plan.epsilon(times))
            for name, times in rounds.items()
        )

    def _host(self, fleet: VirtualFleet, index: int) -> VirtualHost:
        participant = fleet.participant(index)
        if index < self.canaries.own:
            return OtherHost(fleet, participant, self.canaries)

        def update(work: link_pb2.TrainLocal, vector: torch.Tensor) -> None:
            vector.copy_(self.canaries.update(index, work))

        return CanaryHost(fleet, participant, update)

    def _watch(self, parts: RunParts, fleet: VirtualFleet) -> None:
        budget = parts.budgets.devices
        assert budget is not None
        self.spent_by = budget.spent_by
        own = self.canaries.own
        fleet.shard_of = lambda index: (index % own, own)
        self.canaries.clip = lambda: budget.clip
        self.canaries.row = lambda: budget.row
        parts.federated.watch = self.canaries.watch


def most_in_a_run(job: Job, elements: int, own: int) -> int:
    """The most canary devices that a run of a job can have.

    Args:
        job: with `[privacy]`.
        elements: N, of an update.
        own: devices of the job.
    """
    privacy = job.privacy
    assert privacy is not None
    cohort = job.federated.cohort
    # A round has as large a part of the canaries as of the other devices.
    largest = 1 / privacy.delta - 1
    if job.federated.secure_aggregation:
        largest = min(largest, float(MAX_SECURE_COHORT))
    room = max(0, int(own * (largest / cohort - 1)) - 1)
    return min(SpreadDirections.most(elements), room, max(1, MEMORY // (8 * elements)))


def with_canaries(job: Job, canaries: int) -> Job:
    """The job with so many more devices, and as many more of them in each round in proportion.

    Raises:
        JobError: its settings are for no other number of devices.
    """
    federated = job.federated
    own = job.simulation.population(federated)
    cohort = min(own + canaries, -(-federated.cohort * (own + canaries) // own))
    changes: dict[str, object] = {
        "simulation.clients": own + canaries,
        "simulation.connected": None,
        "federated.cohort": cohort,
    }
    if federated.quorum is not None:
        changes["federated.quorum"] = -(-federated.quorum * cohort // federated.cohort)
    if job.budget is not None:
        changes["budget"] = job.budget * cohort / federated.cohort
    try:
        return with_changes(job, changes)
    except JobError as error:
        raise JobError(f"with {canaries} canary devices the job is refused: {error}") from error


def audit_devices(
    job: Job, base: Path, directory: Path, elements: int, canaries: int, seed: int
) -> DeviceAudit:
    """A run of a job with canary devices, which is yet to be run.

    Args:
        job: with `[privacy]`.
        base: where its relative paths start.
        directory: of the run.
        elements: N, of an update.
        canaries: M, at most `most_in_a_run`.
        seed: of directions and coins.

    Raises:
        JobError: it cannot be simulated with them.
    """
    simulation = DeviceAudit.new(with_canaries(job, canaries), base, directory)
    assert isinstance(simulation, DeviceAudit)
    generator = torch.Generator().manual_seed(seed + 1)
    simulation.canaries = DeviceCanaries(
        job.simulation.population(job.federated),
        SpreadDirections.drawn(elements, canaries, seed),
        torch.rand(canaries, generator=generator) < 0.5,
        # With correlated noise, the claim is about updates with the same sign, the worst ones.
        alternate=job.privacy is not None and job.privacy.mechanism != "correlated",
    )
    return simulation
