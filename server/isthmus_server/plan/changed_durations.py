"""How long rounds take in a changed plan: of the datacenter by its steps, of devices if timed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from isthmus.job import Job
from isthmus.job.planned import Figure
from isthmus_server.plan.calibration import Calibration
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.sides import Sides
from isthmus_server.plan.step_figures import ROUND, step_figures
from isthmus_server.plan.timed_rounds import REAL_SECONDS, ROUNDS, TimedRounds

_ROUNDS = ROUNDS // 4
_REAL_SECONDS = REAL_SECONDS / 5
"""What is timed of one changed plan, of which there are several."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Durations:
    """What durations of a plan follow from."""

    base: Path
    """The job file's folder."""
    options: PlanOptions
    calibration: Calibration | None
    timed: TimedRounds | None
    """Federated rounds of the job as it is; None for a job without devices."""

    def of(self, job: Job, sides: Sides) -> list[Figure]:
        """Seconds of a round of each side, with the devices as they are."""
        return self._of_ranks(job, sides) + self._of_devices(self.timed)

    def of_changed(self, job: Job, sides: Sides, before: Job) -> list[Figure]:
        """Seconds of a round of each side, with other devices or updates.

        Rounds are timed again if the change can make others of them.

        Args:
            job: that was changed.
            sides: of it.
            before: the job as it is.
        """
        found = self._of_ranks(job, sides)
        if self.timed is None or not self.timed.seconds or sides.devices is None:
            return found
        if _are_alike(job, before):
            return found + self._of_devices(self.timed)
        size = int(sides.devices.memory[0].value)
        timed = TimedRounds.of(
            job,
            self.base,
            size,
            mixed=self.timed.mixed,
            most=min(_ROUNDS, len(self.timed.seconds)),
            real_seconds=_REAL_SECONDS,
        )
        return found + self._of_devices(timed)

    def of_another_task(self, job: Job, sides: Sides) -> list[Figure]:
        """Seconds of a round of the datacenter: devices are timed with the job's own task."""
        return self._of_ranks(job, sides)

    def _of_ranks(self, job: Job, sides: Sides) -> list[Figure]:
        ranks = sides.datacenter
        if ranks is None:
            return []
        found = step_figures(job, ranks, self.options, self.calibration)
        return [
            dataclasses.replace(each, name="a datacenter round")
            for each in found
            if each.name == ROUND
        ]

    @staticmethod
    def _of_devices(timed: TimedRounds | None) -> list[Figure]:
        if timed is None or not timed.seconds:
            return []
        how = f"mean of {len(timed.seconds)} timed rounds"
        return [Figure("a federated round", timed.mean, "s", how)]


def _are_alike(job: Job, before: Job) -> bool:
    """Whether federated rounds of two jobs take the same time.

    Without rates of links, the bytes of updates are no matter.
    """
    if job.simulation.has_rates:
        return job.federated == before.federated
    keys = ("clients", "cohort", "quorum", "over_selection")
    return all(getattr(job.federated, key) == getattr(before.federated, key) for key in keys)
