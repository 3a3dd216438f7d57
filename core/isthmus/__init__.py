"""Isthmus: one model, trained by a datacenter and by a fleet of edge devices.

    from isthmus import Task        # what is learned
    isthmus run JOB.toml            # everything on this machine
    isthmus.run("JOB.toml")         # the same from Python

Reading order: `isthmus.task`, `isthmus.job`, `isthmus_server.rounds.coordinator`.
"""

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from isthmus.errors import IsthmusError, JobError, TaskError, UpdateError, UserError
from isthmus.task.definition import Participant, StepLoss, Task
from isthmus.task.loading import load_task
from isthmus.task.measurements.columns import Category, Column
from isthmus.task.measurements.metrics import BinnedScores, Confusion, Mean

if TYPE_CHECKING:
    run: Any
    simulate: Any
    plan: Any
    load_model: Any
    Run: Any
    PackedText: Any
    Partitioner: Any

__version__ = "0.2.0"

__all__ = [
    "BinnedScores",
    "Category",
    "Column",
    "Confusion",
    "IsthmusError",
    "JobError",
    "Mean",
    "PackedText",
    "Participant",
    "Partitioner",
    "Run",
    "StepLoss",
    "Task",
    "TaskError",
    "UpdateError",
    "UserError",
    "load_model",
    "load_task",
    "plan",
    "run",
    "simulate",
]


_TAKES_TORCH = {
    "PackedText": "isthmus.task.packed_text",
    "Partitioner": "isthmus.task.partitions",
}
"""Where this package itself has what imports PyTorch."""


def __getattr__(name: str) -> Any:
    """Find what takes PyTorch or the server's package: a device that waits has neither."""
    if name in _TAKES_TORCH:
        return getattr(importlib.import_module(_TAKES_TORCH[name]), name)
    for point in entry_points(group="isthmus.python", name=name):
        try:
            return point.load()
        except ModuleNotFoundError as error:
            from isthmus.extras import install_line

            raise ImportError(
                f"isthmus.{name} needs the package {error.name!r}, which is not installed; "
                f"{install_line('server')}"
            ) from error
    raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
