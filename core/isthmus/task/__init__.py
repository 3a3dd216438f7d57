"""Tasks: model, loss, data and optimizer in plain PyTorch, used by both regimes."""

from isthmus.task.definition import Participant, Task
from isthmus.task.loading import (
    check_installed,
    check_named,
    keep_process,
    load_named,
    load_task,
    user_code,
    user_traceback,
)

__all__ = [
    "Participant",
    "Task",
    "check_installed",
    "check_named",
    "keep_process",
    "load_named",
    "load_task",
    "user_code",
    "user_traceback",
]
