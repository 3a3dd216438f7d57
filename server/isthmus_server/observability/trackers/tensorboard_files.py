"""Event files for TensorBoard, in the run's directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from isthmus_server.observability.trackers.tracker import TrackedRun


class TensorBoardFiles:
    """Writes `tracking/tensorboard`; `tensorboard --logdir RUN` shows it."""

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, run: TrackedRun) -> str:
        """Open a file; a continued run gets a further one."""
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self._writer = writer(str(run.folder))
        if not run.earlier:
            rows = "\n".join(f"    {name} = {json.dumps(v)}" for name, v in run.parameters.items())
            self._writer.add_text("job", rows)
        return run.run_id

    def log(self, round_: int, figures: Mapping[str, float]) -> None:
        """Write scalars; the step is the round."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, round_)
        self._writer.flush()

    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Write scalars of an optimizer step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def end(self, failed: bool) -> None:
        """Close the file."""
        self._writer.close()
