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
from isthmus_server.plan.round_log import LoggedRound
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
_NINETY = 1.645
"""Deviations from the mean within which nine of ten values of a normal distribution are."""


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
                rounds = log_in(directory).rounds
        except UserError as error:
            return cls(unknown=f"duration of a round is not known: {error}")
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
            note=note,
        )

    @property
    def mean(self) -> float:
        """Seconds of a round."""
        return statistics.fmean(self.seconds)

    def mean_with(self, others: float) -> float:
        """Seconds of a round in which others train at the same time, for so many seconds."""
        return statistics.fmean(max(each, others) for each in self.seconds)

    @property
    def median(self) -> Figure:
        """Seconds of the round in the middle."""
        return Figure("median of a round", statistics.median(self.seconds), "s", self._how)

    @property
    def _how(self) -> str:
        return f"from {len(self.seconds)} timed rounds"

    @property
    def middle_of_runs(self) -> float:
        """Seconds of the run in the middle, of all runs that timed rounds make from one of them on.

        A long round that is rare is in the mean of rounds, and in most runs of few rounds it is
        not. After the last timed round follows the first one.
        """
        count = len(self.seconds)
        times, rest = divmod(self.rounds, count)
        until = [0.0, *itertools.accumulate([*self.seconds, *self.seconds])]
        rests = [until[start + rest] - until[start] for start in range(count)]
        return times * sum(self.seconds) + statistics.median(rests)

    @property
    def _spread(self) -> float:
        """Standard deviation of a round, as far as sums of rounds show it.

        A lost device is missing for many rounds, which are alike for that: sums spread by more than
        their rounds would by themselves.
        """
        count = len(self.seconds)
        if count < 2:
            return 0.0
        size = math.isqrt(count)
        starts = range(0, count - size + 1, size)
        blocks = [statistics.fmean(self.seconds[start : start + size]) for start in starts]
        of_blocks = statistics.stdev(blocks) * math.sqrt(size)
        return max(statistics.stdev(self.seconds), of_blocks)

    @property
    def figures(self) -> list[Figure]:
        """What was timed, and what follows from it for the job; nothing if nothing was."""
        if not self.seconds:
            return []
        count = len(self.seconds)
        how = self._how
        of_run = f"if each round is federated; {how}" if self.mixed else how
        low, high = _ends(self.seconds)
        least, most = _ends(self.delivered)
        whole = self.rounds * self.mean
        # The mean is one of timed rounds, and the run has a mean of its own.
        off = _NINETY * self._spread * math.sqrt(self.rounds + self.rounds**2 / count)
        return [
            self.median,
            Figure("5 % to 95 % of rounds", low, "s", how, most=high),
            Figure(f"all {self.rounds} rounds, median", self.middle_of_runs, "s", of_run),
            Figure(
                f"all {self.rounds} rounds", max(0.0, whole - off), "s", of_run, most=whole + off
            ),
            Figure("updates, 5 % to 95 % of rounds", least, "of the invited", how, most=most),
        ]

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
