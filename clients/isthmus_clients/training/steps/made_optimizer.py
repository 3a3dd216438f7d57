"""What a task makes as the optimizer of a device's round."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from isthmus.errors import TaskError
from isthmus.task import Participant, Task
from isthmus.task.definition import Parameters, defines
from isthmus.task.made_optimizers import SEVERAL, made_by


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
