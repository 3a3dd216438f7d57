"""`isthmus.plan`: the plan of a job from a script or a notebook."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.task import Task
from isthmus_server.plan.plan import JobPlan, PlanOptions, plan_of
from isthmus_server.python.run import job_arguments


def plan(
    job: Path | str | Mapping[str, Any],
    task: type[Task] | None = None,
    *,
    ranks: int | None = None,
    device: str | None = None,
    layouts: bool = False,
    memory_gib: float | None = None,
    tflops: float | None = None,
    measure: bool = False,
    mbit: float | None = None,
    **overrides: Any,
) -> JobPlan:
    """Say what a job needs and costs before it runs, as the command `isthmus plan` does.

    Args:
        job: a job file, or a job's tables as a mapping.
        task: the task, in place of the job's `task.source`.
        ranks: of the datacenter; by default those of the job.
        device: `gpu` or `cpu`, what the ranks are; by default `gpu`, and `cpu` with `measure`.
        layouts: compare all layouts that so many ranks allow.
        memory_gib: memory of a rank in GiB, to say what fits.
        tflops: operations of a rank in 10**12 per second.
        measure: train some steps on this machine, to measure that rate.
        mbit: rate of a device's link in megabits per second.
        **overrides: other values of the job's keys, as for `isthmus.run`.

    Returns:
        The plan; `to_json()` has its figures, and `lines()` the text.

    Raises:
        UserError: the job or the task cannot be used, or the options do not fit: one sentence.
    """
    options = PlanOptions(
        ranks=ranks,
        device=device,
        layouts=layouts,
        memory_gib=memory_gib,
        tflops=tflops,
        measure=measure,
        mbit=mbit,
    )
    with tempfile.TemporaryDirectory(prefix="isthmus-plan-") as made:
        path, changes = job_arguments(job, task, overrides, Path(made))
        return plan_of(path, changes, options)
