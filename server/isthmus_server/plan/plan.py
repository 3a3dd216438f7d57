"""A plan as a whole: its parts, what is said about time, and its two forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.job import Job, load_job
from isthmus.job.planned import (
    FAKE,
    GIVEN,
    MEASURED,
    Figure,
    PlannedLayout,
    PlannedRanks,
    RanksQuestion,
)
from isthmus.task import Task, load_task
from isthmus_server.plan.changes import ChangedPlan, changed_plans
from isthmus_server.plan.devices import PlannedDevices
from isthmus_server.plan.sides import Sides

WHERE_RATE = "not said: give the operations a second of a rank by --tflops, or measure by --measure"
"""Which option says the time of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `isthmus plan` is asked for besides the job."""

    ranks: int | None = None
    """Ranks of the datacenter; None for those of the job."""
    device: str | None = None
    """`gpu` or `cpu`, what the ranks are; None for `gpu`, and with `measure` for `cpu`."""
    layouts: bool = False
    memory_gib: float | None = None
    """Memory of a rank, in GiB."""
    tflops: float | None = None
    """Operations of a rank, in 10**12 per second."""
    measure: bool = False
    mbit: float | None = None
    """Rate of a device's link, in megabits per second."""

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            UserError: with what to leave out.
        """
        if self.measure and self.tflops is not None:
            raise UserError("--measure finds the rate that --tflops gives; leave one of them out")
        if self.measure and self.device == "gpu":
            raise UserError(
                "--measure trains on this machine's processors, whose rate says nothing of GPUs; "
                "give theirs by --tflops, or plan for --device cpu"
            )

    @property
    def on_gpus(self) -> bool:
        """Whether ranks are GPUs."""
        return self.device == "gpu" or (self.device is None and not self.measure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What a job needs and costs, before it runs."""

    job: Job
    options: PlanOptions
    sides: Sides
    changes: list[ChangedPlan]

    @classmethod
    def of(cls, job: Job, task: Task, base: Path, options: PlanOptions) -> JobPlan:
        """Compute it; nothing is trained but what `--measure` measures.

        Args:
            job: the job.
            task: its task.
            base: the job file's folder.
            options: what is asked.

        Raises:
            UserError: the job cannot run, in the words of `isthmus job check`; or the options do
                not fit.
        """
        options.check()
        ranks = job.datacenter.ranks if options.ranks is None else options.ranks
        question = RanksQuestion(
            on_gpus=options.on_gpus, layouts=options.layouts, measure=options.measure
        )
        sides = Sides.of(job, task, base, ranks, question, options.mbit)
        if sides.datacenter is None:
            _refuse_about_ranks(options)
        changes = [ChangedPlan.of("as it is", {}, sides)]
        changes += changed_plans(job, task, base, ranks, sides, on_gpus=options.on_gpus)
        return cls(job=job, options=options, sides=sides, changes=changes)

    # -- the datacenter ----------------------------------------------------------------------------

    def step(self, ranks: PlannedRanks) -> list[Figure]:
        """Operations of a step, the rate, and the seconds of a step and a round.

        Without a rate there are operations only.
        """
        if ranks.operations is None:
            return []
        found = [Figure("operations of a step", ranks.operations, "FLOP", FAKE)]
        rate = ranks.rate
        how = f"rate {MEASURED}, of one rank on its processors"
        if self.options.tflops is not None:
            rate = self.options.tflops * 1e12
            how = f"rate {GIVEN} by --tflops"
        if rate is None:
            return found
        seconds = ranks.operations / rate
        steps = self.job.datacenter.steps
        how = f"{how}; without messages between ranks"
        return [
            *found,
            Figure("rate", rate, "FLOP/s", MEASURED if self.options.measure else GIVEN),
            Figure("time of a step", seconds, "s", how),
            Figure("time of a round", steps * seconds, "s", how),
            Figure(
                "time of the run",
                self.job.rounds * steps * seconds,
                "s",
                f"if each round is the datacenter's; {how}",
            ),
        ]

    def fits(self, layout: PlannedLayout) -> bool | None:
        """Whether a layout fits the memory that was given; None if that is not known."""
        if self.options.memory_gib is None or not layout.peak:
            return None
        return layout.peak <= self.options.memory_gib * 2**30

    # -- forms -------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All figures, each with its unit and how it was obtained."""
        ranks = self.sides.datacenter
        devices = self.sides.devices
        return {
            "job": self.job.name,
            "rounds": self.job.rounds,
            "datacenter": None if ranks is None else self._ranks_json(ranks),
            "devices": None if devices is None else devices.to_json(),
            "privacy": [each.to_json() for each in self.sides.privacy],
            "cost": [each.to_json() for each in self.sides.cost],
            "changes": [each.to_json() for each in self.changes],
        }

    def _ranks_json(self, ranks: PlannedRanks) -> dict[str, Any]:
        layouts = [self._layout_json(each) for each in ranks.others]
        return {
            "ranks": ranks.ranks,
            "device": "gpu" if ranks.on_gpus else "cpu",
            "examples": ranks.examples,
            "layout": self._layout_json(ranks.layout),
            "layouts": layouts,
            "largest": {"name": ranks.largest[0], "bytes": ranks.largest[1], "how": FAKE},
            "step": [each.to_json() for each in self.step(ranks)],
            "unknown": ranks.unknown,
        }

    def _layout_json(self, layout: PlannedLayout) -> dict[str, Any]:
        return {
            "keys": dict(layout.keys),
            "memory": dict(layout.memory),
            "how": FAKE,
            "fits": self.fits(layout),
            "refused": layout.refused,
        }

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        found = [f"{self.job.name}: {self.job.rounds} rounds; nothing was trained or booked"]
        if self.options.measure:
            found = [f"{self.job.name}: {self.job.rounds} rounds; some steps were measured here"]
        if self.sides.datacenter is not None:
            found += self._ranks_lines(self.sides.datacenter)
        if self.sides.devices is not None:
            found += _devices_lines(self.sides.devices)
        found += ["", "privacy"]
        found += _named(self.sides.privacy) or ["  none is promised: the job has no noise"]
        found += ["", "cost"]
        found += _named(self.sides.cost)
        if self.job.budget is not None:
            found.append(f"  the run ends before a round that exceeds budget={self.job.budget:g}")
        found += ["", "what would change it"]
        for each in self.changes:
            found.append(f"  {each.name}")
            if each.refused:
                found.append(f"    refused: {each.refused}")
            found += [f"    {figure.name:<24} {_short(figure)}" for figure in each.figures]
        return found

    def _ranks_lines(self, ranks: PlannedRanks) -> list[str]:
        kind = "GPUs" if ranks.on_gpus else "processors"
        found = ["", f"datacenter, {ranks.ranks} ranks ({kind}), {ranks.examples} examples a step"]
        found += self._layout_lines(ranks.layout)
        name, size = ranks.largest
        found.append(f"  largest parameter of the model: {name}, {size:,} bytes ({FAKE})")
        found += _named(self.step(ranks))
        if ranks.operations is None:
            found.append(f"  time of a step is not known: {ranks.unknown}")
        elif ranks.rate is None and self.options.tflops is None:
            found.append(f"  time of a step {WHERE_RATE}")
        if ranks.others:
            found.append("  layouts, by the peak of a rank:")
        refused: dict[str, list[str]] = {}
        for each in ranks.others:
            if each.refused:
                refused.setdefault(each.refused, []).append(each.text)
                continue
            fits = {True: ", fits", False: ", does not fit", None: ""}[self.fits(each)]
            found.append(f"    {each.text}: {each.peak:,} bytes{fits}")
        for why, texts in refused.items():
            more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
            found.append(f"    {texts[0]}{more}: refused: {why}")
        return found

    def _layout_lines(self, layout: PlannedLayout) -> list[str]:
        if layout.refused:
            return [f"  {layout.text}: {layout.refused}"]
        found = [f"  {layout.text}; of the rank that has most, {FAKE}:"]
        found += [f"    {name:<12} {size:,} bytes" for name, size in layout.memory.items()]
        fits = self.fits(layout)
        if fits is not None:
            verb = "fits" if fits else "does not fit"
            found.append(f"  it {verb} {self.options.memory_gib:g} GiB")
        return found


def plan_of(path: Path, overrides: Iterable[str], options: PlanOptions) -> JobPlan:
    """The plan of a job file; see `JobPlan.of`.

    Raises:
        UserError: the job or its task cannot be used, see `JobPlan.of`.
    """
    job = load_job(path, overrides)
    base = path.resolve().parent
    data = job.task.data_in(base)
    task = load_task(job.task.source, job.task.settings, base=base, data=data)
    return JobPlan.of(job, task, base, options)


def _refuse_about_ranks(options: PlanOptions) -> None:
    """Refuse options about ranks for a job without a datacenter.

    Raises:
        UserError: with the first one.
    """
    given = {
        "--layouts": options.layouts,
        "--memory-gib": options.memory_gib is not None,
        "--tflops": options.tflops is not None,
        "--measure": options.measure,
    }
    for option, is_given in given.items():
        if is_given:
            raise UserError(
                f"{option} is about the ranks of a datacenter, and the job has none; give --ranks "
                "or leave it out"
            )


def _devices_lines(devices: PlannedDevices) -> list[str]:
    return ["", "devices", *(f"  {name:<10} {text}" for name, text in devices.lines())]


def _named(figures: Iterable[Figure]) -> list[str]:
    return [f"  {each.name}: {each.text}" for each in figures]


def _short(figure: Figure) -> str:
    """A figure without how it was obtained, which its own part says."""
    return figure.text.rpartition(f" ({figure.how})")[0]
