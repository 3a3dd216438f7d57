"""The measurements of a run, for the plan of a job with the same task."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.planned import Figure
from isthmus.task.code_digest import code_digest
from isthmus_server.read.report.measurements import MeasuredFigure
from isthmus_server.read.report.report import read_report
from isthmus_server.storage.run_description import is_simulated
from isthmus_server.storage.store import Store

STEP = "step of a datacenter"
"""Name of the measured seconds of a datacenter's step."""
WHICH_RANKS = (
    "the log of a run does not say whether its ranks were GPUs, and those of the plan are taken as "
    "GPUs: if they were processors, add --device cpu"
)
"""What is said of ranks if the plan is not told what they are."""
_ON_DEVICES = ("federated", "privacy", "exchange", "evaluation", "model")
_TABLES = {
    "datacenter": ("datacenter", "evaluation", "model"),
    "federated": _ON_DEVICES,
    "hybrid": ("datacenter", *_ON_DEVICES, "strategy"),
}
"""Tables of the job on which the time of a round depends, by its regime."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a run of the same task measured."""

    run_id: str
    job: Job
    """What the run trained."""
    measured: Mapping[str, MeasuredFigure]
    """By name."""
    simulated: bool
    """Whether times are those of simulated devices."""

    @classmethod
    def of(cls, directory: Path, job: Job, base: Path) -> Self:
        """Read a run.

        Args:
            directory: of the run.
            job: that is planned.
            base: the job file's folder.

        Raises:
            UserError: there is no run, it is of another task, or it has measured nothing.
        """
        with contextlib.closing(Store.open(directory, check=True)) as store:
            found = read_report(store)
            run_job = store.job
            run_base = store.base
        if _told_by(run_job) != _told_by(job):
            raise UserError(
                f"--calibrate {directory} has a run of another task, {run_job.task.source} with "
                f"its own settings; give a run of {job.task.source} with the settings of this job"
            )
        if _code_differs(job.task.source, base, run_base):
            raise UserError(
                f"--calibrate {directory} has a run of another task: {job.task.source} has other "
                f"code in {run_base} than in {base}; give a run of the code of this job"
            )
        if not found.measured:
            raise UserError(f"--calibrate {directory} has a run that has measured nothing yet")
        return cls(
            run_id=found.run_id,
            job=run_job,
            measured={each.name: each for each in found.measured},
            simulated=is_simulated(directory),
        )

    @property
    def how(self) -> str:
        """How its figures were obtained."""
        kind = "simulated run" if self.simulated else "run"
        return f"measured in the {kind} {self.run_id}"

    def step_seconds(self, job: Job, ranks: int) -> MeasuredFigure | None:
        """Seconds of a datacenter's step, if the run had such steps as the job has.

        Steps of other ranks or batches take another time.
        """
        own = job.datacenter.model_dump(exclude={"ranks", "steps"})
        of_run = self.job.datacenter.model_dump(exclude={"ranks", "steps"})
        is_alike = ranks == self.job.datacenter.ranks and own == of_run
        return self.measured.get(STEP) if is_alike else None

    def figures(self, job: Job, ranks: int) -> list[Figure]:
        """What was measured, and what follows from it for the job.

        Args:
            job: that is planned.
            ranks: of its datacenter; 0 for none.
        """
        found = [
            Figure(each.name, each.low, each.unit, self.how, most=each.high)
            for each in self.measured.values()
        ]
        others = self.other_settings(job, ranks)
        for regime, tables in _TABLES.items():
            round_ = self.measured.get(f"{regime} round")
            if round_ is None or any(key.partition(".")[0] in tables for key in others):
                continue
            least = job.rounds * round_.low
            most = job.rounds * round_.high
            found.append(Figure(f"time, all rounds {regime}", least, "s", self.how, most=most))
        return found

    def other_settings(self, job: Job, ranks: int) -> list[str]:
        """Keys on which rounds depend, and which the run had otherwise, with their tables.

        Args:
            job: that is planned.
            ranks: of its datacenter; 0 for none.
        """
        planned = job.model_dump()
        of_run = self.job.model_dump()
        planned["datacenter"]["ranks"] = ranks
        found = []
        for table in _TABLES["hybrid"]:
            if table == "strategy":
                keys = ["merge"]
            elif planned[table] is None or of_run[table] is None:
                found += [] if planned[table] == of_run[table] else [table]
                continue
            else:
                keys = list(planned[table])
            found += [f"{table}.{key}" for key in keys if planned[table][key] != of_run[table][key]]
        return found

    def note(self, job: Job, ranks: int) -> str:
        """What other settings of the run mean for the figures, a sentence; empty without any."""
        others = self.other_settings(job, ranks)
        if not others:
            return ""
        return (
            f"the run had other settings ({', '.join(others)}): the time of rounds that depend on "
            "them is not said, and errors contain what they change"
        )


def _told_by(job: Job) -> tuple[str, Mapping[str, Any]]:
    return job.task.source, job.task.settings


def _code_differs(source: str, base: Path, run_base: Path) -> bool:
    """Whether the code of a task is known to be another in the folder of a run."""
    where = source.rpartition(":")[0]
    if base.resolve() == run_base.resolve() or not (run_base / where).is_file():
        return False  # a run that was copied from another machine has left its task there
    return code_digest(source, base) != code_digest(source, run_base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanError:
    """One figure of a plan, and what a run measured of it."""

    name: str
    unit: str
    least: float
    """Planned."""
    most: float
    measured: float
    """Median."""

    @classmethod
    def of(cls, planned: Figure, measured: MeasuredFigure) -> Self:
        """Compare a figure with what a run measured of it."""
        return cls(
            name=measured.name,
            unit=planned.unit,
            least=planned.value,
            most=planned.highest,
            measured=measured.median,
        )

    @property
    def error(self) -> float:
        """What was measured outside of the planned range, as a part of the nearer end; 0 within."""
        if self.measured > self.most:
            return self.measured / self.most - 1 if self.most else float("inf")
        return self.measured / self.least - 1 if self.measured < self.least else 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**dataclasses.asdict(self), "error": self.error}

    @property
    def text(self) -> str:
        """The figure, the measurement and the error in words."""
        ends = dict.fromkeys((self._shown(self.least), self._shown(self.most)))
        said = "as planned" if not self.error else f"off by {self.error:+.1%}"
        return (
            f"{self.name}: {' to '.join(ends)} {self.unit} planned, {self._shown(self.measured)} "
            f"measured, {said}"
        )

    def _shown(self, value: float) -> str:
        return f"{value:,.0f}" if self.unit == "bytes" else f"{value:.4g}"
