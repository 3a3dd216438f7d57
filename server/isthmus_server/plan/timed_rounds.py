"""How long a federated round takes, by the virtual clock of simulated rounds that train nothing.

The speeds are those of the job's `[simulation]` table. Rounds are coordinated by the code of a run,
so that over-selection, lost devices, failed attempts and deadlines take the time that they take in
one; devices train nothing, and nothing is evaluated. The rounds are others than the job's own: the
same devices are invited and lost in another order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.planned import PLANS, Figure
from isthmus.provided import load_provided, provided
from isthmus_server.plan.failed_attempts import FailedAttempts
from isthmus_server.plan.round_log import LoggedRound
from isthmus_server.plan.seconds_of_rounds import SecondsOfRounds
from isthmus_server.plan.simulated_log import log_in

ROUNDS = 200
"""Rounds that are timed."""
REAL_SECONDS = 15.0
"""Seconds on this machine after which no further round begins."""
MOST_BYTES = 256 << 20
"""Most bytes of a model whose rounds are timed: each device's update is as large."""
WHERE_SPEED = (
    "duration of a round is not said: set simulation.step_seconds, simulation.up_mbit or "
    "simulation.down_mbit to those of the devices"
)
"""Which keys say what a plan does not."""


class TimeRounds(Protocol):
    """The simulation's part of the durations of a plan."""

    def __call__(self, job: Job, base: Path, directory: Path, rounds: int, seconds: float) -> None:
        """Simulate federated rounds of devices that train nothing, in a new run directory."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedRounds:
    """Federated rounds of a job, timed; none if that cannot be done."""

    rounds: int = 0
    """Rounds of the job."""
    mixed: bool = False
    """Whether the job has, or can have, rounds of other regimes."""
    seconds: Sequence[float] = ()
    """Seconds of each timed round, from the commit before it to its own."""
    delivered: Sequence[float] = ()
    """Share of the invited devices whose updates each timed round has."""
    failed: Sequence[float] = ()
    """Price of each attempt that failed."""
    unknown: str = ""
    """Why nothing was timed, a sentence; empty if something was."""
    note: str = ""
    """What the durations are of, a sentence; empty if nothing was timed."""

    @classmethod
    def of(
        cls,
        job: Job,
        base: Path,
        model_bytes: int,
        *,
        mixed: bool,
        most: int | None = None,
        real_seconds: float | None = None,
    ) -> Self:
        """Time federated rounds of a job.

        Args:
            job: that is planned.
            base: the job file's folder.
            model_bytes: of the parameters and buffers of its model.
            mixed: whether it can have rounds of other regimes.
            most: rounds that are timed; None for `ROUNDS`.
            real_seconds: after which no further round begins; None for `REAL_SECONDS`.
        """
        most = ROUNDS if most is None else most
        real_seconds = REAL_SECONDS if real_seconds is None else real_seconds
        if not job.simulation.has_speeds:
            return cls(unknown=WHERE_SPEED)
        if model_bytes > MOST_BYTES:
            return cls(
                unknown=f"duration of a round is not said: the model has {model_bytes:,} bytes, "
                f"and rounds of more than {MOST_BYTES:,} are not timed here; run isthmus simulate"
            )
        if "timing" not in provided(PLANS):
            return cls(
                unknown="duration of a round is not said: it needs the simulation's package; "
                "install isthmus again"
            )
        try:
            time_rounds: TimeRounds = load_provided(PLANS, "timing", "the durations of a plan")
            with tempfile.TemporaryDirectory(prefix="isthmus-timed-") as scratch:
                directory = Path(scratch) / "run"
                time_rounds(job, base, directory, most, real_seconds)
                log = log_in(directory)
        except UserError as error:
            return cls(unknown=f"duration of a round is not known: {error}")
        rounds = log.rounds
        ends = [each.record.elapsed for each in rounds]
        seconds = [end - start for start, end in itertools.pairwise([0.0, *ends])]
        count = "one round was timed" if len(rounds) == 1 else f"{len(rounds)} rounds were timed"
        if len(rounds) < most and len(rounds) != job.rounds:  # of some jobs all rounds are timed
            count += f", as many as began within {real_seconds:g} seconds on this machine"
        note = (
            f"durations of rounds are at the speeds of [simulation], of the one fleet that seed="
            f"{job.seed} draws from them: another seed has other devices; {count}"
        )
        if job.evaluation.devices:
            note += ", and without the evaluation on devices"
        return cls(
            rounds=job.rounds,
            mixed=mixed,
            seconds=seconds,
            delivered=[_delivered(each) for each in rounds],
            failed=[each.price for each in log.failures],
            note=note,
        )

    @property
    def times(self) -> SecondsOfRounds:
        """How long they took, and what runs take by that."""
        return SecondsOfRounds(self.seconds)

    @property
    def mean(self) -> float:
        """Seconds of a round."""
        return self.times.mean

    def times_with(self, others: float, after: float) -> SecondsOfRounds:
        """How long rounds take in which others train at the same time.

        Args:
            others: seconds for which they train.
            after: seconds of what follows in each round.
        """
        return SecondsOfRounds([max(each, others) + after for each in self.seconds])

    @property
    def failed_attempts(self) -> FailedAttempts | None:
        """What failed attempts add to the price of a round; None if nothing was timed."""
        if not self.seconds:
            return None
        return FailedAttempts.of_timed(self.failed, len(self.seconds))

    @property
    def median(self) -> Figure:
        """Seconds of the round in the middle."""
        return Figure("median of a round", statistics.median(self.seconds), "s", self._how)

    @property
    def _how(self) -> str:
        return f"from {len(self.seconds)} timed rounds"

    @property
    def middle_of_runs(self) -> float:
        """Seconds of the run in the middle, see `SecondsOfRounds.middle_of_runs`."""
        return self.times.middle_of_runs(self.rounds)

    @property
    def figures(self) -> list[Figure]:
        """What was timed, and what follows from it for the job; nothing if nothing was."""
        if not self.seconds:
            return []
        how = self._how
        of_run = f"if each round is federated; {how}" if self.mixed else how
        low, high = _ends(self.seconds)
        least, most = _ends(self.delivered)
        name = f"all {self.rounds} rounds"
        whole = self.times.run(self.rounds)
        found = [
            self.median,
            Figure("5 % to 95 % of rounds", low, "s", how, most=high),
            Figure(f"{name}, median", self.middle_of_runs, "s", of_run),
        ]
        if whole is not None:
            found.append(Figure(name, whole.low, "s", of_run, most=whole.high))
        updates = "updates, 5 % to 95 % of rounds"
        return [*found, Figure(updates, least, "of the invited", how, most=most)]

    def lines(self) -> list[tuple[str, str]]:
        """Names and texts for a terminal."""
        if self.unknown:
            return [("duration", self.unknown)]
        found = [("duration", f"{each.name}: {each.text}") for each in self.figures]
        return [*found, ("note", self.note)]


def _delivered(round_: LoggedRound) -> float:
    found = round_.record.participants
    return found.accepted / found.invited


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The twentieth and the last but one twentieth of the values.

    >>> _ends([float(value) for value in range(101)])
    (5.0, 95.0)
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[math.floor(0.05 * last)], ordered[math.ceil(0.95 * last)]
