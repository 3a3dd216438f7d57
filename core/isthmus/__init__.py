"""Isthmus: one model, trained by a datacenter and by a fleet of edge devices.

    from isthmus import Task        # what is learned
    isthmus run JOB.toml            # everything on this machine

Reading order: `isthmus.task`, `isthmus.job`, `isthmus_server.rounds.coordinator`.
"""

from isthmus.errors import IsthmusError, JobError, TaskError, UpdateError, UserError
from isthmus.task.definition import Participant, Task
from isthmus.task.device_sums.metrics import BinnedScores, Confusion, Mean
from isthmus.task.loading import load_task

__version__ = "0.2.0"

__all__ = [
    "BinnedScores",
    "Confusion",
    "IsthmusError",
    "JobError",
    "Mean",
    "Participant",
    "Task",
    "TaskError",
    "UpdateError",
    "UserError",
    "load_task",
]
