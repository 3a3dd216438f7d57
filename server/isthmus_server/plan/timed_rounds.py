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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.planned import PLANS, Figure
from isthmus.provided import load_provided, provided
from isthmus_server.plan.failed_attempts import FailedAttempts
from isthmus_server.plan.round_log import LoggedRound, RoundLog
from isthmus_server.plan.seconds_of_rounds import SecondsOfRounds
from isthmus_server.plan.simulated_log import log_in

ROUNDS = 200
"""Rounds that are timed."""
REAL_SECONDS = 15.0
"""Seconds on this machine after which no further round begins."""
MOST_FAILED = 3
"""Runs that may fail, if none goes to its end, before no other one is timed."""
_DRAWS = 1000
"""Draws of the second one of them; others count from it."""
MOST_BYTES = 256 << 20
"""Most bytes of a model whose rounds are timed: each device's update is as large."""
WHERE_SPEED = (
    "duration of a round is not said: set simulation.step_seconds, simulation.up_mbit or "
    "simulation.down_mbit to those of the devices"
)
"""Which keys say what a plan does not."""


class TimeRounds(Protocol):
    """The simulation's part of the durations of a plan."""

    def __call__(
        self, job: Job, base: Path, directory: Path, rounds: int, seconds: float, draws: int
    ) -> None:
        """Simulate federated rounds of devices that train nothing, in a new run directory."""
        ...


@dataclasses.dataclass(frozen=True)
class _TimedRun:
    """Rounds that were timed in one go, from the first one on."""

    log: RoundLog
    failure: str
    """Why a round of it failed for good; empty if none did."""

    @property
    def prices_of_failures(self) -> list[float]:
        """Prices of the failed attempts at rounds that were then committed."""
        committed = self.log.rounds[-1].record.round if self.log.rounds else 0
        return [each.price for each in self.log.failures if each.round <= committed]


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
    fails: bool = False
    """Whether nothing was timed since rounds fail for good."""
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
            runs = _timed_runs(job, base, most, real_seconds)
        except UserError as error:
            return cls(unknown=f"duration of a round is not known: {error}")
        failures = [each.failure for each in runs if each.failure]
        if len(failures) == len(runs):
            return cls(unknown=f"duration of a round is not known: {failures[0]}", fails=True)
        logs = [each.log for each in runs]
        rounds = [each for log in logs for each in log.rounds]
        count = "one round was timed" if len(rounds) == 1 else f"{len(rounds)} rounds were timed"
        if len(runs) > 1:
            count += f" in {len(runs)} runs"
        if not failures and len(rounds) < most and len(rounds) != job.rounds:
            # Of some jobs all rounds are timed.
            count += f", as many as began within {real_seconds:g} seconds on this machine"
        note = (
            f"durations of rounds are at the speeds of [simulation], of the one fleet that seed="
            f"{job.seed} draws from them: another seed has other devices; {count}"
        )
        if job.evaluation.devices:
            note += ", and without the evaluation on devices"
        if failures:
            note += (
                f"; {len(failures)} of these runs ended before the last round, as one of the job "
                f"may: {failures[0]}"
            )
        return cls(
            rounds=job.rounds,
            mixed=mixed,
            seconds=[each for log in logs for each in _seconds_of(log)],
            delivered=[_delivered(each) for each in rounds],
            failed=[price for each in runs for price in each.prices_of_failures],
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
            Figure("nine of ten rounds", low, "s", how, most=high),
            Figure(f"{name}, median", self.middle_of_runs, "s", of_run),
        ]
        if whole is not None:
            found.append(
                Figure(f"{name}, nine of ten runs", whole.low, "s", of_run, most=whole.high)
            )
        updates = "updates, nine of ten rounds"
        return [*found, Figure(updates, least, "of the invited", how, most=most)]

    def lines(self) -> list[tuple[str, str]]:
        """Names and texts for a terminal."""
        if self.unknown:
            return [("duration", self.unknown)]
        found = [("duration", f"{each.name}: {each.text}") for each in self.figures]
        return [*found, ("note", self.note)]


def _timed_runs(job: Job, base: Path, most: int, real_seconds: float) -> list[_TimedRun]:
    """Time federated rounds of a job, of one run or of several.

    A device that was lost is away for a while. In the first rounds of a run none is, so that a run
    of few rounds is not like as many later ones: then rounds of several such runs are timed.

    Args:
        job: that is planned.
        base: the job file's folder.
        most: rounds that are timed.
        real_seconds: after which no further round begins.

    Raises:
        UserError: no round can be timed.
    """
    time_rounds: TimeRounds = load_provided(PLANS, "timing", "the durations of a plan")
    deadline = time.monotonic() + real_seconds
    found: list[_TimedRun] = []
    had = 0
    with tempfile.TemporaryDirectory(prefix="isthmus-timed-") as scratch:
        while not found or (had < most and time.monotonic() < deadline):
            directory = Path(scratch) / f"run-{len(found)}"
            wanted = most - had
            if job.simulation.dropout:
                wanted = min(wanted, job.rounds)
            failure = ""
            left = max(0.0, deadline - time.monotonic())
            draws = _DRAWS + len(found) if found else 0
            try:
                time_rounds(job, base, directory, wanted, left, draws)
            except UserError as error:
                if not directory.exists():
                    raise
                failure = str(error)
            found.append(_TimedRun(log_in(directory), failure))
            had += len(found[-1].log.rounds)
            is_hopeless = len(found) == MOST_FAILED and all(each.failure for each in found)
            if not job.simulation.dropout or is_hopeless:
                break
    return found


def _seconds_of(log: RoundLog) -> list[float]:
    """Seconds of each round of a run, from the commit before it to its own."""
    ends = [each.record.elapsed for each in log.rounds]
    return [end - start for start, end in itertools.pairwise([0.0, *ends])]


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
