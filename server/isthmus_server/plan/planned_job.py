"""What a job needs, costs and reaches: all parts of its plan, and what is said about time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from isthmus.errors import UserError
from isthmus.job import Job, with_changes
from isthmus.job.planned import FAKE, Figure, PlannedLayout, PlannedRanks, RanksQuestion
from isthmus.task import Task
from isthmus_server.plan.calibration import WHICH_RANKS, Calibration, PlanError
from isthmus_server.plan.changed_durations import Durations
from isthmus_server.plan.changes import ChangedPlan, changed_plans
from isthmus_server.plan.compared_layouts import LAUNCHES, SHORT_STEP, ordered
from isthmus_server.plan.cost import possible_regimes
from isthmus_server.plan.failed_attempts import FailedAttempts
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.replayed_policy import with_policy
from isthmus_server.plan.sides import Sides
from isthmus_server.plan.step_figures import step_figures, time_of_step
from isthmus_server.plan.step_time import assumptions, peak_of, step_time
from isthmus_server.plan.timed_rounds import TimedRounds
from isthmus_server.plan.trials import Trials, policies_of
from isthmus_server.strategy.loading import check_names, load_policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """What a job needs and costs, before it runs."""

    job: Job
    options: PlanOptions
    sides: Sides
    changes: list[ChangedPlan]
    calibration: Calibration | None
    """None without `calibrate`."""
    timed: TimedRounds | None
    """Federated rounds that were timed; None for a job without devices."""
    trials: Trials | None
    """None without `trial`."""
    failed: FailedAttempts | None = None
    """Attempts at rounds of devices that fail; None if it is not known how many do."""
    command: str = ""
    """The command that makes the plan; empty if the job is no file."""

    @classmethod
    def of(cls, job: Job, task: Task, base: Path, options: PlanOptions, command: str = "") -> Self:
        """Compute it; nothing is trained but what `measure` and `trial` ask for.

        Federated rounds are timed if the job has speeds of devices.

        Args:
            job: the job.
            task: its task.
            base: the job file's folder.
            options: what is asked.
            command: that asks it, if the job is a file.

        Raises:
            UserError: the job cannot run, in the words of `isthmus job check`; or the options do
                not fit.
        """
        options.check()
        check_names(options.policies, "--policies")
        if options.nodes is not None:
            peak_of(options.nodes.gpu, job)
        ranks = job.datacenter.ranks if options.ranks is None else options.ranks
        by_rate = options.gpu is not None or options.tflops is not None or options.measure
        memory = options.memory_of_rank
        question = RanksQuestion(
            on_gpus=options.on_gpus,
            layouts=options.layouts,
            measure=options.measure,
            traffic=options.gpu is not None,
            collectives=options.collectives,
            operations_of_layouts=by_rate,
            memory=None if memory is None else memory * 2**30,
        )
        calibration = None
        if options.calibrate is not None:  # before what takes long
            calibration = Calibration.of(options.calibrate, job, base)
        sides = Sides.of(job, task, base, ranks, question, options.mbit)
        compared = sides.datacenter
        if compared is None and ranks:
            compared = _ranks_of_policies(job, task, base, ranks, question, options.policies)
        if compared is None:
            _refuse_about_ranks(options, job, ranks)
        regimes = possible_regimes(job, load_policy(job.strategy), datacenter=bool(ranks))
        timed = None
        if sides.devices is not None:
            parameters = int(sides.devices.memory[0].value)
            mixed = any(kind != "federated" for kind in regimes)
            timed = TimedRounds.of(job, base, parameters, mixed=mixed)
        durations = Durations(base=base, options=options, calibration=calibration, timed=timed)
        as_it_is = durations.of(job, sides)
        sides = sides.with_failed(as_it_is.failed)
        changes = [ChangedPlan.of("as it is", {}, sides, sides, job.budget, as_it_is)]
        changes += changed_plans(job, task, base, ranks, sides, durations)
        found = cls(
            job=job,
            options=options,
            sides=dataclasses.replace(sides, datacenter=compared),
            changes=changes,
            calibration=calibration,
            timed=timed,
            trials=None,
            failed=as_it_is.failed,
            command=command,
        )
        if options.trial is None:
            return found
        names = options.policies or policies_of(job, regimes, datacenter=bool(ranks))
        step = found.time_of_step
        trials = Trials.of(job, base, names, options.trial, ranks, timed, step)
        return dataclasses.replace(found, trials=trials)

    @property
    def trained(self) -> str:
        """What was trained for the plan, a clause."""
        parts = []
        if self.options.measure:
            parts.append("some steps were measured here")
        if self.trials is not None:
            parts.append(self.trials.trained)
        return " and ".join(parts) or "nothing was trained or booked"

    @property
    def limits(self) -> list[str]:
        """What ends the run before its last round, sentences."""
        limits = {"budget": self.job.budget, "device_bytes": self.job.device_bytes}
        ends = [
            f"before a round that exceeds {name}={limit:.15g}"
            for name, limit in limits.items()
            if limit is not None
        ]
        if self.job.seconds is not None:
            ends.append(f"before a round that would begin after seconds={self.job.seconds:.15g}")
        target = self.job.strategy.target_metric
        if target is not None:
            ends.append(f"after the round that reaches strategy.target_metric, {target}")
        patience = self.job.evaluation.patience
        if patience is not None:
            ends.append(
                f"after evaluation.patience={patience} evaluated rounds without a better one"
            )
        return [
            f"figures of the run are of {self.job.rounds} rounds, and it ends {each}"
            for each in ends
        ]

    @property
    def of_failed(self) -> str:
        """What the cost has of attempts that fail, a clause."""
        if self.failed is None:
            return "what failed attempts cost is not in it"
        return f"failed attempts are in it with their mean: {self.failed.how}"

    # -- the datacenter ----------------------------------------------------------------------------

    @property
    def time_of_step(self) -> float | None:
        """Seconds of a step, in the middle of what they can be; None if they are not known."""
        if self.sides.datacenter is None:
            return None
        return time_of_step(self.step(self.sides.datacenter))

    def step(self, ranks: PlannedRanks) -> list[Figure]:
        """Operations of a step, the rate, and the seconds of a step, a round and the run.

        Without a rate or a measured step there are operations only.
        """
        return step_figures(self.job, ranks, self.options, self.calibration)

    def step_seconds(self, ranks: PlannedRanks, layout: PlannedLayout) -> float | None:
        """Seconds of a step in a layout that is compared, by what those of the job's own are.

        None if they are not known, or there is no rate.
        """
        if layout.operations is None:
            return None
        if self.options.nodes is not None:
            other = dataclasses.replace(
                ranks,
                layout=layout,
                examples=layout.examples,
                operations=layout.operations,
                traffic=layout.traffic,
            )
            job = with_changes(self.job, layout.changes(ranks.ranks))
            step = step_time(job, other, self.options.nodes, self.options.peak_share)
            return None if step is None else step.seconds
        rate = ranks.rate if self.options.tflops is None else self.options.tflops * 1e12
        return None if rate is None else layout.operations / rate

    @property
    def assumptions(self) -> list[str]:
        """What the time of a step on named GPUs assumes, sentences; none without `gpu`."""
        nodes = self.options.nodes
        if nodes is None:
            return []
        found = assumptions(self.job, nodes, self.options.peak_share)
        step = self.time_of_step
        return [*found, LAUNCHES] if step is not None and step < SHORT_STEP else found

    @property
    def has_gpu(self) -> bool:
        """Whether the time of a step is that of a named GPU, with messages."""
        return self.options.gpu is not None

    def replicas(self, ranks: PlannedRanks, layout: PlannedLayout) -> tuple[int, int, int]:
        """Figures of a layout that is compared, for its row; see `Compares.replicas`."""
        section = with_changes(self.job, layout.changes(ranks.ranks)).datacenter
        replicas = section.replicas(ranks.ranks)
        each = section.for_replicas(replicas)
        return replicas, replicas * each.batch_size, each.accumulate

    def goodput(self, ranks: PlannedRanks) -> list[Figure]:
        """How much of the time trains, where ranks fail; nothing if nothing is said of failures."""
        failures = self.options.failures(ranks.ranks)
        if failures is None:
            return []
        times = {each.name: each for each in self.step(ranks)}
        step = times.get("time of a step")
        run = times.get("time of the run")
        interval = None
        if step is not None:
            # Without steps between checkpoints, there is one at the end of each round.
            steps = self.job.datacenter.checkpoint_steps or self.job.datacenter.steps
            interval = min(steps, self.job.datacenter.steps) * step.highest
        return failures.figures(interval, None if run is None else run.highest)

    def fits(self, layout: PlannedLayout) -> bool | None:
        """Whether a layout fits the memory that was given; None if that is not known."""
        memory = self.options.memory_of_rank
        if memory is None or not layout.peak:
            return None
        return layout.peak <= memory * 2**30

    # -- the run that was measured -----------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Ranks of the planned datacenter; 0 for none."""
        given = self.options.ranks
        return self.job.datacenter.ranks if given is None else given

    @property
    def which_ranks(self) -> str:
        """A sentence that the run does not say what its ranks were; empty if it is no matter."""
        is_asked = self.options.device is None and self.options.gpu is None
        ranks = self.sides.datacenter
        if self.calibration is None or ranks is None or not ranks.on_gpus or not is_asked:
            return ""
        return WHICH_RANKS

    @property
    def measured(self) -> list[Figure]:
        """What the calibrating run measured, and what follows from it for the job."""
        return [] if self.calibration is None else self.calibration.figures(self.job, self.ranks)

    @property
    def errors(self) -> list[PlanError]:
        """What the plan has of the figures that the calibrating run measured, and its error.

        The run may have had other settings than the job: then the error says what they change.
        """
        if self.calibration is None or self.sides.devices is None:
            return []
        devices = self.sides.devices
        received = _ranged(devices.received)
        sent = _ranged(devices.sent)
        planned = {"to a device in a round": received, "from a device in a round": sent}
        if self.timed is not None and self.timed.seconds:
            planned["federated round"] = self.timed.median
        measured = self.calibration.measured
        return [
            PlanError.of(figure, measured[name])
            for name, figure in planned.items()
            if name in measured
        ]

    # -- for programs ------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All figures, each with its unit and how it was obtained."""
        ranks = self.sides.datacenter
        devices = self.sides.devices
        calibration = None
        if self.calibration is not None:
            calibration = {
                "run_id": self.calibration.run_id,
                "figures": [each.to_json() for each in self.measured],
                "note": self.calibration.note(self.job, self.ranks),
                "errors": [each.to_json() for each in self.errors],
            }
        return {
            "job": self.job.name,
            "rounds": self.job.rounds,
            "command": self.command,
            "datacenter": None if ranks is None else self._ranks_json(ranks),
            "devices": None if devices is None else devices.to_json() | self._timed_json(),
            "privacy": [each.to_json() for each in self.sides.privacy],
            "cost": [each.to_json() for each in self.sides.cost],
            "tokens": [each.to_json() for each in self.sides.tokens],
            "limits": self.limits,
            "quality": None if self.trials is None else self.trials.to_json(),
            "calibration": calibration,
            "changes": [each.to_json() for each in self.changes],
        }

    def _timed_json(self) -> dict[str, Any]:
        timed = self.timed
        assert timed is not None
        figures = [each.to_json() for each in timed.figures]
        return {"duration": figures, "duration_note": timed.unknown or timed.note}

    def _ranks_json(self, ranks: PlannedRanks) -> dict[str, Any]:
        return {
            "ranks": ranks.ranks,
            "device": "gpu" if ranks.on_gpus else "cpu",
            "examples": ranks.examples,
            "layout": self._layout_json(ranks.layout),
            "layouts": [
                {
                    **self._layout_json(each),
                    "examples": each.examples or None,
                    "step_seconds": self.step_seconds(ranks, each),
                }
                for each in ordered(self, ranks)
            ],
            "largest": {"name": ranks.largest[0], "bytes": ranks.largest[1], "how": FAKE},
            "step": [each.to_json() for each in self.step(ranks)],
            "unknown": ranks.unknown or ranks.traffic_unknown,
            "assumptions": self.assumptions,
            "goodput": [each.to_json() for each in self.goodput(ranks)],
            "collectives": ranks.collectives or None,
        }

    def _layout_json(self, layout: PlannedLayout) -> dict[str, Any]:
        return {
            "keys": dict(layout.keys),
            "memory": dict(layout.memory),
            "how": FAKE,
            "fits": self.fits(layout),
            "refused": layout.refused,
        }


def _ranged(figures: list[Figure]) -> Figure:
    """One figure from the least to the most of several."""
    least = min(each.value for each in figures)
    most = max(each.highest for each in figures)
    return dataclasses.replace(figures[0], value=least, most=most)


def _ranks_of_policies(
    job: Job,
    task: Task,
    base: Path,
    ranks: int,
    question: RanksQuestion,
    policies: Sequence[str],
) -> PlannedRanks | None:
    """The datacenter of a job whose own policy trains nothing there, if a compared one does.

    Args:
        job: the job.
        task: its task.
        base: the job file's folder.
        ranks: of the datacenter.
        question: about them.
        policies: that are compared with the job's.

    Returns:
        None if no policy trains there that the job can have.
    """
    for name in policies:
        try:
            found = Sides.of(with_policy(job, name), task, base, ranks, question).datacenter
        except UserError:  # its trial says why
            continue
        if found is not None:
            return found
    return None


def _refuse_about_ranks(options: PlanOptions, job: Job, ranks: int) -> None:
    """Refuse options about ranks for a job that trains nothing in a datacenter.

    Args:
        options: what is asked.
        job: the job.
        ranks: of the datacenter; 0 for none.

    Raises:
        UserError: with the first one.
    """
    given = {
        "--layouts": options.layouts,
        "--memory-gib": options.memory_gib is not None,
        "--tflops": options.tflops is not None,
        "--measure": options.measure,
        "--gpu": options.gpu is not None,
        "--mtbf-hours": options.mtbf_hours is not None,
        "--collectives": options.collectives,
    }
    if ranks:
        missing = (
            f"strategy.policy={job.strategy.policy!r} trains no rounds there; choose another, such "
            "as --set strategy.policy=datacenter,"
        )
    else:
        missing = "the job has none; give --ranks"
    for option, is_given in given.items():
        if is_given:
            raise UserError(
                f"{option} is about the ranks of a datacenter, and {missing} or leave it out"
            )
