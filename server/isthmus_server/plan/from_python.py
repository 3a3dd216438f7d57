"""`isthmus.plan`: the plan of a job from a script or a notebook."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.task import Task
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.plan import JobPlan, plan_of
from isthmus_server.python.run import job_arguments

_OPTIONS = frozenset(each.name for each in dataclasses.fields(PlanOptions))


def plan(
    job: Path | str | Mapping[str, Any], task: type[Task] | None = None, **given: Any
) -> JobPlan:
    """Say what a job needs and costs before it runs, as the command `isthmus plan` does.

    Args:
        job: a job file, or a job's tables as a mapping.
        task: the task, in place of the job's `task.source`.
        **given: the options of the command, such as ``ranks=64, layouts=True, memory_gib=40``
            (all of them are the fields of `PlanOptions`), and other values of the job's keys, as
            for `isthmus.run`.

    Returns:
        The plan; `to_json()` has its figures, `lines()` the text, and `html()` the page.

    Raises:
        UserError: the job or the task cannot be used, or the options do not fit: one sentence.
    """
    options = PlanOptions.of_values({key: value for key, value in given.items() if key in _OPTIONS})
    overrides = {key: value for key, value in given.items() if key not in _OPTIONS}
    with tempfile.TemporaryDirectory(prefix="isthmus-plan-") as made:
        path, changes = job_arguments(job, task, overrides, Path(made))
        made_up = task is not None or isinstance(job, Mapping)
        return plan_of(path, changes, options, made_up=made_up)
