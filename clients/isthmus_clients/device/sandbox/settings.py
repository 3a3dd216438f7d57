"""What a task's process is told when it starts."""

from __future__ import annotations

from pathlib import Path

import pydantic

from isthmus.start.manifest import StartPlace
from isthmus.task import Participant
from isthmus_clients.device.sandbox.confinement import Confinement

DATA_NUMBERS = "ISTHMUS_DATA_NUMBERS"
"""Variable with the secret of the device's random numbers, see `isthmus.task.own_numbers`."""


class WorkerSettings(pydantic.BaseModel):
    """Settings of a task's process; they contain nothing secret."""

    participant: Participant
    data: Path | None
    tasks: Path
    threads: int
    device: str
    """What to train on, see `isthmus_clients.training.accelerator`."""
    cpu_percent: int | None
    confinement: Confinement
    start: StartPlace | None = None
    """Where the files are that the run's model starts from; None for where the job says."""
