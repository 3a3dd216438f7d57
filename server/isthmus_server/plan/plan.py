"""The plan of a job in its forms: lines for a terminal, JSON, and a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from isthmus.job import load_job
from isthmus.task import load_task
from isthmus_server.plan.lines import lines_of
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.page import plan_page
from isthmus_server.plan.planned_job import PlannedJob


class JobPlan(PlannedJob):
    """What a job needs and costs before it runs, as `isthmus plan` shows it."""

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        return lines_of(self)

    def html(self, now: float | None = None) -> str:
        """One page that loads nothing.

        `now` is when it is written, in Unix seconds; by default the clock's time.
        """
        return plan_page(self, now)


def plan_of(
    path: Path, overrides: Iterable[str], options: PlanOptions, *, made_up: bool = False
) -> JobPlan:
    """The plan of a job file; see `PlannedJob.of`.

    Args:
        path: the job file.
        overrides: changes of its keys, `key=value`.
        options: what is asked.
        made_up: whether the file is there for this call only, so that no command can name it.

    Raises:
        UserError: the job or its task cannot be used, see `PlannedJob.of`.
    """
    overrides = list(overrides)
    job = load_job(path, overrides)
    base = path.resolve().parent
    data = job.task.data_in(base)
    task = load_task(job.task.source, job.task.settings, base=base, data=data)
    changes = [word for each in overrides for word in ("--set", each)]
    words = ["isthmus", "plan", str(path), *changes, *options.words]
    return JobPlan.of(job, task, base, options, "" if made_up else shlex.join(words))
