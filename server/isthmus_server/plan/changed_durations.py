"""How long rounds take in a changed plan: of the datacenter by its steps, of devices if timed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from isthmus.job import Job
from isthmus.job.planned import Figure
from isthmus_server.plan.calibration import Calibration
from isthmus_server.plan.failed_attempts import FailedAttempts
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.sides import Sides
from isthmus_server.plan.step_figures import ROUND, step_figures
from isthmus_server.plan.timed_rounds import REAL_SECONDS, ROUNDS, TimedRounds
from isthmus_server.strategy.learning_curves import COVERED

_ROUNDS = ROUNDS // 4
_REAL_SECONDS = REAL_SECONDS / 5
"""What is timed of one changed plan, of which there are several."""
OF_DATACENTER = "a datacenter round"
"""Name of the seconds of a round of the datacenter."""
WITHIN_NOISE = "the noise of the timed rounds"
"""What a difference is less than, of which nothing is to be made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsOfSides:
    """How long rounds of each side take, and how often those of devices fail."""

    figures: list[Figure]
    notes: Sequence[str] = ()
    """What the timed rounds do not tell from those of the job as it is, clauses."""
    failed: FailedAttempts | None = None
    """None if it is not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Durations:
    """What durations of a plan follow from."""

    base: Path
    """The job file's folder."""
    options: PlanOptions
    calibration: Calibration | None
    timed: TimedRounds | None
    """Federated rounds of the job as it is; None for a job without devices."""

    def of(self, job: Job, sides: Sides) -> RoundsOfSides:
        """Rounds of each side, with the devices as they are."""
        figures = self._of_ranks(job, sides) + self._of_devices(self.timed)
        return RoundsOfSides(figures=figures, failed=self._failed(job, sides, self.timed))

    def of_changed(self, job: Job, sides: Sides, before: Job) -> RoundsOfSides:
        """Rounds of each side, with other devices or updates.

        Rounds are timed again if the change can make others of them.

        Args:
            job: that was changed.
            sides: of it.
            before: the job as it is.
        """
        is_timed = self.timed is not None and self.timed.seconds and sides.devices is not None
        if not is_timed or _are_alike(job, before):
            return self.of(job, sides)
        assert self.timed is not None
        assert sides.devices is not None
        size = int(sides.devices.memory[0].value)
        timed = TimedRounds.of(
            job,
            self.base,
            size,
            mixed=self.timed.mixed,
            most=min(_ROUNDS, len(self.timed.seconds)),
            real_seconds=_REAL_SECONDS,
        )
        return RoundsOfSides(
            figures=self._of_ranks(job, sides) + self._of_devices(timed),
            notes=within_noise(timed, self.timed),
            failed=self._failed(job, sides, timed),
        )

    def of_another_task(self, job: Job, sides: Sides) -> RoundsOfSides:
        """Rounds of the datacenter: devices are timed with the job's own task."""
        figures = self._of_ranks(job, sides)
        return RoundsOfSides(figures=figures, failed=self._failed(job, sides, self.timed))

    @staticmethod
    def _failed(job: Job, sides: Sides, timed: TimedRounds | None) -> FailedAttempts | None:
        """What failed attempts cost, by timed rounds or by the devices' dropout."""
        if sides.devices is None:
            return None
        if timed is None:
            return FailedAttempts.by_dropout(job)
        if timed.fails:  # so would a run: it has no price of all rounds
            return None
        return timed.failed_attempts or FailedAttempts.by_dropout(job)

    def _of_ranks(self, job: Job, sides: Sides) -> list[Figure]:
        ranks = sides.datacenter
        if ranks is None:
            return []
        found = step_figures(job, ranks, self.options, self.calibration)
        return [
            dataclasses.replace(each, name=OF_DATACENTER) for each in found if each.name == ROUND
        ]

    @staticmethod
    def _of_devices(timed: TimedRounds | None) -> list[Figure]:
        if timed is None or not timed.seconds:
            return []
        how = f"mean of {len(timed.seconds)} timed rounds"
        mean = timed.mean
        found = [Figure("a federated round", mean, "s", how)]
        off = timed.times.mean_off
        if off:
            how = f"{COVERED:.0%} interval, {how}"
            low = max(0.0, mean - off)
            found.append(Figure("its mean is within", low, "s", how, most=mean + off))
        return found


def within_noise(timed: TimedRounds, before: TimedRounds) -> list[str]:
    """What rounds of a changed job do not tell from those of the job as it is, or why, clauses."""
    if not timed.seconds:
        return [timed.unknown]
    found = []
    off = timed.times.mean_off
    off_before = before.times.mean_off
    difference = abs(timed.mean - before.mean)
    if off is None or off_before is None:
        found.append(
            "one timed round does not say how a federated round differs from that of the job as it "
            "is"
        )
    elif 0 < difference <= math.hypot(off, off_before):
        found.append(
            f"a federated round differs from that of the job as it is by less than {WITHIN_NOISE}"
        )
    failed = timed.failed_attempts
    failed_before = before.failed_attempts
    assert failed is not None
    assert failed_before is not None
    difference = abs(failed.price - failed_before.price)
    if 0 < difference <= failed.off_from(failed_before):
        found.append(
            f"the cost of failed attempts differs from that of the job as it is by less than "
            f"{WITHIN_NOISE}"
        )
    return found


def _are_alike(job: Job, before: Job) -> bool:
    """Whether federated rounds of two jobs take the same time.

    Without rates of links, the bytes of updates are no matter.
    """
    if job.simulation.has_rates:
        return job.federated == before.federated
    keys = ("clients", "cohort", "quorum", "over_selection")
    return all(getattr(job.federated, key) == getattr(before.federated, key) for key in keys)
