"""What a task makes as the optimizer of a device's round, with the schedule of its rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from torch import nn

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.job.learning_rate import RoundPosition
from isthmus.task import Participant, Task
from isthmus.task.definition import Parameters, defines
from isthmus.task.made_optimizers import SEVERAL, made_by
from isthmus.task.optimizers import ScheduleState, TaskOptimizers, job_schedule


def make_optimizer(
    task: Task, participant: Participant, round_: int, trained: Mapping[str, nn.Parameter]
) -> object:
    """What the task's `optimizer()` returns for a round and parameters by name.

    Raises:
        TaskError: it failed, froze a parameter, or returned several for steps that only know one.
    """
    if participant.round != round_:
        participant = dataclasses.replace(participant, round=round_)
    made = made_by(task, Parameters(trained.items()), participant)
    if isinstance(made, Mapping) and not defines(task, "training_step"):
        raise TaskError(SEVERAL)
    return made


def round_optimizers(
    job: Job,
    made: object,
    trained: Mapping[str, nn.Parameter],
    position: RoundPosition,
    earlier: Mapping[str, ScheduleState],
    check: Callable[[], None] = lambda: None,
) -> TaskOptimizers:
    """The optimizers of a round, with the rates of its first step.

    Args:
        job: it may have a schedule.
        made: what `make_optimizer` returned.
        trained: what it was made for.
        position: of the round.
        earlier: the schedules of the round before.
        check: called during long ways of a schedule.

    Raises:
        TaskError: the task made something else, or a schedule cannot be followed.
    """
    batch = position.cohort * job.federated.batch_size
    schedule = job_schedule(job, batch)
    optimizers = TaskOptimizers(made, trained.values(), schedule, earlier)
    optimizers.check_round(position)
    optimizers.go_to(position.start, check)
    return optimizers
